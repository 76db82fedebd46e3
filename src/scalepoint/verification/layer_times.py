"""The time of each layer of a file, next to its time in the file that it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalepoint.support.formatting import format_share, format_time, shorten

CONVERSIONS = frozenset(("QuantizeLinear", "DequantizeLinear"))
MIN_LOSS = 0.01  # share of the total time; a smaller difference is noise
MAX_NAMED_LAYERS = 3


@dataclass(frozen=True)
class LayerTime:
    """Time of one layer in a file, and in the file it is compared with (None if that one has no such layer)."""

    name: str
    seconds: float | None
    float_seconds: float | None
    kernels: tuple[str, ...] = ()  # kernels that ran, the slowest first
    float_kernels: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """Additional seconds compared with the other file."""
        return (self.seconds or 0.0) - (self.float_seconds or 0.0)

    @property
    def is_conversion(self) -> bool:
        """Whether the layer only converts from one precision to the other."""
        return bool(self.kernels) and CONVERSIONS.issuperset(self.kernels)


def sum_seconds(rows: Sequence[LayerTime]) -> tuple[float, float]:
    """Return the total seconds of the float file and of the quantized file."""
    return sum(row.float_seconds or 0.0 for row in rows), sum(row.seconds or 0.0 for row in rows)


def find_slower_layers(rows: Sequence[LayerTime]) -> tuple[LayerTime, ...]:
    """Return the layers of both files that are slower than in the float file by more than noise, the worst first.

    Conversions are not included: the float file has none.
    """
    min_loss = MIN_LOSS * max(sum_seconds(rows))
    in_both = [row for row in rows if row.float_seconds is not None and row.seconds is not None]
    slower = [row for row in in_both if row.loss > min_loss]
    return tuple(sorted(slower, key=lambda row: -row.loss))


def describe_slower_layers(rows: Sequence[LayerTime]) -> str:
    """List the layers that lose time, and the share of conversions; "" if there are none."""
    slower = find_slower_layers(rows)
    parts = [f"{shorten(row.name, 60)} ({_describe_row(row)})" for row in slower[:MAX_NAMED_LAYERS]]
    if len(slower) > MAX_NAMED_LAYERS:
        parts.append(f"{len(slower) - MAX_NAMED_LAYERS} more layers")
    conversion_seconds = sum(row.seconds or 0.0 for row in rows if row.is_conversion)
    total = sum_seconds(rows)[1]
    if total and conversion_seconds > MIN_LOSS * total:
        parts.append(f"conversions between float and integers, {format_share(conversion_seconds / total)} of its time")
    return ", ".join(parts)


def _describe_row(row: LayerTime) -> str:
    kernel, float_kernel = (
        shorten(kernels[0], 60) if kernels else "no kernel" for kernels in (row.kernels, row.float_kernels)
    )
    return (
        f"{kernel} {format_time(row.seconds or 0.0)}, {float_kernel} {format_time(row.float_seconds or 0.0)} in float"
    )
