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
    """Keeps the weight, which is there anyway."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
        ctx.save_for_backward(weight, factor)
        ctx.steps, ctx.fmt = steps, fmt
        return round_trip_folded(weight, factor, steps, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, factor = ctx.saved_tensors
        steps, fmt = ctx.steps, ctx.fmt
        low, high = float(steps.low) - 0.5, float(steps.high) + 0.5  # between whole numbers: the bounds are inside
        gradient = torch.ops.aten.hardtanh_backward
        if torch.is_grad_enabled() or not grad.is_contiguous():  # to be differentiated again: the formula as a whole
            wide = weight.detach() * factor.view(-1, *(1 for _ in weight.shape[1:]))
            scale = steps.scale.reshape(-1, *(1 for _ in weight.shape[1:]))
            t = divide(wide, steps._replace(scale=scale), fmt)
            return torch.where((t > low) & (t < high), grad, 0.0), None, None, None
        of_weight = torch.empty_like(grad)
        scratch = torch.empty(PIECE, dtype=torch.float32)
        targets = _rows(grad, of_weight, factor, steps)
        for (part, _, times, own), (given, target, _, _) in zip(
            _rows(weight.detach(), of_weight, factor, steps), targets, strict=True
        ):
            buffer = scratch[: part.numel()].view(part.shape) if part.numel() <= PIECE else torch.empty_like(part)
            t = divide(torch.mul(part, times, out=buffer), own, fmt, buffer)
            gradient.grad_input(given, t, low, high, grad_input=target)
        return of_weight, None, None, None
