"""A weight as it is deployed with its batch norm folded in, and unfolded again: one pass over it in training.

    y = quantize-dequantize(w s) / s,  s one value a row        dy/dw = 1 inside the range, 0 where w s was clamped
    dy/dscale = (c - t) / s inside the range, c / s where clamped, for a scale that is learned (t, c: see `affine`)

The steps are those of `affine`, with the products by s and 1/s in the same cache-sized pieces. Kept for backward is the
weight, from which the steps run again where it is not known what they clamped. A scale that follows the weight clamps
next to nothing but the largest of a row, and the extremes that it is made from tell where.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE, ScratchBuffers, Steps, clamp, divide, is_outside
from scalepoint.numerics.formats import Format
from scalepoint.numerics.gradients import compute_gradients, get_code_limits, mask_gradient
from scalepoint.numerics.tracing import is_traced

LONGEST_LINE, SHORTEST_LINE = 128, 32  # elements of a row that are looked at together


def can_fold(weight: Tensor, steps: Steps) -> bool:
    """Tell whether `fold_and_back` supports a weight: float32 rows on a CPU, and limits on both sides of zero.

    Args:
        weight: The weight.
        steps: Its quantization steps.
    """
    is_plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    is_known = steps.shift is None and not isinstance(steps.low, Tensor) and steps.low <= -1 <= 1 <= float(steps.high)
    return is_plain and is_known and not is_traced(weight) and steps.scale.numel() in (1, len(weight))


class LineExtremes(NamedTuple):
    """A weight, one factor a row, and the least and the largest of each line of its rows: (2, rows, lines of a row).

    Rounding is monotone, so that the extremes of rounded products are the rounded products of extremes, exactly.
    """

    weight: Tensor
    factor: Tensor
    line_ends: Tensor

    @classmethod
    def compute(cls, weight: Tensor, factor: Tensor) -> Self:
        line = _line_length(weight[0].numel())
        lines, line_ends = weight.view(-1, line), weight.new_empty(2, weight.numel() // line)
        cut = [torch.split(tensor, max(1, PIECE // line)) for tensor in (lines, *line_ends)]
        for part, low, high in zip(*cut, strict=True):
            torch.amin(part, 1, out=low)  # each vectorized, as aminmax along an axis is not
            torch.amax(part, 1, out=high)
        return cls(weight, factor, line_ends.view(2, len(weight), -1))

    def extremes(self) -> Tensor:
        """Least and largest of each row of the product, of the rank of the weight: they have the range that it has."""
        low, high = self.line_ends
        row_ends = torch.stack((low.amin(1), high.amax(1)), 1).mul_(self.factor.view(-1, 1))
        return row_ends.view(len(self.weight), 2, *(1 for _ in self.weight.shape[2:]))

    def find_clamped(self, steps: Steps) -> Tensor | None:
        """Places of the flat weight where the steps clamp the product, perhaps twice; None for too many."""
        factor, scale = self.factor.view(-1, 1), steps.scale.reshape(-1, 1).expand(len(self.weight), 1)
        low, high = float(steps.low), float(steps.high)
        lines = is_outside((self.line_ends * factor).div_(scale).round_(), low, high).view(-1).nonzero().view(-1)
        count, lines_per_row = self.line_ends[0].numel(), self.line_ends.shape[2]
        if 2 * len(lines) > count:
            return None
        lines = lines.remainder_(count)  # one that is beyond both ends comes twice, which does no harm
        rows, line = lines // lines_per_row, self.weight.numel() // count
        t = self.weight.view(-1, line)[lines].mul_(factor[rows]).div_(scale[rows]).round_()
        clamped_lines, column = is_outside(t, low, high).nonzero().unbind(1)
        return lines[clamped_lines].mul_(line).add_(column)


@lru_cache
def _line_length(width: int) -> int:
    """How many elements of a row are a line: one that divides it."""
    longest = max((size for size in range(1, min(width, LONGEST_LINE) + 1) if width % size == 0), default=width)
    return longest if longest >= SHORTEST_LINE else width


def fake_quantize_folded(
    weight: Tensor,
    factor: Tensor,
    steps: Steps,
    fmt: Format,
    *,
    places: Tensor | None = None,
    owns_grad: bool = False,
) -> Tensor:
    """Fold a batch norm into a weight, fake-quantize it and divide by the factor again, with gradients.

    Args:
        weight: The weight.
        factor: The factor of the batch norm, a constant.
        steps: Quantization steps; they must not be changed before backward.
        fmt: The element format.
        places: Indices of the clamped elements in the flat weight, if known.
        owns_grad: The incoming gradient belongs to nobody else and may be overwritten.

    Returns:
        The weight as the layer uses it.
    """
    how = _FoldSettings(steps.map(Tensor.detach), fmt, owns_grad)
    y: Tensor = _FoldedFakeQuantize.apply(weight, steps.scale, factor, places, how)  # type: ignore[no-untyped-call]
    return y


@torch.no_grad()
def round_trip_folded(weight: Tensor, factor: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Compute `fold_and_back` without gradients.

    Args:
        weight: The weight.
        factor: The factor of the batch norm.
        steps: Quantization steps.
        fmt: The element format.
    """
    y = torch.empty_like(weight)
    for (part, t), times, row_steps in _iterate_rows(
        (weight, y), factor, steps
    ):  # in y from the first step on: less to keep in cache
        clamp(divide(torch.mul(part, times, out=t), row_steps, fmt, t), row_steps, t).mul_(row_steps.scale / times)
    return y


