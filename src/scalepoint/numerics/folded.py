"""A weight as it is deployed with its batch norm folded in, and unfolded again: one pass over it in training.

    y = quantize-dequantize(w s) / s,  s one value a row        dy/dw = 1 inside the range, 0 where w s was clamped

The steps are those of `affine`, with the products by s and 1/s in the same cache-sized pieces; nothing is kept for
backward but the weight itself, from which the range is found again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE, Steps, clamp, divide
from scalepoint.numerics.fake import is_traced
from scalepoint.numerics.format import Format

NEAR = 0.49  # of a step beyond the last code: less is rounded to it


def can_fold(weight: Tensor, steps: Steps) -> bool:
    """Whether the pass knows this weight and these steps: rows of float32 on a CPU, limits that are numbers."""
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    is_known = steps.shift is None and not isinstance(steps.low, Tensor) and not steps.scale.requires_grad
    return is_plain and is_known and not is_traced(weight) and steps.scale.numel() in (1, len(weight))


def row_extremes(weight: Tensor, factor: Tensor) -> Tensor:
    """Least and largest of each row times its factor, of the rank of the weight: the same range as the product has.

    Exactly so: rounding is monotone, so that the extremes of rounded products are the rounded products of extremes.
    """
    rows = weight.view(len(weight), -1)
    low, high = rows.amin(1), rows.amax(1)  # each vectorized, as aminmax along an axis is not
    found = torch.stack((low, high), 1) * factor.view(-1, 1)
    return found.view(len(weight), 2, *(1 for _ in weight.shape[2:]))


def fold_and_back(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """y, with its gradient. The factor is a constant, and steps are not written to afterwards."""
    y: Tensor = _Folded.apply(weight, factor, steps, fmt)  # type: ignore[no-untyped-call]
    return y


@torch.no_grad()
def round_trip_folded(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """y alone."""
    y = torch.empty_like(weight)
    scratch = torch.empty(PIECE, dtype=torch.float32)
    for part, target, times, own in _rows(weight, y, factor, steps):
        buffer = scratch[: part.numel()].view(part.shape) if part.numel() <= PIECE else torch.empty_like(part)
        t = divide(torch.mul(part, times, out=buffer), own, fmt, buffer)
        torch.mul(clamp(t, own, t), own.scale / times, out=target)
    return y


def _rows(
    weight: Tensor, other: Tensor, factor: Tensor, steps: Steps
) -> Iterator[tuple[Tensor, Tensor, Tensor, Steps]]:
    """Rows of both with their factors and steps, about PIECE elements at a time."""
    flat, second, column = weight.view(len(weight), -1), other.view(len(weight), -1), factor.view(-1, 1)
    scale = steps.scale.reshape(-1, 1)
    count = max(1, PIECE // flat.shape[1])
    for start in range(0, len(flat), count):
        part = slice(start, start + count)
        own = steps._replace(scale=scale if len(scale) == 1 else scale[part])
        yield flat[part], second[part], column[part], own


class _Folded(torch.autograd.Function):
    """Keeps the weight, which is there anyway, and the places of what was clamped."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
        ctx.save_for_backward(weight, factor, clamped(weight, factor, steps, fmt))
        ctx.steps, ctx.fmt = steps, fmt
        return round_trip_folded(weight, factor, steps, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, factor, places = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: the formula as a whole
            steps = ctx.steps
            wide = weight.detach() * factor.view(-1, *(1 for _ in weight.shape[1:]))
            scale = steps.scale.reshape(-1, *(1 for _ in weight.shape[1:]))
            t = divide(wide, steps._replace(scale=scale), ctx.fmt)
            return torch.where((t >= steps.low) & (t <= steps.high), grad, 0.0), None, None, None
        if places is not None:
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1)[places] = 0.0
        return grad, None, None, None


@torch.no_grad()
def clamped(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor | None:
    """Where w s was clamped, as places in the flat weight; None where nothing was.

    Only rows whose extremes reach the ends of the range are looked at, and only what is near an end is divided.
    """
    rows, times, scale = weight.view(len(weight), -1), factor.view(-1), steps.scale.reshape(-1)
    ends = torch.stack([(end * scale / times).expand(len(rows)) for end in (steps.low - NEAR, steps.high + NEAR)])
    low, high = ends.amin(0), ends.amax(0)  # of the weight: a factor may be negative
    found = ((rows.amin(1) < low) | (rows.amax(1) > high)).nonzero().view(-1)
    if not len(found):
        return None
    picked = rows[found]
    at, column = ((picked < low[found, None]) | (picked > high[found, None])).nonzero().unbind(1)
    row = found[at]
    own = steps._replace(scale=scale if len(scale) == 1 else scale[row])
    t = divide(picked[at, column] * times[row], own, fmt)
    outside = (t < steps.low) | (t > steps.high)
    return (row * rows.shape[1] + column)[outside] if bool(outside.any()) else None
