"""Fake quantization with a straight-through gradient.

    y = dequantize(quantize(x)) in the dtype of x        dy/dx = 1 inside the range, 0 where x was clamped

Eager, it is one autograd node over the piecewise kernel. Traced (export, compile, vmap, func.grad), the
same steps run as plain operations, and y + where(inside, x - x.detach(), 0) carries the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scalepoint.compat.torch_names import is_functorch_active
from scalepoint.numerics.affine import (
    PIECE,
    ClampRecorder,
    ScratchBuffers,
    Steps,
    cast_to_input_dtype,
    compute_centred_code,
    make_steps,
    round_trip,
    round_trip_traced,
)
from scalepoint.numerics.blocks import is_ragged
from scalepoint.numerics.formats import Format, Grid
from scalepoint.numerics.gradients import compute_gradients, get_code_limits, mask_gradient, scale_slope
from scalepoint.numerics.qparams import QParams
from scalepoint.numerics.quantize import Block, apply_by_block
from scalepoint.numerics.saved_codes import mark_quantized
from scalepoint.numerics.tracing import is_traced


def fake_quantize(
    x: Tensor,
    qparams: QParams,
    grid: Grid,
    block: Block = None,
    *,
    fixed_zero: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute dequantize(quantize(x)) with a straight-through gradient.

    Gradients reach x, and the scale only if it requires them (LSQ).

    Args:
        x: The tensor.
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        block: Size of a block along each axis. None: the parameters broadcast.
        fixed_zero: The zero point is the middle of a symmetric grid, as `choose_qparams` makes it. This saves one pass.
        out: Receives the result if no gradient is needed; contiguous and shaped like x.
    """

    if out is not None and block is not None and is_ragged(x.shape, block):
        return out.copy_(fake_quantize(x, qparams, grid, block, fixed_zero=fixed_zero))

    def run(part: Tensor, params: QParams) -> Tensor:
        target = None if out is None else out.view(part.shape)
        return fake_quantize_by_steps(part, make_steps(params, grid, fixed_zero=fixed_zero), grid.format, target)

    return apply_by_block(run, x, qparams, block)


def fake_quantize_by_steps(x: Tensor, steps: Steps, fmt: Format, out: Tensor | None = None) -> Tensor:
    """Fake-quantize with precomputed steps. A frozen quantizer calls this in every forward.

    Args:
        x: The tensor.
        steps: What `steps_of` returned; it broadcasts against x.
        fmt: The element format.
        out: Receives the result if no gradient is needed.
    """
    learns = steps.scale.requires_grad
    needs_grad = (x.requires_grad or learns) and torch.is_grad_enabled()
    if is_traced(x):
        return _fake_quantize_traced(x, steps, fmt, learns=learns, needs_grad=needs_grad or is_functorch_active())
    if not needs_grad:
        return round_trip(x, steps, fmt, out=out)
    x = x.clone() if x.is_inference() else x
    node, inputs = (_LearnedScale, (x, steps.scale)) if learns else (_StraightThrough, (x,))
    y: Tensor = node.apply(*inputs, steps, fmt)  # type: ignore[no-untyped-call]
    return mark_quantized(y, steps, fmt)


def _fake_quantize_traced(x: Tensor, steps: Steps, fmt: Format, *, learns: bool, needs_grad: bool) -> Tensor:
    if learns:
        return _learn_scale_traced(x, steps, fmt)
    y, inside = round_trip_traced(x.detach().to(torch.float32), steps, fmt)
    y = cast_to_input_dtype(y, x.dtype)
    return y + torch.where(inside, x - x.detach(), 0.0) if needs_grad else y


class _StraightThrough(torch.autograd.Function):
    """Keeps one byte an element for backward, the places of the clamped where they are few, or nothing for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps, fmt: Format) -> Tensor:
        clamped = ClampRecorder(x)
        y = round_trip(x, steps, fmt, clamped=clamped)
        places = clamped.places
        ctx.save_for_backward(clamped.inside, places)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inside, places = ctx.saved_tensors
        if places is not None:
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1)[places] = 0.0
            return grad, None, None
        return grad if inside is None else torch.where(inside, grad, 0.0), None, None


class _LearnedScale(torch.autograd.Function):
    """The same with a gradient for the scale; x is kept instead of a mask, and the steps run again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.steps, ctx.fmt = steps.map(Tensor.detach), fmt
        return round_trip(x, steps, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        steps, fmt = ctx.steps, ctx.fmt
        ends = get_code_limits(steps, fmt)
        is_plain = x.dtype == grad.dtype == torch.float32 and x.device.type == "cpu"
        if (
            torch.is_grad_enabled() or ends is None or not is_plain
        ):  # to be differentiated again: the formula as a whole
            of_x, by_element = compute_gradients(x, grad, scale, steps, fmt)
            return of_x, by_element.sum_to_size(scale.shape), None, None
        of_x, sums, like = torch.empty_like(grad), [], ScratchBuffers()
        for own, part, target, by in _iterate_rows(x, grad, of_x, steps):  # in cache, and nothing as large as x is made
            t = torch.div(own if by.shift is None else own - by.shift, by.scale, out=like(own))
            rounded = like(own, 1).copy_(t) if fmt.is_float else torch.round(t, out=like(own, 1))
            mask_gradient(part, rounded, ends, target)
            sums.append(scale_slope(t, rounded, ends, fmt).mul_(part).sum_to_size(by.scale.shape))
        total = torch.stack(sums).sum(0) if steps.is_uniform else torch.cat(sums)
        return of_x, total.reshape(scale.shape), None, None


def _iterate_rows(
    x: Tensor, grad: Tensor, of_x: Tensor, steps: Steps
) -> Iterator[tuple[Tensor, Tensor, Tensor, Steps]]:
    """All three and the steps in pieces, where one scale serves all or each of the first axis; else whole."""
    is_plain = x.numel() > PIECE and all(each.is_contiguous() for each in (x, grad, of_x))
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


def _learn_scale_traced(x: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """LSQ (Esser et al. 2020): dy/dscale = c - t inside the range, c where clamped; dy/dx as ever."""
    wide = x.to(torch.float32)
    t = (wide if steps.shift is None else wide - steps.shift) / steps.scale
    with torch.no_grad():
        c = compute_centred_code(wide, steps, fmt)
        rounded = t if fmt.is_float else torch.round(t)
        inside = (rounded >= steps.low) & (rounded <= steps.high)
    y = torch.where(inside, t + (c - t.detach()), c) * steps.scale
    return cast_to_input_dtype(y if steps.shift is None else y + steps.shift, x.dtype)
