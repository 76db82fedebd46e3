"""Where the time of a file goes, as data: a row a layer, beside the file that it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalepoint.support.formatting import share_of, short, time_of

CONVERSIONS = frozenset(("QuantizeLinear", "DequantizeLinear"))
LEAST_LOSS = 0.01  # of the whole time: less is noise
NAMED = 3


@dataclass(frozen=True)
class LayerTime:
    """How long a layer takes in a file, and in the one that it is compared with; None where that has none such."""

    name: str
    seconds: float | None
    float_seconds: float | None
    kernels: tuple[str, ...] = ()  # what ran, the slowest first
    float_kernels: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """Seconds more than in the other file."""
        return (self.seconds or 0.0) - (self.float_seconds or 0.0)

    @property
    def is_conversion(self) -> bool:
        """Whether it only goes from one precision to the other."""
        return bool(self.kernels) and CONVERSIONS.issuperset(self.kernels)


def totals(rows: Sequence[LayerTime]) -> tuple[float, float]:
    """Seconds of the file compared with, and of the file."""
    return sum(row.float_seconds or 0.0 for row in rows), sum(row.seconds or 0.0 for row in rows)


def losers(rows: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """Layers that are slower than in the other file by more than noise, the worst first; conversions are told apart."""
    least = LEAST_LOSS * max(totals(rows))
    found = [row for row in rows if row.float_seconds is not None and row.seconds is not None and row.loss > least]
    return tuple(sorted(found, key=lambda row: -row.loss))


def because(rows: Sequence[LayerTime]) -> str:
    """Which layers lose time, and how much goes into conversions; "" where nothing does."""
    lost = losers(rows)
    words = [f"{short(row.name, 60)} ({_against(row)})" for row in lost[:NAMED]]
    words += [f"{len(lost) - NAMED} more layers"] if len(lost) > NAMED else []
    converting = sum(row.seconds or 0.0 for row in rows if row.is_conversion)
    total = totals(rows)[1]
    if total and converting > LEAST_LOSS * total:
        words.append(f"conversions between float and integers, {share_of(converting / total)} of its time")
    return ", ".join(words)


def _against(row: LayerTime) -> str:
    now, before = (short(kernels[0], 60) if kernels else "nothing" for kernels in (row.kernels, row.float_kernels))
    return f"{now} {time_of(row.seconds or 0.0)}, {before} {time_of(row.float_seconds or 0.0)} in float"
