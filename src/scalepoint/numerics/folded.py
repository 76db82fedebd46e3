"""A weight as it is deployed with its batch norm folded in, and unfolded again: one pass over it in training.

    y = quantize-dequantize(w s) / s,  s one value a row        dy/dw = 1 inside the range, 0 where w s was clamped
    dy/dscale = (c - t) / s inside the range, c / s where clamped, for a scale that is learned (t, c: see `affine`)

The steps are those of `affine`, with the products by s and 1/s in the same cache-sized pieces; nothing is kept for
backward but the weight itself, from which the steps run again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE, Scratch, Steps, clamp, divide
from scalepoint.numerics.format import Format
from scalepoint.numerics.slopes import ends_of, pass_inside, slope, slopes
from scalepoint.numerics.traced import is_traced


def can_fold(weight: Tensor, steps: Steps) -> bool:
    """Whether the pass knows this weight and these steps: rows of float32 on a CPU, limits that are numbers."""
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    is_known = steps.shift is None and not isinstance(steps.low, Tensor)
    return is_plain and is_known and not is_traced(weight) and steps.scale.numel() in (1, len(weight))


def row_extremes(weight: Tensor, factor: Tensor) -> Tensor:
    """Least and largest of each row times its factor, of the rank of the weight: the same range as the product has.

    Exactly so: rounding is monotone, so that the extremes of rounded products are the rounded products of extremes.
    """
    rows = weight.view(len(weight), -1)
    low, high = rows.amin(1), rows.amax(1)  # each vectorized, as aminmax along an axis is not
    found = torch.stack((low, high), 1) * factor.view(-1, 1)
    return found.view(len(weight), 2, *(1 for _ in weight.shape[2:]))


def fold_and_back(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format, *, may_clamp: bool = True) -> Tensor:
    """y, with its gradient, and that of a scale that asks for one. The factor is a constant, and steps are not written
    to afterwards; without `may_clamp` all is inside the range."""
    y: Tensor = _Folded.apply(weight, steps.scale, factor, steps.map(Tensor.detach), fmt, may_clamp)  # type: ignore[no-untyped-call]
    return y


@torch.no_grad()
def round_trip_folded(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """y alone."""
    y = torch.empty_like(weight)
    like = Scratch()
    for part, target, times, own in _rows(weight, y, factor, steps):
        t = divide(torch.mul(part, times, out=like(part)), own, fmt, like(part))
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
    """Keeps the weight, which is there anyway."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, factor: Tensor, steps: Steps, fmt: Format, may_clamp: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, factor)
        ctx.steps, ctx.fmt, ctx.may_clamp = steps, fmt, may_clamp
        return round_trip_folded(weight, factor, steps, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, factor = ctx.saved_tensors
        steps, fmt = ctx.steps, ctx.fmt
        if torch.is_grad_enabled():  # to be differentiated again: the formula as a whole
            shape = (-1, *(1 for _ in weight.shape[1:]))
            s, own = factor.view(shape), scale.reshape(shape)
            of_weight, by_element = slopes(weight * s, grad, own, steps._replace(scale=own), fmt)
            return of_weight, (by_element / s).sum_to_size(own.shape).view(scale.shape), None, None, None, None
        learns = ctx.needs_input_grad[1]
        if not (learns or ctx.may_clamp):
            return grad, None, None, None, None, None
        of_weight, sums = _back(weight, grad.contiguous(), factor, steps, fmt, learns=learns)
        of_scale = sums.sum_to_size((scale.numel(),)).view(scale.shape) if learns else None
        return of_weight, of_scale, None, None, None, None


def _back(
    weight: Tensor, grad: Tensor, factor: Tensor, steps: Steps, fmt: Format, *, learns: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the weight, and of the scale by row where it `learns`."""
    of_weight, sums, like = torch.empty_like(grad), [], Scratch()
    ends = ends_of(steps, fmt)
    assert ends is not None  # noqa: S101  # limits are numbers: can_fold
    flat, start = grad.view(len(grad), -1), 0
    for part, target, times, own in _rows(weight, of_weight, factor, steps):
        upstream = flat[start : start + len(part)]
        start += len(part)
        t = torch.mul(part, times, out=like(part)).div_(own.scale)
        rounded = torch.round(t, out=like(part, 1))
        pass_inside(upstream, rounded, ends, target)
        if learns:
            sums.append(slope(t, rounded, ends, fmt).mul_(upstream).sum(1).div_(times.view(-1)))
    return of_weight, torch.cat(sums) if learns else factor


def is_clamped(extremes: Tensor, steps: Steps) -> bool:
    """Whether anything is clamped: the extremes of rows are the first that are."""
    t = (extremes.view(len(extremes), -1) / steps.scale.reshape(-1, 1)).round_()
    return not bool(((t >= steps.low) & (t <= steps.high)).all())
