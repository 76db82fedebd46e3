"""Fake quantization with a straight-through gradient.

    y = dequantize(quantize(x)) in the dtype of x        dy/dx = 1 inside the range, 0 where x was clamped

In eager mode this is one autograd node that works in pieces. Traced (export, compile, vmap, func.grad), the same steps
run as plain operations, and the gradient comes from y + where(inside, x - x.detach(), 0).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scalepoint.compat.torch_names import is_functorch_active
from scalepoint.numerics.affine import (
    PIECE_ELEMENTS,
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
        fixed_zero: The zero point is the middle of a symmetric grid, as from `choose_qparams`. This saves one pass.
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
        steps: From `make_steps`; they broadcast against x.
        fmt: The element format.
        out: Receives the result if no gradient is needed.
    """
    learns_scale = steps.scale.requires_grad
    needs_grad = (x.requires_grad or learns_scale) and torch.is_grad_enabled()
    if is_traced(x):
        needs_grad = needs_grad or is_functorch_active()
        return _fake_quantize_traced(x, steps, fmt, learns_scale=learns_scale, needs_grad=needs_grad)
    if not needs_grad:
        return round_trip(x, steps, fmt, out=out)
    x = x.clone() if x.is_inference() else x
    if learns_scale:
        return mark_quantized(_LearnedScale.apply(x, steps.scale, steps, fmt), steps, fmt)  # type: ignore[no-untyped-call]
    return mark_quantized(_StraightThrough.apply(x, steps, fmt), steps, fmt)  # type: ignore[no-untyped-call]


def _fake_quantize_traced(x: Tensor, steps: Steps, fmt: Format, *, learns_scale: bool, needs_grad: bool) -> Tensor:
    if learns_scale:
        return _learn_scale_traced(x, steps, fmt)
    y, inside = round_trip_traced(x.detach().to(torch.float32), steps, fmt)
    y = cast_to_input_dtype(y, x.dtype)
    return y + torch.where(inside, x - x.detach(), 0.0) if needs_grad else y


class _StraightThrough(torch.autograd.Function):
    """Saves for backward the indices of clamped elements if they are few, else a mask of one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps, fmt: Format) -> Tensor:
        clamped = ClampRecorder(x)
        y = round_trip(x, steps, fmt, clamped=clamped)
        ctx.save_for_backward(*clamped.finish())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inside, indices = ctx.saved_tensors
        if indices is not None:
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1)[indices] = 0.0
            return grad, None, None
        return grad if inside is None else torch.where(inside, grad, 0.0), None, None


class _LearnedScale(torch.autograd.Function):
    """Fake quantization with a gradient for the scale. Saves x, and runs the steps again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, steps: Steps, fmt: Format) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.steps, ctx.fmt = steps.map(Tensor.detach), fmt
        return round_trip(x, steps, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        steps, fmt = ctx.steps, ctx.fmt
        limits = get_code_limits(steps, fmt)
        is_plain = x.dtype == grad.dtype == torch.float32 and x.device.type == "cpu"
        # With create_graph=True backward itself must be differentiable.
        if torch.is_grad_enabled() or limits is None or not is_plain:
            x_grad, element_grads = compute_gradients(x, grad, scale, steps, fmt)
            return x_grad, element_grads.sum_to_size(scale.shape), None, None
        x_grad, sums, scratch = torch.empty_like(grad), [], ScratchBuffers()
        # In pieces, so that no other tensor as large as x is allocated.
        for part, upstream, target, part_steps in _iterate_pieces(x, grad, x_grad, steps):
            shifted = part if part_steps.shift is None else part - part_steps.shift
            t = torch.div(shifted, part_steps.scale, out=scratch(part))
            rounded = scratch(part, 1).copy_(t) if fmt.is_float else torch.round(t, out=scratch(part, 1))
            mask_gradient(upstream, rounded, limits, target)
            element_grads = scale_slope(t, rounded, limits, fmt).mul_(upstream)
            sums.append(element_grads.sum_to_size(part_steps.scale.shape))
        scale_grad = torch.stack(sums).sum(0) if steps.is_uniform else torch.cat(sums)
        return x_grad, scale_grad.reshape(scale.shape), None, None


def _iterate_pieces(
    x: Tensor, grad: Tensor, x_grad: Tensor, steps: Steps
) -> Iterator[tuple[Tensor, Tensor, Tensor, Steps]]:
    """Yield matching pieces of the tensors and the steps.

    Cuts the tensors if there is one scale, or one for each index of the first axis. Otherwise yields them as they are.
    """
    tensors = (x, grad, x_grad)
    is_plain = x.numel() > PIECE_ELEMENTS and all(tensor.is_contiguous() for tensor in tensors)
    if is_plain and steps.is_uniform:
        flat_steps = steps.map(lambda value: value.reshape(1))
        for parts in zip(*(torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in tensors), strict=True):
            yield *parts, flat_steps
        return
    has_scale_per_row = steps.scale.ndim == x.ndim and steps.scale.numel() == steps.scale.shape[0] == x.shape[0]
    if not (is_plain and has_scale_per_row and len(x) > 1):
        yield x, grad, x_grad, steps
        return
    rows = max(1, PIECE_ELEMENTS * len(x) // x.numel())
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        part_steps = [
            value[part] if isinstance(value, Tensor) and value.shape == steps.scale.shape else value for value in steps
        ]
        yield x[part], grad[part], x_grad[part], Steps(*part_steps)  # type: ignore[arg-type]


def _learn_scale_traced(x: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """LSQ (Esser et al. 2020): dy/dscale = c - t inside the range, c where clamped. dy/dx is straight-through."""
    x_float32 = x.to(torch.float32)
    t = (x_float32 if steps.shift is None else x_float32 - steps.shift) / steps.scale
    with torch.no_grad():
        c = compute_centred_code(x_float32, steps, fmt)
        rounded = t if fmt.is_float else torch.round(t)
        inside = (rounded >= steps.low) & (rounded <= steps.high)
    y = torch.where(inside, t + (c - t.detach()), c) * steps.scale
    return cast_to_input_dtype(y if steps.shift is None else y + steps.shift, x.dtype)
