"""The table of all layers at all precisions with error, size and time; and the best choice within a budget.

A row is a layer, or several that must have the same precision. A Width is a precision of a row, with its error, size
and time. An allocation chooses one width for each row. The search in front.py works with one cost: there a Width
becomes a PrecisionChoice.
"""

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

# A layer keeps its cheaper precision if a better one saves less than this share of the error, even within the budget.
TRIM_SHARE = 0.01
MAX_FRONT_POINTS = 200  # of a PrecisionAllocation
CostUnit = BudgetUnit | Literal["cost"]


@dataclass(frozen=True)
class Width:
    """One precision of a row, and what it costs.

    Attributes:
        name: Its name, such as "int4".
        bits: Bits per weight.
        error: The noise to signal that the layers are expected to add to the output.
        size: Bytes.
        time: Time, as the number of float multiply-accumulates (MACs) that take equally long.
        override: Fields of the override that asks for this precision; empty if it is the precision that
            the config already gives.
    """

    name: str
    bits: float
    error: float
    size: float
    time: float
    override: Mapping[str, Any]


@dataclass(frozen=True)
class WidthRow:
    """Layers that must have the same precision, and the precisions to choose from.

    Attributes:
        layers: Names of the layers.
        kind: Kind of operation.
        weights: Number of weights of all layers.
        widths: The precisions.
        refused: Precision -> why the target does not run it.
    """

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
    """All layers that have a choice, and what the rest of the model costs.

    Attributes:
        rows: The layers.
        float_size: Bytes of the float model.
        float_time: Multiply-accumulates of the float model.
        rest_size: Bytes of everything that has no choice.
        rest_time: Multiply-accumulates of everything that has no choice.
    """

    rows: tuple[WidthRow, ...]
    float_size: float
    float_time: float
    rest_size: float
    rest_time: float

    def to_search_items(self, unit: CostUnit) -> list[Item]:
        """Convert the rows to items of the search for the best allocation."""
        return [
            Item(
                row.name,
                tuple(PrecisionChoice(width.name, width.error, self._cost(row, width, unit)) for width in row.widths),
            )
            for row in self.rows
        ]

    def to_choice_table(self, unit: CostUnit) -> ChoiceTable:
        """Return error and cost of each width: row -> name of the width -> choice."""
        return {item.name: {choice.name: choice for choice in item.choices} for item in self.to_search_items(unit)}

    def _cost(self, row: WidthRow, width: Width, unit: CostUnit) -> float:
        """Return the cost of one width, in a unit that can be added up: bits, bytes or MACs.

        For "cost" it is the share of the float model's size plus the share of its time. The rest of the model, which
        has no choice, is not included: for size and speed `to_unit` adds it once to the sum.
        """
        if unit == "bits":
            return width.bits * row.weights
        if unit == "size":
            return width.size
        if unit == "speed":
            return width.time
        return width.size / self.float_size + width.time / (self.float_time or 1.0)

    def to_unit(self, unit: CostUnit, cost: float) -> float:
        """Convert a sum of costs to the unit of the budget. Size and speed are of the whole model, with its rest."""
        if unit == "bits":
            return cost / (sum(row.weights for row in self.rows) or 1)
        if unit == "size":
            return (cost + self.rest_size) / self.float_size
        if unit == "speed":
            return self.float_time / max(cost + self.rest_time, 1e-30)
        return cost

    def to_cost_limit(self, budget: Budget) -> float:
        """Convert a budget to a limit for the sum of costs."""
        if budget.unit == "bits":
            return budget.limit * sum(row.weights for row in self.rows)
        if budget.unit == "size":
            return budget.limit * self.float_size - self.rest_size
        return self.float_time / budget.limit - self.rest_time

    def find_best(self, budget: Budget) -> Allocation:
        """Find the allocation with the least error within a budget.

        Args:
            budget: Limit of size, bits or speed.

        Raises:
            UsageError: Even the cheapest precisions exceed the budget. The message says what they cost.
        """
        items = self.to_search_items(budget.unit)
        best = find_best_within(items, self.to_cost_limit(budget))
        if best is not None:
            return trim_allocation(items, best, TRIM_SHARE)
        cheapest = self.to_unit(budget.unit, compute_front(items)[0].cost)
        names = dict.fromkeys(width.name for row in self.rows for width in row.widths)
        cheapest_text = {
            "size": f"the smallest is {cheapest:.3g} of the float file",
            "bits": f"the fewest are {cheapest:.3g} bits a weight",
            "speed": f"the fastest is {cheapest:.3g} times the float model, by MACs",
        }[budget.unit]
        raise UsageError(
            f"budget {budget} cannot be reached with choices {', '.join(names)}: {cheapest_text}. Raise the budget, "
            "or add choices with fewer bits"
        )

    def with_overrides(self, config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
        """Return a config with the overrides of an allocation added; `chosen` maps rows to names of widths."""
        overrides = []
        for row in self.rows:
            width = next(width for width in row.widths if width.name == chosen[row.name])
            overrides += [Override(name=name, **width.override) for name in row.layers if width.override]
        return config.model_copy(update={"overrides": (*config.overrides, *overrides)})

    def describe_allocation(
        self, chosen: Mapping[str, str], unit: CostUnit, limit: float | None = None
    ) -> PrecisionAllocation:
        """Describe an allocation: the precision of each layer, and the front that it was chosen from.

        Args:
            chosen: Row -> name of its width.
            unit: Unit of all costs.
            limit: The budget, in the same unit.
        """
        table = self.to_choice_table(unit)
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
        total = sum_choices(table, chosen)
        return PrecisionAllocation(
            unit=unit,
            reached=self.to_unit(unit, total.cost),
            error=total.error,
            layers=layers,
            front=tuple(
                FrontPoint(self.to_unit(unit, point.cost), point.error, self._layer_counts(point.chosen))
                for point in thin_front(compute_front(self.to_search_items(unit)), MAX_FRONT_POINTS)
            ),
            uniform=self._uniform_costs(table, unit),
            limit=limit,
        )

    def _uniform_costs(self, table: ChoiceTable, unit: CostUnit) -> dict[str, tuple[float, float]]:
        """Return cost and error if all layers have the same width, for each width that all layers can have."""
        uniform = {}
        for name in dict.fromkeys(width.name for row in self.rows for width in row.widths):
            if all(name in choices for choices in table.values()):
                same = sum_choices(table, dict.fromkeys(table, name))
                uniform[name] = (self.to_unit(unit, same.cost), same.error)
        return uniform

    def _layer_counts(self, chosen: Mapping[str, str]) -> dict[str, int]:
        """Return the number of layers by width."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[chosen[row.name]] += len(row.layers)
        return dict(counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values that JSON can store."""
        values: dict[str, Any] = to_jsonable(self)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a table that to_dict made."""
        return TypeAdapter(cls).validate_python(values)
