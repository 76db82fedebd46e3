"""What flows back through the steps: the gradient of x, and of a learned scale.

    dy/dx = 1 inside the range, 0 where x was clamped
    dy/dscale = c - t inside the range, c where clamped        LSQ (Esser et al., ICLR 2020), t = (x - shift) / scale

In place, on a piece that stays in cache. A comparison followed by `where` takes forty times as long on a CPU as
torch's backward of hardtanh, which is the same masking in one vector pass: that is what is called here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.affine import Steps, clamp
from scalepoint.numerics.formats import Format
from scalepoint.numerics.rounding import round_to_float

NEXT = 1 + torch.finfo(torch.float32).eps  # the float32 next to a limit, away from zero
_MASKED = torch.ops.aten.hardtanh_backward.grad_input


class CodeLimits(NamedTuple):
    """The limits of a centred code, and numbers beyond them with no rounded value in between."""

    low: float
    high: float
    below: float
    above: float


def get_code_limits(steps: Steps, fmt: Format) -> CodeLimits | None:
    """The ends of the range as numbers; None where they differ from element to element."""
    if any(isinstance(end, Tensor) and end.numel() > 1 for end in (steps.low, steps.high)):
        return None
    low, high = float(steps.low), float(steps.high)
    return (
        CodeLimits(low, high, low * NEXT, high * NEXT) if fmt.is_float else CodeLimits(low, high, low - 0.5, high + 0.5)
    )


def mask_gradient(grad: Tensor, rounded: Tensor, ends: CodeLimits, out: Tensor) -> Tensor:
    """The gradient where the rounded t is within the range, 0 elsewhere; `out` may be `grad`."""
    found: Tensor = _MASKED(grad, rounded, ends.below, ends.above, grad_input=out)
    return found


def scale_slope(t: Tensor, rounded: Tensor, ends: CodeLimits, fmt: Format) -> Tensor:
    """dy/dscale by element, in place of t; the rounded t is used up."""
    mask_gradient(t, rounded, ends, t)
    c = rounded.clamp_(ends.low, ends.high)
    return torch.sub(round_to_float(c, fmt, out=c) if fmt.is_float else c, t, out=t)


def compute_gradients(x: Tensor, grad: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of the scale by element, with operations that can be differentiated again."""
    t = torch.div(x if steps.shift is None else x - steps.shift, scale).to(torch.float32)
    rounded = t if fmt.is_float else t.round()
    c = clamp(rounded, steps)
    inside = c == rounded
    if fmt.is_float:
        c = round_to_float(c, fmt)
    return torch.where(inside, grad, 0.0), c.sub_(t.mul_(inside)).mul_(grad)
