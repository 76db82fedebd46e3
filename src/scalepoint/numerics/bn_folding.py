"""Fake quantization of a weight with its batch norm folded in, in one pass over the weight. Used in training.

    y = quantize-dequantize(w s) / s        s: the factor of the batch norm, one per row (output channel)
    dy/dw = 1 inside the range, 0 where w s was clamped
    dy/dscale = (c - t) / s inside the range, c / s where clamped, for a learned scale

t and c are the code before and after the clamp, as in `affine.py`, whose steps run here together with the products by s
and 1/s. Backward runs the steps again, or only needs the indices of the clamped elements: a scale that is computed from
the extremes of a row clamps only a few elements, and `LineExtremes` finds them without a pass over the weight.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE_ELEMENTS, ScratchBuffers, Steps, clamp, is_outside, to_unclamped_code
from scalepoint.numerics.formats import Format
from scalepoint.numerics.gradients import compute_gradients, get_code_limits, mask_gradient
from scalepoint.numerics.tracing import is_traced

# Lengths of a line, the part of a row of which the extremes are stored. Shorter lines save less than they cost.
MIN_LINE_ELEMENTS = 32
MAX_LINE_ELEMENTS = 128


def can_fold(weight: Tensor, steps: Steps) -> bool:
    """Tell whether `fake_quantize_folded` supports a weight: float32 on a CPU, and limits on both sides of zero.

    Args:
        weight: The weight.
        steps: Its quantization steps.
    """
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    has_limits = steps.shift is None and not isinstance(steps.low, Tensor) and steps.low <= -1 <= 1 <= float(steps.high)
    return is_plain and has_limits and not is_traced(weight) and steps.scale.numel() in (1, len(weight))


class LineExtremes(NamedTuple):
    """Minimum and maximum of each line of a weight. A line is a part of a row, for example 128 elements.

    Rounding is monotone, so the extremes of the rounded products are the rounded products of the extremes, exactly. So
    only the few lines whose extremes are outside the range are searched for clamped elements.

    Attributes:
        weight: The weight.
        factor: The factor of the batch norm, one per row.
        line_ends: Minimum and maximum of each line, shape (2, rows, lines per row).
    """

    weight: Tensor
    factor: Tensor
    line_ends: Tensor

    @classmethod
    def compute(cls, weight: Tensor, factor: Tensor) -> Self:
        """Compute the extremes of a weight."""
        length = _line_length(weight[0].numel())
        lines, line_ends = weight.view(-1, length), weight.new_empty(2, weight.numel() // length)
        pieces = [torch.split(tensor, max(1, PIECE_ELEMENTS // length)) for tensor in (lines, *line_ends)]
        for part, low, high in zip(*pieces, strict=True):
            torch.amin(part, 1, out=low)  # amin and amax are vectorized along an axis, aminmax is not (torch 2.13)
            torch.amax(part, 1, out=high)
        return cls(weight, factor, line_ends.view(2, len(weight), -1))

    def extremes(self) -> Tensor:
        """Return minimum and maximum of each row of weight * factor, shape (rows, 2, 1, ...)."""
        low, high = self.line_ends
        row_ends = torch.stack((low.amin(1), high.amax(1)), 1).mul_(self.factor.view(-1, 1))
        return row_ends.view(len(self.weight), 2, *(1 for _ in self.weight.shape[2:]))

    def find_clamped(self, steps: Steps) -> Tensor | None:
        """Return the indices of the flat weight where weight * factor is clamped; None if there are many.

        An index may appear twice.
        """
        factor, scale = self.factor.view(-1, 1), steps.scale.reshape(-1, 1).expand(len(self.weight), 1)
        low, high = float(steps.low), float(steps.high)
        line_count, lines_per_row = self.line_ends[0].numel(), self.line_ends.shape[2]
        line_length = self.weight.numel() // line_count
        # The lines with an extreme outside of the limits.
        rounded_ends = (self.line_ends * factor).div_(scale).round_()
        lines = is_outside(rounded_ends, low, high).view(-1).nonzero().view(-1)
        if 2 * len(lines) > line_count:
            return None
        lines = lines.remainder_(line_count)  # minima first, then maxima: a line may appear twice
        # The elements of these lines that are outside.
        rows = lines // lines_per_row
        t = self.weight.view(-1, line_length)[lines].mul_(factor[rows]).div_(scale[rows]).round_()
        clamped_lines, column = is_outside(t, low, high).nonzero().unbind(1)
        return lines[clamped_lines].mul_(line_length).add_(column)


@lru_cache
def _line_length(width: int) -> int:
    """Return the longest allowed line that divides a row; the row itself if that is too short."""
    longest = max((size for size in range(1, min(width, MAX_LINE_ELEMENTS) + 1) if width % size == 0), default=width)
    return longest if longest >= MIN_LINE_ELEMENTS else width


def fake_quantize_folded(
    weight: Tensor,
    factor: Tensor,
    steps: Steps,
    fmt: Format,
    *,
    clamped_indices: Tensor | None = None,
    owns_grad: bool = False,
) -> Tensor:
    """Fold a batch norm into a weight, fake-quantize it and divide by the factor again, with gradients.

    Args:
        weight: The weight.
        factor: The factor of the batch norm, a constant.
        steps: Quantization steps; they must not be changed before backward.
        fmt: The element format.
        clamped_indices: Indices of the clamped elements in the flat weight, if known.
        owns_grad: Backward may overwrite its incoming gradient, because nothing else reads it.

    Returns:
        The weight as the layer uses it.
    """
    settings = _FoldSettings(steps.map(Tensor.detach), fmt, owns_grad)
    y: Tensor = _FoldedFakeQuantize.apply(  # type: ignore[no-untyped-call]
        weight, steps.scale, factor, clamped_indices, settings
    )
    return y


@torch.no_grad()
def round_trip_folded(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Compute `fake_quantize_folded` without gradients.

    Args:
        weight: The weight.
        factor: The factor of the batch norm.
        steps: Quantization steps.
        fmt: The element format.
    """
    y = torch.empty_like(weight)
    # All steps write into the output: less memory has to stay in cache.
    for (part, t), row_factor, row_steps in _iterate_rows((weight, y), factor, steps):
        to_unclamped_code(torch.mul(part, row_factor, out=t), row_steps, fmt, t)
        clamp(t, row_steps, t).mul_(row_steps.scale / row_factor)
    return y


