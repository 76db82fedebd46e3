"""Where the time of a file goes, as data: a row a layer, beside the file that it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalepoint.support.formatting import share_of, short, time_of

CONVERSIONS = frozenset(("QuantizeLinear", "DequantizeLinear"))
MIN_LOSS = 0.01  # of the whole time: less is noise
MAX_NAMED = 3


@dataclass(frozen=True)
class LayerTime:
    """Time of one layer in a file, and in the file it is compared with (None if that one has no such layer)."""

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


def sum_seconds(rows: Sequence[LayerTime]) -> tuple[float, float]:
    """Seconds of the file compared with, and of the file."""
    return sum(row.float_seconds or 0.0 for row in rows), sum(row.seconds or 0.0 for row in rows)


def find_slower_layers(rows: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """Layers that are slower than in the other file by more than noise, the worst first; conversions are told apart."""
    least = MIN_LOSS * max(sum_seconds(rows))
    found = [row for row in rows if row.float_seconds is not None and row.seconds is not None and row.loss > least]
    return tuple(sorted(found, key=lambda row: -row.loss))


def describe_slower_layers(rows: Sequence[LayerTime]) -> str:
    """Which layers lose time, and how much goes into conversions; "" where nothing does."""
    lost = find_slower_layers(rows)
    words = [f"{short(row.name, 60)} ({_describe_row(row)})" for row in lost[:MAX_NAMED]]
    words += [f"{len(lost) - MAX_NAMED} more layers"] if len(lost) > MAX_NAMED else []
    converting = sum(row.seconds or 0.0 for row in rows if row.is_conversion)
    total = sum_seconds(rows)[1]
    if total and converting > MIN_LOSS * total:
        words.append(f"conversions between float and integers, {share_of(converting / total)} of its time")
    return ", ".join(words)


def _describe_row(row: LayerTime) -> str:
    now, before = (short(kernels[0], 60) if kernels else "nothing" for kernels in (row.kernels, row.float_kernels))
    return f"{now} {time_of(row.seconds or 0.0)}, {before} {time_of(row.float_seconds or 0.0)} in float"
