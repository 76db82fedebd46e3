"""Coverage: every operation with weights or a matrix product, and what became of it. Nothing is silent.

Plain data: who reads a report does not load torch for it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from scalepoint.errors import CoverageError
from scalepoint.support.formatting import count, one_line, printed, share_of, time_of, two_times

if TYPE_CHECKING:
    from rich.table import Table


class OperationState(StrEnum):
    """What became of an operation."""

    QUANTIZED = "quantized"
    FLOAT = "float"
    REFUSED = "refused"


@dataclass(frozen=True)
class CoverageRow:
    """An operation of the model, and how it runs."""

    name: str
    kind: str
    state: OperationState
    how: str  # "w int8 per_channel, x int8"
    reason: str  # the same text for all operations with the same cause
    parameters: int
    macs: int | None
    is_asked: bool = False  # float because the config says so
    is_meant: bool = False  # float because the target runs its kind so
    saves: float | None = None  # seconds by which float is faster, where it stays float for speed
    seconds: tuple[float, float] | None = None  # predicted for it in float and in int8, where those are the reason
    shared: int = 0  # of its parameters, those that an earlier operation in the same precision has too
    stored: str = ""  # "int8 per_channel": how the file holds the weight of a product that runs in float

    @property
    def is_for_speed(self) -> bool:
        return self.saves is not None

    @property
    def explanation(self) -> str:
        """The reason, with the times of this operation if they are the reason."""
        if self.seconds is None:
            return self.reason
        in_float, in_int8 = two_times(*self.seconds)
        return f"{self.reason}: {in_float}, in int8 {in_int8}"

    @property
    def precision(self) -> str:
        return self.how or "float"


@dataclass(frozen=True)
class Coverage:
    """What became of every operation that has weights or multiplies matrices; each is in exactly one state."""

    operations: tuple[CoverageRow, ...]

    def share_of_macs(self) -> dict[str, float] | None:
        """Precision -> share of the multiply-accumulates; None when capture had no example inputs."""
        if any(row.macs is None for row in self.operations):
            return None
        return self._shares([(row.precision, row.macs or 0) for row in self.operations])

    def share_of_parameters(self) -> dict[str, float]:
        """Precision -> share of the weights."""
        rows = ((f"stored {row.stored}" if row.stored else row.precision, row) for row in self.operations)
        return self._shares([(precision, row.parameters - row.shared) for precision, row in rows])

    @staticmethod
    def _shares(rows: list[tuple[str, int]]) -> dict[str, float]:
        total = sum(amount for _, amount in rows) or 1
        shares: dict[str, float] = {}
        for precision, amount in rows:
            shares[precision] = shares.get(precision, 0.0) + amount / total
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    @property
    def unrequested_float(self) -> tuple[CoverageRow, ...]:
        """What stays float though nobody wished it."""
        left = (row for row in self.operations if row.state != OperationState.QUANTIZED)
        return tuple(row for row in left if not (row.is_asked or row.is_meant))

    def in_state(self, state: OperationState | str) -> tuple[CoverageRow, ...]:
        return tuple(row for row in self.operations if row.state == state)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized, and nothing stored so."""
        return not self.in_state(OperationState.QUANTIZED) and not any(row.stored for row in self.operations)

    @property
    def is_float_for_speed(self) -> bool:
        """Whether no operation runs in low precision, because float is faster."""
        return not self.in_state(OperationState.QUANTIZED) and any(row.is_for_speed for row in self.operations)

    def describe_empty(self) -> str:
        told = dict.fromkeys(f"{row.name}: {row.explanation}" for row in self.operations)
        reasons = "; ".join(list(told)[:4]) or "it has no weights"
        if len(told) > 4:
            reasons += f"; and {len(told) - 4} more"
        other = "take a target that has kernels for it (scalepoint targets), or " if told else ""
        return f"nothing of this model would be quantized: {reasons}. The way out: {other}ship it in float"

    def check(self) -> None:
        """strict=True: an error that names what stays float unasked."""
        if not self.unrequested_float:
            return
        listed = "; ".join(f"{row.name} ({row.kind}): {row.explanation}" for row in self.unrequested_float[:8])
        more = f"; and {len(self.unrequested_float) - 8} more" if len(self.unrequested_float) > 8 else ""
        raise CoverageError(
            f"{len(self.unrequested_float)} operations stay float unasked: {listed}{more}. Ask for it with "
            "Override(name=..., weight='float', activation='float'), or leave strict=True away"
        )

    def summary(self) -> str:
        counts = {state: len(self.in_state(state)) for state in OperationState}
        text = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        if not self.operations:
            return "no operation with weights or a matrix product"
        macs = self.share_of_macs()
        for label, shares in (("MACs", macs), ("parameters", self.share_of_parameters())):
            if shares is not None:
                low = 1 - shares.get("float", 0.0)
                text += f"; {share_of(low)} of the {label} in low precision"
        left = [row.saves for row in self.operations if row.saves is not None]
        if left:
            saved = sum(max(0.0, each) for each in left)
            text += f"; {len(left)} left float for speed"
            text += f", which saves {time_of(saved)}" if saved >= 1e-6 else ""
            text += ", with weights that the file holds in int8" if any(row.stored for row in self.operations) else ""
        return text

    def table(self) -> "Table":
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415  # only a table needs it

        table = Table(title=self.summary(), title_justify="left")
        for column in ("operation", "kind", "runs in", "why"):
            table.add_column(column, overflow="fold")
        for column in ("MACs", "weights"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.operations:
            cells = (row.name, row.kind, row.precision, row.explanation)
            table.add_row(*(Text(one_line(cell)) for cell in cells), count(row.macs), count(row.parameters))
        return table

    def __str__(self) -> str:
        return printed(self.table())

    def to_list(self) -> list[dict[str, Any]]:
        """Plain values, for JSON."""
        return [{**vars(row), "state": row.state.value} for row in self.operations]
