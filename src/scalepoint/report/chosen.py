"""What was chosen for the weights: a precision for every layer, and codes by the data. Plain data of the report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AllocatedLayer:
    """One layer: what it got, and the noise to signal that it is expected to put on the output at each choice."""

    name: str
    kind: str
    weights: int
    chosen: str
    errors: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)  # choice -> why the target does not run it


@dataclass(frozen=True)
class FrontPoint:
    """One point of error against cost, and how many layers have which choice there."""

    cost: float
    error: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Allocated:
    """A precision for every layer. `unit` is what `limit`, `reached` and the costs of the points are in: size as a
    share of the float file's, bits of a weight on average, speed in times the float model's by MACs, cost as shares of
    size and time together."""

    unit: str
    reached: float
    error: float
    layers: tuple[AllocatedLayer, ...]
    front: tuple[FrontPoint, ...]
    uniform: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # choice for all -> cost, error
    limit: float | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many layers got which choice, the most frequent first."""
        found: dict[str, int] = {}
        for each in self.layers:
            found[each.chosen] = found.get(each.chosen, 0) + 1
        return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


@dataclass(frozen=True)
class ChosenCodes:
    """One tuned layer: the error of its output over its energy, on held-out rows, with the nearest and the chosen
    codes; the share of the codes that moved."""

    name: str
    kind: str
    before: float
    after: float
    moved: float
    step: str
    notes: str = ""

    @property
    def gain_db(self) -> float:
        if not (0 < self.after < math.inf and 0 < self.before < math.inf):
            return 0.0
        return 10 * math.log10(self.before / self.after)


@dataclass(frozen=True)
class Tuned:
    """All layers whose codes, scales and biases were chosen by the data; `left` names the others with the reason."""

    layers: tuple[ChosenCodes, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0

    @property
    def moved(self) -> int:
        """How many layers have other than the nearest codes."""
        return sum(each.moved > 0 for each in self.layers)
