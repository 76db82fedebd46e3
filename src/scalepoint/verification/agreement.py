"""How near the outputs of a file are to the simulation's.

    SQNR = 10 log10( sum x^2 / sum (x - y)^2 ) dB      x of the simulation, y of the file

What is not a number never agrees, in neither of the two; an infinity agrees with itself (masks have them).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log10
from typing import TYPE_CHECKING

import numpy as np

from scalepoint.support.formatting import decibel, share_of

if TYPE_CHECKING:
    from torch import Tensor  # who reads a result does not need it


@dataclass(frozen=True)
class Agreement:
    """How close one output of the file is to the simulation."""

    output: str
    sqnr: float
    max_difference: float
    top1: float | None
    uncompared: str = ""  # why equal values prove nothing: "it is empty"

    def __str__(self) -> str:
        if self.uncompared:
            return f"{self.output}: nothing was compared, {self.uncompared}"
        same = "" if self.top1 is None else f", top-1 the same in {share_of(self.top1)}"
        if self.sqnr == inf:
            return f"{self.output}: exactly{same}"
        return f"{self.output}: {decibel(self.sqnr)} dB, at most {self.max_difference:.3g} apart{same}"


def worst_sqnr(agreements: Sequence[Agreement]) -> float:
    return min((each.sqnr for each in agreements), default=-inf)


def describe_nothing_compared(agreements: Sequence[Agreement]) -> str:
    """Why no output was compared; "" where at least one was."""
    if not agreements or not all(each.uncompared for each in agreements):
        return ""
    return f"nothing was compared: {'; '.join(f'{each.output}: {each.uncompared}' for each in agreements)}"


def compare_outputs(
    expected: "Sequence[Tensor]", found: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray] | None = None
) -> tuple[Agreement, ...]:
    """Compare every output, in order; an output that the file lacks does not agree.

    Top-1 is counted over the last axis of float outputs with two axes (samples, classes), and with three where the
    first two are those of an integer input in `feeds` (samples, tokens, vocabulary). Other outputs have none.
    """
    from scalepoint.verification.simulation import to_file_array  # noqa: PLC0415  # who reads a result does not load torch

    names = [*found, *(f"output_{place}" for place in range(len(found), len(expected)))]
    pairs = zip(names, expected, strict=False)  # a file may show more than its outputs
    tokens = {each.shape for each in (feeds or {}).values() if each.ndim == 2 and each.dtype.kind in "iu"}
    return tuple(_compare_output(name, to_file_array(value), found.get(name), tokens) for name, value in pairs)


def _compare_output(
    name: str, expected: np.ndarray, found: np.ndarray | None, tokens: Container[tuple[int, ...]]
) -> Agreement:
    if found is None or expected.shape != found.shape:
        return Agreement(name, -inf, inf, None)
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    same = wide == other
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(wide - other))
    if why := _why_uncompared(wide, same):
        return Agreement(name, inf, 0.0, None, why)
    has_classes = (wide.ndim == 2 or wide.shape[:-1] in tokens) and wide.shape[-1] > 1 and expected.dtype.kind == "f"
    top1 = float((wide.argmax(-1) == other.argmax(-1)).mean()) if has_classes else None
    if not np.isfinite(apart).all():
        return Agreement(name, -inf, inf, top1)
    noise = float(np.square(apart).sum())
    signal = float(np.square(wide, where=np.isfinite(wide), out=np.zeros_like(wide)).sum())
    sqnr = inf if noise == 0 else 10 * log10(signal / noise) if signal else -inf
    return Agreement(name, sqnr, float(apart.max(initial=0.0)), top1)


def _why_uncompared(expected: np.ndarray, same: np.ndarray) -> str:
    """Why equality of this output proves nothing: it has no values, or the same value everywhere."""
    if expected.size == 0:
        return f"it is empty ({'x'.join(map(str, expected.shape))})"
    if expected.size > 1 and same.all() and (expected == expected.flat[0]).all():
        return f"it is constant, {expected.flat[0]:.6g} everywhere"
    return ""
