"""Report of migrations: what they did at every site."""

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
    """One site of a migration.

    Attributes:
        migration: Name of the migration.
        name: Name of the site.
        done: Whether it was rewritten.
        note: What was done, or why it was refused.
    """

    migration: str
    name: str
    done: bool
    note: str


@dataclass(frozen=True)
class MigrationReport:
    """All sites of all migrations, in order.

    Attributes:
        rows: The sites.
        change: Change of the float output on the compared batches, relative to its norm.
        added: Parameters that the float model does not have.
    """

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
        """Return one line: how many rewrites were done and refused, and the change of the float output."""
        return f"{len(self.done)} done, {len(self.refused)} refused, float output within {self.change:.1e}"

    def table(self) -> Table:
        """Return a rich table with one line per rewrite."""
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
        """Return the report as values that JSON can store."""
        values: dict[str, Any] = to_jsonable(self)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MigrationReport | None":
        """Read the values of `to_dict`; None if there are none."""
        return TypeAdapter(cls).validate_python(values) if values else None
