"""Agreement between the outputs of a file and the outputs of the simulation.

    SQNR = 10 log10( sum x^2 / sum (x - y)^2 ) dB      x from the simulation, y from the file

A NaN in either of them never agrees. An infinity agrees with the same infinity, because masks contain infinities.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log10
from typing import TYPE_CHECKING

import numpy as np

from scalepoint.support.formatting import format_decibels, format_share

if TYPE_CHECKING:
    from torch import Tensor  # not at run time: a saved result is read without torch


@dataclass(frozen=True)
class Agreement:
    """How close one output of the file is to the simulation.

    Attributes:
        output: The name of the output.
        sqnr: In dB; inf if all values are equal, -inf if the output is missing or has another shape.
        max_difference: The largest difference of two values.
        top1: The share of samples or tokens with the same largest class; None if the output has no classes.
        uncompared: Why equal values prove nothing, for example "it is empty (0x4)"; "" if they do.
    """

    output: str
    sqnr: float
    max_difference: float
    top1: float | None
    uncompared: str = ""

    def __str__(self) -> str:
        if self.uncompared:
            return f"{self.output}: nothing was compared, {self.uncompared}"
        top1 = "" if self.top1 in (None, 1.0) else f", top-1 the same in {format_share(self.top1)}"
        if self.sqnr == inf:
            return f"{self.output}: exactly{top1}"
        return f"{self.output}: {format_decibels(self.sqnr)} dB, at most {self.max_difference:.3g} apart{top1}"


def worst_sqnr(agreements: Sequence[Agreement]) -> float:
    """Return the lowest SQNR in dB; -inf without any output."""
    return min((agreement.sqnr for agreement in agreements), default=-inf)


def describe_nothing_compared(agreements: Sequence[Agreement]) -> str:
    """Explain why no output was compared; "" if at least one was."""
    if not agreements or not all(agreement.uncompared for agreement in agreements):
        return ""
    reasons = "; ".join(f"{agreement.output}: {agreement.uncompared}" for agreement in agreements)
    return f"nothing was compared: {reasons}"


def compare_outputs(
    expected: "Sequence[Tensor]", outputs: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray] | None = None
) -> tuple[Agreement, ...]:
    """Compare the outputs of a file with the simulation, in order. An output that the file lacks does not agree.

    Top-1 is counted over the last axis of float outputs with the shape (samples, classes) or (samples, tokens,
    vocabulary). An output has tokens if its first two axes are the shape of an integer input in `feeds`.
    """
    from scalepoint.verification.simulation import to_file_array  # noqa: PLC0415  # a saved result is read without torch

    names = [*outputs, *(f"output_{index}" for index in range(len(outputs), len(expected)))]
    pairs = zip(names, expected, strict=False)  # a file may have further outputs, such as its layers
    token_shapes = {array.shape for array in (feeds or {}).values() if array.ndim == 2 and array.dtype.kind in "iu"}
    return tuple(_compare_output(name, to_file_array(value), outputs.get(name), token_shapes) for name, value in pairs)


def _compare_output(
    name: str, expected: np.ndarray, output: np.ndarray | None, token_shapes: Container[tuple[int, ...]]
) -> Agreement:
    if output is None or expected.shape != output.shape:
        return Agreement(name, sqnr=-inf, max_difference=inf, top1=None)
    x, y = expected.astype(np.float64), output.astype(np.float64)
    is_equal = x == y
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.where(is_equal, 0.0, np.abs(x - y))
    if reason := _why_uncompared(x, is_equal):
        return Agreement(name, sqnr=inf, max_difference=0.0, top1=None, uncompared=reason)
    has_classes = (x.ndim == 2 or x.shape[:-1] in token_shapes) and x.shape[-1] > 1 and expected.dtype.kind == "f"
    top1 = float((x.argmax(-1) == y.argmax(-1)).mean()) if has_classes else None
    if not np.isfinite(difference).all():
        return Agreement(name, -inf, inf, top1)
    noise = float(np.square(difference).sum())
    signal = float(np.square(x, where=np.isfinite(x), out=np.zeros_like(x)).sum())
    return Agreement(name, _to_decibels(signal, noise), float(difference.max(initial=0.0)), top1)


def _to_decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return inf
    return 10 * log10(signal / noise) if signal else -inf


def _why_uncompared(expected: np.ndarray, is_equal: np.ndarray) -> str:
    """Explain why equality of this output proves nothing: it has no values, or the same value everywhere."""
    if expected.size == 0:
        return f"it is empty ({'x'.join(map(str, expected.shape))})"
    if expected.size > 1 and is_equal.all() and (expected == expected.flat[0]).all():
        return f"it is constant, {expected.flat[0]:.6g} everywhere"
    return ""
