"""Fake quantization with a straight-through gradient.

    y = dequantize(quantize(x)) in the dtype of x        dy/dx = 1 inside the range, 0 where x was clamped

Eager, it is one autograd node over the piecewise kernel. Traced (export, compile, vmap, func.grad), the
same steps run as plain operations, and y + where(inside, x - x.detach(), 0) carries the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scalepoint.numerics.affine import (
    PIECE,
    Steps,
    centred_code,
    clamp,
    narrow,
    round_trip,
    round_trip_traced,
    steps_of,
)
from scalepoint.numerics.blocks import is_ragged
from scalepoint.numerics.format import Format, Grid
from scalepoint.numerics.kept import mark
from scalepoint.numerics.qparams import QParams
from scalepoint.numerics.quantize import Block, by_block
from scalepoint.numerics.rounding import round_to_float

MANY = 4096  # elements, below which a mask costs nothing
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def fake_quantize(
    x: Tensor,
    qparams: QParams,
    grid: Grid,
    block: Block = None,
    *,
    fixed_zero: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """dequantize(quantize(x)); no gradient reaches the parameters, unless the scale asks for one (LSQ).

    `fixed_zero` says that a symmetric grid's zero point is its middle, as `choose_qparams` makes it: one pass
    less. `out`, shaped as x and contiguous, receives the result when no gradient is needed.
    """

    if out is not None and block is not None and is_ragged(x.shape, block):
        return out.copy_(fake_quantize(x, qparams, grid, block, fixed_zero=fixed_zero))

    def run(part: Tensor, params: QParams) -> Tensor:
        target = None if out is None else out.view(part.shape)
        return straight_through(part, steps_of(params, grid, fixed_zero=fixed_zero), grid.format, target)

    return by_block(run, x, qparams, block)


def straight_through(x: Tensor, steps: Steps, fmt: Format, out: Tensor | None = None) -> Tensor:
    """The same with the steps at hand, which broadcast against x: what a frozen quantizer calls again and again."""
    learns = steps.scale.requires_grad
    needs_grad = (x.requires_grad or learns) and torch.is_grad_enabled()
    if is_traced(x):
        return _traced(x, steps, fmt, learns=learns, needs_grad=needs_grad or is_transformed())
    if not needs_grad:
        return round_trip(x, steps, fmt, out=out)[0]
    x = x.clone() if x.is_inference() else x
    node, inputs = (_LearnedScale, (x, steps.scale)) if learns else (_StraightThrough, (x,))
    y: Tensor = node.apply(*inputs, steps, fmt)  # type: ignore[no-untyped-call]
    return mark(y, steps, fmt)


def is_traced(x: Tensor) -> bool:
    """Whether somebody records or transforms the operations instead of just running them."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN or is_transformed()


def is_transformed() -> bool:
    """Whether vmap, func.grad or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _traced(x: Tensor, steps: Steps, fmt: Format, *, learns: bool, needs_grad: bool) -> Tensor:
    if learns:
        return _learned(x, steps, fmt)
    y, inside = round_trip_traced(x.detach().to(torch.float32), steps, fmt)
    y = narrow(y, x.dtype)
    return y + torch.where(inside, x - x.detach(), 0.0) if needs_grad else y


class _StraightThrough(torch.autograd.Function):
    """Keeps one byte an element for backward, the places of the clamped where they are few, or nothing for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps, fmt: Format) -> Tensor:
        y, inside = round_trip(x, steps, fmt, want_inside=True)
        places = None if inside is None or x.numel() < MANY else _few(inside)
        ctx.save_for_backward(inside if places is None else None, places)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inside, places = ctx.saved_tensors
        if places is not None:
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1)[places] = 0.0
            return grad, None, None
        return grad if inside is None else torch.where(inside, grad, 0.0), None, None


def _few(inside: Tensor) -> Tensor | None:
    """The places outside, when they take less than a mask by far; they are looked for only on a CPU."""
    if inside.device.type != "cpu" or not inside.is_contiguous():
        return None
    outside = inside.view(-1).logical_not()
    count = int(torch.count_nonzero(outside))
    return outside.nonzero().view(-1) if 64 * count <= inside.numel() else None


class _LearnedScale(torch.autograd.Function):
    """The same with a gradient for the scale; x is kept instead of a mask, and the steps run again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.steps, ctx.fmt = steps.map(Tensor.detach), fmt
        return round_trip(x, steps, fmt)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        steps, fmt = ctx.steps, ctx.fmt
        if torch.is_grad_enabled():  # to be differentiated again: the formula as a whole
            of_x, slope = _slopes(x, grad, scale, steps, fmt)
            return of_x, slope.sum_to_size(scale.shape), None, None
        of_x, slopes = torch.empty_like(grad), []
        for own, part, target, by in _rows(x, grad, of_x, steps):  # in cache, and nothing as large as x is made
            found, slope = _slopes(own, part, by.scale, by, fmt)
            target.copy_(found)
            slopes.append(slope.sum_to_size(by.scale.shape))
        total = torch.stack(slopes).sum(0) if steps.is_uniform else torch.cat(slopes)
        return of_x, total.to(scale.dtype).reshape(scale.shape), None, None


def _rows(x: Tensor, grad: Tensor, of_x: Tensor, steps: Steps) -> Iterator[tuple[Tensor, Tensor, Tensor, Steps]]:
    """All three and the steps in pieces, where one scale serves all or each of the first axis; else whole."""
    is_plain = x.numel() >= 2 * PIECE and all(each.is_contiguous() for each in (x, grad, of_x))
    if is_plain and steps.is_uniform:
        flat = steps.map(lambda value: value.reshape(1))
        for parts in zip(*(torch.split(each.view(-1), PIECE) for each in (x, grad, of_x)), strict=True):
            yield *parts, flat
        return
    is_by_first = steps.scale.ndim == x.ndim and steps.scale.numel() == steps.scale.shape[0] == x.shape[0]
    if not (is_plain and is_by_first and len(x) > 1):
        yield x, grad, of_x, steps
        return
    rows = max(1, PIECE * len(x) // x.numel())
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        own = [
            value[part] if isinstance(value, Tensor) and value.shape == steps.scale.shape else value for value in steps
        ]
        yield x[part], grad[part], of_x[part], Steps(*own)  # type: ignore[arg-type]


def _slopes(x: Tensor, grad: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of the scale by element: c - t inside the range, c where clamped."""
    t = torch.div(x if steps.shift is None else x - steps.shift, scale).to(torch.float32)
    rounded = t if fmt.is_float else t.round()
    c = clamp(rounded, steps)
    inside = c == rounded
    if fmt.is_float:
        c = round_to_float(c, fmt)
    return torch.where(inside, grad, 0.0), c.sub_(t.mul_(inside)).mul_(grad)


def _learned(x: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """LSQ (Esser et al. 2020): dy/dscale = c - t inside the range, c where clamped; dy/dx as ever."""
    wide = x.to(torch.float32)
    t = (wide if steps.shift is None else wide - steps.shift) / steps.scale
    with torch.no_grad():
        c = centred_code(wide, steps, fmt)
        rounded = t if fmt.is_float else torch.round(t)
        inside = (rounded >= steps.low) & (rounded <= steps.high)
    y = torch.where(inside, t + (c - t.detach()), c) * steps.scale
    return narrow(y if steps.shift is None else y + steps.shift, x.dtype)
