"""Coverage: every operation with weights or a matrix product, the precision it runs in, and the reason.

Plain data without torch: reading a report.json must not load torch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from scalepoint.errors import CoverageError
from scalepoint.support.formatting import (
    format_count,
    format_share,
    format_time,
    format_two_times,
    render_as_text,
    to_one_line,
)

if TYPE_CHECKING:
    from rich.table import Table


MAX_LISTED_REASONS = 4
MAX_LISTED_OPERATIONS = 8


class OperationState(StrEnum):
    """Whether an operation is quantized."""

    QUANTIZED = "quantized"
    FLOAT = "float"
    REFUSED = "refused"


@dataclass(frozen=True)
class CoverageRow:
    """One operation of the model, and its precision.

    Attributes:
        name: Path of the operation in the model.
        kind: Kind of operation, such as "conv2d".
        state: Quantized, float, or refused by the target.
        how: Precision of weight and input, such as "w int8 per_channel, x int8"; "" for float.
        reason: Why it is float or refused. Operations with the same cause have the same text.
        parameters: Number of weights.
        macs: Multiply-accumulates of one forward; None if capture had no example inputs.
        is_asked: The config asks for float.
        is_meant: The target runs this kind of operation in float.
        saves: Seconds that float saves, if the operation stays float for speed.
        seconds: Predicted seconds in float and in int8, if they are the reason.
        shared: Number of its weights that an earlier operation in the same precision shares.
        stored: How the file stores the weight of an operation that runs in float, such as "int8 per_channel".
    """

    name: str
    kind: str
    state: OperationState
    how: str
    reason: str
    parameters: int
    macs: int | None
    is_asked: bool = False
    is_meant: bool = False
    saves: float | None = None
    seconds: tuple[float, float] | None = None
    shared: int = 0
    stored: str = ""

    @property
    def is_for_speed(self) -> bool:
        return self.saves is not None

    @property
    def explanation(self) -> str:
        """The reason, with the times of this operation if they are the reason."""
        if self.seconds is None:
            return self.reason
        in_float, in_int8 = format_two_times(*self.seconds)
        return f"{self.reason}: {in_float}, in int8 {in_int8}"

    @property
    def precision(self) -> str:
        return self.how or "float"


@dataclass(frozen=True)
class Coverage:
    """All operations that have weights or multiply matrices. Each is in exactly one state."""

    operations: tuple[CoverageRow, ...]

    def share_of_macs(self) -> dict[str, float] | None:
        """Return the share of the multiply-accumulates by precision; None when capture had no example inputs."""
        if any(row.macs is None for row in self.operations):
            return None
        return self._shares([(row.precision, row.macs or 0) for row in self.operations])

    def share_of_parameters(self) -> dict[str, float]:
        """Return the share of the weights by precision."""
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
        """Operations that stay float although neither the config nor the target asks for it."""
        float_rows = (row for row in self.operations if row.state != OperationState.QUANTIZED)
        return tuple(row for row in float_rows if not (row.is_asked or row.is_meant))

    def in_state(self, state: OperationState | str) -> tuple[CoverageRow, ...]:
        """Return the operations in one state, such as "quantized"."""
        return tuple(row for row in self.operations if row.state == state)

    @property
    def is_empty(self) -> bool:
        """Whether no operation is quantized, no weight is stored quantized, and that is not for speed."""
        is_float = not self.in_state(OperationState.QUANTIZED)
        return is_float and not any(row.stored or row.is_for_speed for row in self.operations)

    @property
    def is_float_for_speed(self) -> bool:
        """Whether no operation runs in low precision, because float is faster."""
        return not self.in_state(OperationState.QUANTIZED) and any(row.is_for_speed for row in self.operations)

    def describe_empty(self) -> str:
        """Return the message of the error for a model in which nothing would be quantized."""
        unique_reasons = list(dict.fromkeys(f"{row.name}: {row.explanation}" for row in self.operations))
        reasons = "; ".join(unique_reasons[:MAX_LISTED_REASONS]) or "it has no weights"
        if len(unique_reasons) > MAX_LISTED_REASONS:
            reasons += f"; and {len(unique_reasons) - MAX_LISTED_REASONS} more"
        hint = "choose a target that has kernels for it (scalepoint targets), or " if unique_reasons else ""
        return f"nothing of this model would be quantized: {reasons}. What to do: {hint}ship it in float"

    def check(self) -> None:
        """Raise CoverageError if an operation stays float that the config did not ask for (strict=True)."""
        rows = self.unrequested_float
        if not rows:
            return
        listed = "; ".join(f"{row.name} ({row.kind}): {row.explanation}" for row in rows[:MAX_LISTED_OPERATIONS])
        more = f"; and {len(rows) - MAX_LISTED_OPERATIONS} more" if len(rows) > MAX_LISTED_OPERATIONS else ""
        raise CoverageError(
            f"{len(rows)} operations stay float although the config did not ask for it: {listed}{more}. Ask for it "
            "with Override(name=..., weight='float', activation='float'), or omit strict=True"
        )

    def summary(self) -> str:
        """Return one line: operations per state, and the quantized share of MACs and parameters."""
        counts = {state: len(self.in_state(state)) for state in OperationState}
        text = ", ".join(f"{number} {state.value}" for state, number in counts.items() if number)
        if not self.operations:
            return "no operation with weights or a matrix product"
        macs = self.share_of_macs()
        for label, shares in (("MACs", macs), ("parameters", self.share_of_parameters())):
            if shares is not None:
                quantized_share = 1 - shares.get("float", 0.0)
                text += f"; {format_share(quantized_share)} of the {label} in low precision"
        savings = [row.saves for row in self.operations if row.saves is not None]
        if savings:
            total_saved = sum(max(0.0, seconds) for seconds in savings)
            text += f"; {len(savings)} left float for speed"
            text += f", which saves {format_time(total_saved)}" if total_saved >= 1e-6 else ""
            text += ", with weights stored in int8" if any(row.stored for row in self.operations) else ""
        return text

    def table(self) -> "Table":
        """Return a rich table with one line per operation."""
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415  # only a table needs it

        table = Table(title=self.summary(), title_justify="left")
        for column in ("operation", "kind", "runs in", "why"):
            table.add_column(column, overflow="fold")
        for column in ("MACs", "weights"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.operations:
            cells = (row.name, row.kind, row.precision, row.explanation)
            table.add_row(
                *(Text(to_one_line(cell)) for cell in cells), format_count(row.macs), format_count(row.parameters)
            )
        return table

    def __str__(self) -> str:
        return render_as_text(self.table())

    def to_list(self) -> list[dict[str, Any]]:
        """Return plain values for JSON."""
        return [{**vars(row), "state": row.state.value} for row in self.operations]