def _iterate_rows(
    tensors: tuple[Tensor, ...], factor: Tensor, steps: Steps
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Steps]]:
    """Yield matching rows of the tensors with their factors and steps, about PIECE_ELEMENTS at a time."""
    flat = [tensor.view(len(tensor), -1) for tensor in tensors]
    count = max(1, PIECE_ELEMENTS // flat[0].shape[1])
    scale = steps.scale.reshape(-1, 1)
    scales = torch.split(scale, count) if len(scale) > 1 else repeat(scale)
    pieces = [torch.split(tensor, count) for tensor in (*flat, factor.view(-1, 1))]
    for *parts, row_factor, row_scale in zip(*pieces, scales, strict=False):
        yield tuple(parts), row_factor, steps._replace(scale=row_scale)


class _FoldSettings(NamedTuple):
    steps: Steps
    fmt: Format
    owns_grad: bool


class _FoldedFakeQuantize(torch.autograd.Function):
    """Saves the weight, which is in memory anyway, and the indices of clamped elements."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, factor: Tensor, clamped_indices: Tensor | None, settings: _FoldSettings
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, factor, clamped_indices)
        ctx.settings = settings
        return round_trip_folded(weight, factor, settings.steps, settings.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, factor, clamped_indices = ctx.saved_tensors
        steps, fmt, owns_grad = ctx.settings
        if torch.is_grad_enabled():  # create_graph=True: use operations that can be differentiated again
            shape = (-1, *(1 for _ in weight.shape[1:]))
            s, row_scale = factor.view(shape), scale.reshape(shape)
            weight_grad, element_grads = compute_gradients(
                weight * s, grad, row_scale, steps._replace(scale=row_scale), fmt
            )
            scale_grad = (element_grads / s).sum_to_size(row_scale.shape).view(scale.shape)
            return weight_grad, scale_grad, None, None, None
        learns_scale = ctx.needs_input_grad[1]
        if clamped_indices is not None and not learns_scale:
            return _zero_gradient_at(grad, clamped_indices, in_place=owns_grad), None, None, None, None
        grad = grad.contiguous()
        weight_grad, row_sums = _compute_gradients(
            weight, grad, factor, steps, fmt, learns_scale=learns_scale, out=grad if owns_grad else None
        )
        scale_grad = None if row_sums is None else row_sums.sum_to_size((scale.numel(),)).view(scale.shape)
        return weight_grad, scale_grad, None, None, None


def _zero_gradient_at(grad: Tensor, indices: Tensor, *, in_place: bool) -> Tensor:
    if not indices.numel():
        return grad
    if not (in_place and grad.is_contiguous()):
        grad = grad.clone(memory_format=torch.contiguous_format)
    grad.view(-1)[indices] = 0.0
    return grad


def _compute_gradients(
    weight: Tensor, grad: Tensor, factor: Tensor, steps: Steps, fmt: Format, *, learns_scale: bool, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the steps again and compute the gradient of the weight (into `out`) and, if learned, of each row's scale."""
    weight_grad = torch.empty_like(grad) if out is None else out
    row_sums: list[Tensor] = []
    scratch, limits = ScratchBuffers(), get_code_limits(steps, fmt)
    assert limits is not None  # noqa: S101  # can_fold has checked that the limits are numbers
    for (part, upstream, target), row_factor, row_steps in _iterate_rows((weight, grad, weight_grad), factor, steps):
        t = torch.mul(part, row_factor, out=scratch(part)).div_(row_steps.scale)
        rounded = torch.round(t, out=scratch(part, 1))
        if learns_scale:
            # c - t inside, c outside: subtract t only inside, then clamp. Inside, |c - t| <= 0.5 is not clamped,
            # because can_fold asks for limits of at least 1.
            inner = mask_gradient(t, rounded, limits, t)
            element_grads = torch.sub(rounded, inner, out=t).clamp_(limits.low, limits.high)
            row_sums.append(element_grads.mul_(upstream).sum(1).div_(row_factor.view(-1)))
        mask_gradient(upstream, rounded, limits, target)
    return weight_grad, torch.cat(row_sums) if learns_scale else None
