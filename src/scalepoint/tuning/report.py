"""What tuning did, layer by layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.table import Table
from rich.text import Text

from scalepoint.support.formatting import one_line, printed
from scalepoint.support.jsonable import to_jsonable

ENOUGH = 4  # rows an unknown, below which solutions fit noise


@dataclass(frozen=True)
class TunedLayer:
    """One layer: the squared error of its outputs over their energy, nearest and chosen codes, on the rows that were
    fitted (by some of the outputs, where there are many) and on those that were held out."""

    name: str
    kind: str
    rows: int
    unknowns: int
    before: float
    after: float
    fitted_before: float
    fitted_after: float
    moved: float  # share of the codes that are not the nearest
    step: str  # after which the solution was the best on held-out rows; "" when nothing was better
    notes: str
    seconds: float

    @property
    def gain_db(self) -> float:
        if self.after <= 0 or self.before <= 0:
            return 0.0
        return 10 * math.log10(self.before / self.after)


@dataclass(frozen=True)
class TunedPiece:
    """Layers that were judged together where their block ends: its squared error over its energy on held-out samples,
    with nearest codes and as it ended; `how` is what stayed of the layers' solutions."""

    layers: tuple[str, ...]
    before: float
    after: float
    how: str
    notes: str
    seconds: float


@dataclass(frozen=True)
class TuneReport:
    """All quantized layers in graph order; `left` names those that were not tuned, with the reason."""

    layers: tuple[TunedLayer, ...]
    left: dict[str, str]
    batches: int
    samples: int
    seconds: float
    pieces: tuple[TunedPiece, ...] = ()

    @property
    def advice(self) -> str:
        """Whether more data would help, and how much; "" when there is enough."""
        few = [each for each in self.layers if each.rows < ENOUGH * each.unknowns]
        if not few:
            return ""
        worst = max(few, key=lambda each: each.unknowns / max(each.rows, 1))
        times = math.ceil(ENOUGH * worst.unknowns / max(worst.rows, 1))
        return (
            f"{len(few)} of {len(self.layers)} layers saw fewer than {ENOUGH} rows an unknown (fewest: "
            f"{one_line(worst.name)}, {worst.rows} rows for {worst.unknowns}): {times} times the {self.samples} "
            "samples would help more than any other step"
        )

    def table(self) -> Table:
        title = f"{len(self.layers)} layers tuned, {len(self.left)} left, {self.samples} samples, {self.seconds:.1f} s"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", overflow="fold")
        for column in ("dB before", "after", "moved", "rows", "n"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("how", overflow="fold")
        for each in self.layers:
            how = f"{each.step or 'nearest'}; {each.notes}"
            cells = (_level(each.before), _level(each.after), f"{each.moved:.0%}", str(each.rows), str(each.unknowns))
            table.add_row(Text(one_line(each.name)), *cells, Text(one_line(how)))
        for name, why in self.left.items():
            table.add_row(Text(one_line(name)), "", "", "", "", "", Text(one_line(f"left: {why}")))
        if self.advice:
            table.caption = Text(self.advice)
        return table

    def __str__(self) -> str:
        return printed(self.table())

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = to_jsonable(self)
        return found

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "TuneReport | None":
        """As to_dict gave it; None of nothing."""
        return TypeAdapter(cls).validate_python(saved) if saved else None


def _level(error: float) -> str:
    return "exact" if error <= 0 else f"{-10 * math.log10(error):.1f}"