def _iterate_rows(
    tensors: tuple[Tensor, ...], factor: Tensor, steps: Steps
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Steps]]:
    """Rows of all with their factors and steps, about PIECE elements at a time."""
    flat = [tensor.view(len(tensor), -1) for tensor in tensors]
    count = max(1, PIECE // flat[0].shape[1])
    scale = steps.scale.reshape(-1, 1)
    scales = torch.split(scale, count) if len(scale) > 1 else [scale] * len(factor)
    cut = [torch.split(tensor, count) for tensor in (*flat, factor.view(-1, 1))]
    for *parts, times, row_steps in zip(*cut, scales, strict=False):
        yield tuple(parts), times, steps._replace(scale=row_steps)


class _FoldSettings(NamedTuple):
    steps: Steps
    fmt: Format
    owns_grad: bool


class _FoldedFakeQuantize(torch.autograd.Function):
    """Keeps the weight, which is there anyway, and the places of what was clamped."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, factor: Tensor, places: Tensor | None, how: _FoldSettings
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, factor, places)
        ctx.how = how
        return round_trip_folded(weight, factor, how.steps, how.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, factor, places = ctx.saved_tensors
        steps, fmt, owns_grad = ctx.how
        if torch.is_grad_enabled():  # to be differentiated again: the formula as a whole
            shape = (-1, *(1 for _ in weight.shape[1:]))
            s, own = factor.view(shape), scale.reshape(shape)
            of_weight, by_element = compute_gradients(weight * s, grad, own, steps._replace(scale=own), fmt)
            return of_weight, (by_element / s).sum_to_size(own.shape).view(scale.shape), None, None, None
        learns = ctx.needs_input_grad[1]
        if places is not None and not learns:
            return _zero_gradient_at(grad, places, is_own=owns_grad), None, None, None, None
        grad = grad.contiguous()
        of_weight, sums = _compute_gradients(
            weight, grad, factor, steps, fmt, learns=learns, out=grad if owns_grad else None
        )
        of_scale = None if sums is None else sums.sum_to_size((scale.numel(),)).view(scale.shape)
        return of_weight, of_scale, None, None, None


def _zero_gradient_at(grad: Tensor, places: Tensor, *, is_own: bool) -> Tensor:
    """The gradient with 0 in these places."""
    if not places.numel():
        return grad
    if not (is_own and grad.is_contiguous()):
        grad = grad.clone(memory_format=torch.contiguous_format)
    grad.view(-1)[places] = 0.0
    return grad


def _compute_gradients(
    weight: Tensor, grad: Tensor, factor: Tensor, steps: Steps, fmt: Format, *, learns: bool, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the weight, into `out`, and of the scale by row where it `learns`: the steps run again."""
    of_weight, sums, like = torch.empty_like(grad) if out is None else out, [], ScratchBuffers()
    ends = get_code_limits(steps, fmt)
    assert ends is not None  # noqa: S101  # limits are numbers: can_fold
    for (part, upstream, target), times, row_steps in _iterate_rows((weight, grad, of_weight), factor, steps):
        t = torch.mul(part, times, out=like(part)).div_(row_steps.scale)
        rounded = torch.round(t, out=like(part, 1))
        if learns:
            inner = mask_gradient(t, rounded, ends, t)  # inside, c - t is half a code at most, and no limit: can_fold
            by_element = torch.sub(rounded, inner, out=t).clamp_(ends.low, ends.high)
            sums.append(by_element.mul_(upstream).sum(1).div_(times.view(-1)))
        mask_gradient(upstream, rounded, ends, target)
    return of_weight, torch.cat(sums) if learns else None
