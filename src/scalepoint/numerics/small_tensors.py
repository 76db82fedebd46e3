"""Fake quantization of small float32 tensors: the operations of `round_trip`, prepared once for fixed steps.

On a few hundred values Python takes longer than the arithmetic. `prepare_round_trip` therefore chooses the operations
once, and the function that it returns only runs them. `DefaultFakeQuantize` keeps it while the quantizer is frozen.
Operations, their order and so every bit are those of `round_trip`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from scalepoint.numerics.affine import FEW_ELEMENTS, PIECE_ELEMENTS, Steps
from scalepoint.numerics.formats import Format
from scalepoint.numerics.rounding import EXPONENT_BITS

RoundTrip = Callable[[Tensor], Tensor]


def max_prepared_elements(fmt: Format) -> int:
    """Return the largest size of a tensor for which a prepared function has the operations of `round_trip`."""
    return FEW_ELEMENTS if fmt.is_float else 2 * PIECE_ELEMENTS - 1


def prepare_round_trip(steps: Steps, fmt: Format) -> RoundTrip:
    """Return a function that computes `round_trip(x, steps, fmt)`.

    The function is for a contiguous float32 tensor on the CPU that needs no gradient, with at most
    `max_prepared_elements(fmt)` elements.

    Args:
        steps: From `make_steps`; they broadcast against the tensor, and none of them requires a gradient.
        fmt: The element format.
    """
    if not fmt.is_float:
        return _prepare_integers(steps)
    if fmt.cast is not None:
        return _prepare_cast(steps, fmt.cast)
    return _prepare_exponents(steps, fmt)


def _prepare_integers(steps: Steps) -> RoundTrip:
    scale, shift = steps.scale, steps.shift
    if isinstance(steps.low, Tensor) and isinstance(steps.high, Tensor):
        lowest, highest = steps.low, steps.high

        def with_zero_point(x: Tensor) -> Tensor:
            t = torch.div(x, scale).round_()
            t = torch.maximum(t, lowest, out=t)
            return torch.minimum(t, highest, out=t).mul_(scale)

        return with_zero_point
    low, high = float(steps.low), float(steps.high)
    if shift is not None:
        return lambda x: torch.sub(x, shift).div_(scale).round_().clamp_(low, high).mul_(scale).add_(shift)
    return lambda x: torch.div(x, scale).round_().clamp_(low, high).mul_(scale)


def _prepare_cast(steps: Steps, dtype: torch.dtype) -> RoundTrip:
    scale, low, high = steps.scale, float(steps.low), float(steps.high)

    def by_cast(x: Tensor) -> Tensor:
        c = torch.div(x, scale).clamp_(low, high)
        return c.copy_(c.to(dtype)).mul_(scale)  # faster than a second tensor from .to(torch.float32)

    return by_cast


def _prepare_exponents(steps: Steps, fmt: Format) -> RoundTrip:
    """Prepare the operations of `round_to_float`. Their constants are tensors, which are faster than Python numbers."""
    scale, low, high = steps.scale, float(steps.low), float(steps.high)
    bits = torch.tensor(EXPONENT_BITS, dtype=torch.int32, device="cpu")
    unit = torch.tensor(2.0 ** -(fmt.mantissa or 0), dtype=torch.float32, device="cpu")
    smallest_power = 2.0**fmt.min_exponent
    int32, float32 = torch.int32, torch.float32

    def by_exponent(x: Tensor) -> Tensor:
        c = torch.div(x, scale).clamp_(low, high)
        step = torch.bitwise_and(c.view(int32), bits).view(float32).clamp_min_(smallest_power).mul_(unit)
        return c.div_(step).round_().mul_(step).mul_(scale)

    return by_exponent
