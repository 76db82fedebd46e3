"""Every layer at every width: what it is expected to put on the output, and what it costs; the best within a budget."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from scalepoint.allocation.front import (
    Allocation,
    ChoiceTable,
    Item,
    PrecisionChoice,
    compute_front,
    find_best_within,
    sum_choices,
    thin_front,
    trim_allocation,
)
from scalepoint.budget import Budget, BudgetUnit
from scalepoint.errors import UsageError
from scalepoint.quantize import Override, QuantConfig
from scalepoint.results import FrontPoint, LayerPrecision, PrecisionAllocation
from scalepoint.support.jsonable import to_jsonable

TRIM_SHARE = 0.01  # of the error: what is worth less is not raised, even where a budget allows it
MAX_FRONT_POINTS = 200  # of a PrecisionAllocation
CostUnit = BudgetUnit | Literal["cost"]


@dataclass(frozen=True)
class Width:
    """One way to run some layers."""

    name: str
    bits: float  # of a weight
    error: float  # the noise to signal that it is expected to put on the output
    size: float  # bytes
    time: float  # MACs of a float kernel
    said: Mapping[str, Any]  # fields of the override that asks for it


@dataclass(frozen=True)
class WidthRow:
    """Layers that share a choice."""

    layers: tuple[str, ...]
    kind: str
    weights: int
    widths: tuple[Width, ...]
    refused: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.layers[0]


@dataclass(frozen=True)
class Widths:
    """All layers that have a choice, and what the rest of the model costs."""

    rows: tuple[WidthRow, ...]
    float_size: float
    float_time: float
    rest_size: float
    rest_time: float

    def items(self, unit: CostUnit) -> list[Item]:
        return [
            Item(
                row.name,
                tuple(PrecisionChoice(each.name, each.error, self._cost(row, each, unit)) for each in row.widths),
            )
            for row in self.rows
        ]

    def table(self, unit: CostUnit) -> ChoiceTable:
        """Row -> name of a width -> its error and cost."""
        return {item.name: {choice.name: choice for choice in item.choices} for item in self.items(unit)}

    def _cost(self, row: WidthRow, width: Width, unit: CostUnit) -> float:
        """What adds up: bytes, bits, MACs; "cost" is the shares of size and time together."""
        if unit == "bits":
            return width.bits * row.weights
        if unit == "size":
            return width.size
        if unit == "speed":
            return width.time
        return width.size / self.float_size + width.time / (self.float_time or 1.0)

    def to_unit(self, unit: CostUnit, cost: float) -> float:
        """A sum of costs in the unit of the budget."""
        if unit == "bits":
            return cost / (sum(row.weights for row in self.rows) or 1)
        if unit == "size":
            return (cost + self.rest_size) / self.float_size
        return self.float_time / max(cost + self.rest_time, 1e-30) if unit == "speed" else cost

    def limit(self, budget: Budget) -> float:
        """A budget as a sum of costs."""
        if budget.unit == "bits":
            return budget.limit * sum(row.weights for row in self.rows)
        if budget.unit == "size":
            return budget.limit * self.float_size - self.rest_size
        return self.float_time / budget.limit - self.rest_time

    def find_best(self, budget: Budget) -> Allocation:
        """The best allocation of a budget; an error says what the least is that could be reached."""
        items = self.items(budget.unit)
        found = find_best_within(items, self.limit(budget))
        if found is not None:
            return trim_allocation(items, found, TRIM_SHARE)
        least = self.to_unit(budget.unit, compute_front(items)[0].cost)
        names = dict.fromkeys(width.name for row in self.rows for width in row.widths)
        what = {
            "size": f"the smallest is {least:.3g} of the float file",
            "bits": f"the fewest are {least:.3g} bits a weight",
            "speed": f"the fastest is {least:.3g} times the float model, by MACs",
        }[budget.unit]
        raise UsageError(
            f"budget {budget} cannot be reached with choices {', '.join(names)}: {what}. Give more, or narrower choices"
        )

    def config(self, config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
        """The config that asks for an allocation."""
        more = []
        for row in self.rows:
            width = next(each for each in row.widths if each.name == chosen[row.name])
            more += [Override(name=name, **width.said) for name in row.layers if width.said]
        return config.model_copy(update={"overrides": (*config.overrides, *more)})

    def allocation(self, chosen: Mapping[str, str], unit: CostUnit, limit: float | None = None) -> PrecisionAllocation:
        """Describe an allocation: the precision of each layer, and the front that it was chosen from.

        Args:
            chosen: Row -> name of its width.
            unit: Unit of all costs.
            limit: The budget, in the same unit.
        """
        table = self.table(unit)
        layers = tuple(
            LayerPrecision(
                name=name,
                kind=row.kind,
                weights=row.weights // len(row.layers),
                chosen=chosen[row.name],
                errors={width.name: width.error / len(row.layers) for width in row.widths},
                refused=row.refused,
            )
            for row in self.rows
            for name in row.layers
        )
        uniform = {}
        for width in dict.fromkeys(width.name for row in self.rows for width in row.widths):
            if all(width in widths for widths in table.values()):
                same = sum_choices(table, dict.fromkeys(table, width))
                uniform[width] = (self.to_unit(unit, same.cost), same.error)
        whole = sum_choices(table, chosen)
        return PrecisionAllocation(
            unit=unit,
            reached=self.to_unit(unit, whole.cost),
            error=whole.error,
            layers=layers,
            front=tuple(
                FrontPoint(self.to_unit(unit, point.cost), point.error, self._layer_counts(point.chosen))
                for point in thin_front(compute_front(self.items(unit)), MAX_FRONT_POINTS)
            ),
            uniform=uniform,
            limit=limit,
        )

    def _layer_counts(self, chosen: Mapping[str, str]) -> dict[str, int]:
        """Width -> number of layers that have it."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[chosen[row.name]] += len(row.layers)
        return dict(counts)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = to_jsonable(self)
        return found

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        return TypeAdapter(cls).validate_python(saved)
