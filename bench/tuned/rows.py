"""Rows of the table, the limits that they must keep, and the file that they are kept in between runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

NEAREST, AWQ, GPTQ, GPTQ_INTERCEPT = "nearest", "awq", "gptq", "gptq + intercept"
BALANCED, BEST = "balanced", "best"
WAYS = (NEAREST, AWQ, GPTQ, GPTQ_INTERCEPT, BALANCED, BEST)
Measure = Literal["score", "decibels", "seconds"]


@dataclass(frozen=True)
class Row:
    """One way to quantize one network; `score` is an accuracy, or a perplexity, which is better when it is lower."""

    model: str
    precision: str
    how: str
    score: float
    error: float  # of the difference to float
    decibels: float | None
    seconds: float
    is_perplexity: bool = False
    limits: str = ""
    missed: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.how}: {self.missed}"

    @property
    def holds(self) -> bool:
        return not self.missed


@dataclass(frozen=True)
class Limit:
    """A measure of a tuned row against a number, or against another row of the same precision."""

    of: Measure
    by: float
    than: str = ""  # "float", or how another row was made
    how: str = ""  # the only way that it binds

    def text(self) -> str:
        names: dict[Measure, str] = {"score": "score", "decibels": "dB", "seconds": "CPU s"}
        if not self.than:
            return f"{names[self.of]} {'below' if self.of == 'seconds' else 'at least'} {self.by:g}"
        if self.by == 0:
            return f"{names[self.of]} ahead of {self.than}"
        if self.by < 0:
            return f"{names[self.of]} within {-self.by:g} of {self.than}"
        return f"{self.by:g} {names[self.of]} above {self.than}"

    def is_kept(self, row: Row, others: Sequence[Row]) -> bool:
        sign = -1 if self.of == "seconds" or (self.of == "score" and row.is_perplexity) else 1
        base = 0.0
        if self.than:
            other = next((each for each in others if each.how == self.than), None)
            value = None if other is None else getattr(other, self.of)
            if value is None:
                return False
            base = value
        found = getattr(row, self.of)
        return found is not None and sign * found >= sign * base + (self.by if self.than else sign * self.by)


class Kept:
    """Rows by network, precision and way, written after each, so that a run that was stopped goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._saved()

    def add(self, row: Row) -> None:
        """Another run may have added rows since."""
        self.rows = self._saved() | self.rows | {(row.model, row.precision, row.how): row}
        self._write()

    def ordered(self) -> list[Row]:
        """By network and precision as they came, float first, and ways in the order of `WAYS`."""
        models, precisions = (list(dict.fromkeys(key[place] for key in self.rows)) for place in (0, 1))
        precisions = sorted(precisions, key=lambda precision: precision != "float")
        known = {how: place for place, how in enumerate(WAYS)}

        def place(row: Row) -> tuple[int, int, int]:
            return models.index(row.model), precisions.index(row.precision), known.get(row.how, len(known))

        return sorted(self.rows.values(), key=place)

    def forget(self, part: str) -> None:
        self.rows = {key: row for key, row in self.rows.items() if part not in " ".join(key)}
        self._write()

    def _saved(self) -> dict[tuple[str, str, str], Row]:
        found = json.loads(self.path.read_text()) if self.path.exists() else []
        rows = [Row(**{key: value for key, value in each.items() if key != "holds"}) for each in found]
        return {(row.model, row.precision, row.how): row for row in rows}

    def _write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps([{**asdict(each), "holds": each.holds} for each in self.ordered()], indent=2))


def shown(rows: Sequence[Row]) -> Table:
    table = Table(title="below 8 bits, calibrated and judged on different data")
    for column in ("network", "", "how", "score", "+-", "dB", "CPU s", "limits"):
        table.add_column(column)
    for row in rows:
        level = "" if row.decibels is None or math.isinf(row.decibels) else f"{row.decibels:.1f}"
        numbers = (f"{row.score:.2f}", f"{row.error:.2f}", level, f"{row.seconds:.1f}", row.missed or row.limits)
        table.add_row(row.model, row.precision, row.how, *numbers, style=None if row.holds else "bold red")
    return table
