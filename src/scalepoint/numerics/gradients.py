"""Gradients of fake quantization: of x, and of a learned scale.

    dy/dx = 1 inside the range, 0 where x was clamped
    dy/dscale = c - t inside the range, c where clamped        LSQ (Esser et al., ICLR 2020), t = (x - shift) / scale

Masking a gradient by a comparison and `where` takes 40 times as long on a CPU as torch's backward of hardtanh, which
does the same in one vectorized pass. So that operation is called here, in place, on pieces that fit into the cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.affine import Steps, clamp
from scalepoint.numerics.formats import Format
from scalepoint.numerics.rounding import round_to_float

NEXT_FLOAT = 1 + torch.finfo(torch.float32).eps  # limit * NEXT_FLOAT is the next float32 after a limit, away from zero
# grad where below < x < above, 0 elsewhere
_MASK = torch.ops.aten.hardtanh_backward.grad_input


class CodeLimits(NamedTuple):
    """The limits of a centred code, and bounds slightly beyond them.

    No rounded t lies between a limit and its bound.
    """

    low: float
    high: float
    below: float
    above: float


def get_code_limits(steps: Steps, fmt: Format) -> CodeLimits | None:
    """Return the limits of the range as numbers; None if they differ between elements."""
    if any(isinstance(limit, Tensor) and limit.numel() > 1 for limit in (steps.low, steps.high)):
        return None
    low, high = float(steps.low), float(steps.high)
    if fmt.is_float:
        return CodeLimits(low, high, low * NEXT_FLOAT, high * NEXT_FLOAT)
    return CodeLimits(low, high, low - 0.5, high + 0.5)


def mask_gradient(grad: Tensor, rounded: Tensor, limits: CodeLimits, out: Tensor) -> Tensor:
    """Return the gradient where the rounded t is within the range, 0 elsewhere. `out` may be `grad`."""
    masked: Tensor = _MASK(grad, rounded, limits.below, limits.above, grad_input=out)
    return masked


def scale_slope(t: Tensor, rounded: Tensor, limits: CodeLimits, fmt: Format) -> Tensor:
    """Compute dy/dscale of each element into t. Overwrites `rounded` too."""
    mask_gradient(t, rounded, limits, t)
    c = rounded.clamp_(limits.low, limits.high)
    return torch.sub(round_to_float(c, fmt, out=c) if fmt.is_float else c, t, out=t)


def compute_gradients(x: Tensor, grad: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the scale for each element, by operations that can be differentiated again."""
    t = torch.div(x if steps.shift is None else x - steps.shift, scale).to(torch.float32)
    rounded = t if fmt.is_float else t.round()
    c = clamp(rounded, steps)
    inside = c == rounded
    if fmt.is_float:
        c = round_to_float(c, fmt)
    return torch.where(inside, grad, 0.0), c.sub_(t.mul_(inside)).mul_(grad)
