"""What migrations did, place by place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.table import Table
from rich.text import Text

from scalepoint.support.formatting import render_as_text, to_one_line
from scalepoint.support.jsonable import to_jsonable


@dataclass(frozen=True)
class MigrationRow:
    """One place: what was done there, or why nothing."""

    migration: str
    name: str
    done: bool
    note: str


@dataclass(frozen=True)
class MigrationReport:
    """All places in order. `change` is what the float output moved by, against its norm, on the compared batches;
    `added` names parameters that the float model has not."""

    rows: tuple[MigrationRow, ...] = ()
    change: float = 0.0
    added: tuple[str, ...] = ()

    @property
    def done(self) -> tuple[MigrationRow, ...]:
        return tuple(row for row in self.rows if row.done)

    @property
    def refused(self) -> tuple[MigrationRow, ...]:
        return tuple(row for row in self.rows if not row.done)

    def summary(self) -> str:
        return f"{len(self.done)} done, {len(self.refused)} refused, float output within {self.change:.1e}"

    def table(self) -> Table:
        table = Table(
            title=f"migrations: {self.summary()}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for column in ("migration", "where", "what"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            note = row.note if row.done else f"refused: {row.note}"
            table.add_row(row.migration, Text(to_one_line(row.name)), Text(to_one_line(note)))
        return table

    def __str__(self) -> str:
        return render_as_text(self.table())

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = to_jsonable(self)
        return found

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "MigrationReport | None":
        """As to_dict gave it; None of nothing."""
        return TypeAdapter(cls).validate_python(saved) if saved else None
