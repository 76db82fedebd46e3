"""The language of a stored graph: what is quantized, weights and activations alike, is in operators of our own.

    quantize      codes = clamp(round(x / scale) + zero_point, low, high)
    dequantize    x' = (codes - zero_point) * scale
    look_up       x' = table[codes], of palettized weights
    rows          x' = what int8 keeps of every row, with parameters that are found anew

A file format is a table that translates them. `axis` says which one has a scale each, `block` > 0 how many share one
along it; `fmt` is the name of the format of the codes, which may be narrower than the type they are kept in.
"""

import torch
from torch import Tensor

from scalepoint.numerics import get_format
from scalepoint.numerics.palette import from_groups, to_groups
from scalepoint.spec.spec import to_dtype


@torch.library.custom_op("scalepoint::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    """The codes in their storage type; of a float format the zero point is 0."""
    scale, zero = _broadcast_along_axis(scale, zero_point, x.ndim, axis)
    steps = x.to(torch.float32) / scale
    storage = get_format(to_dtype(fmt)).storage
    codes = steps if storage.is_floating_point else steps.round() + zero
    return codes.clamp(low, high).to(storage)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    return torch.empty_like(x, dtype=get_format(to_dtype(fmt)).storage)


@torch.library.custom_op("scalepoint::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    """What the codes stand for; without a zero point it is 0."""
    zero = torch.zeros_like(scale) if zero_point is None else zero_point
    if block:
        scale, zero = (value.to(torch.float32).repeat_interleave(block, axis) for value in (scale, zero))
    else:
        scale, zero = _broadcast_along_axis(scale, zero, codes.ndim, axis)
    return (codes.to(torch.float32) - zero) * scale


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    return torch.empty(codes.shape, dtype=scale.dtype, device=codes.device)


@torch.library.custom_op("scalepoint::look_up", mutates_args=())
def look_up(codes: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    """The entries of tables (groups, entries) that indices stand for; neighbouring channels of an axis are a group."""
    values = tables.gather(-1, to_groups(codes, axis, tables.shape[0]).long())
    return from_groups(values, codes.shape, axis).contiguous()


@look_up.register_fake
def _(codes: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    return torch.empty(codes.shape, dtype=tables.dtype, device=codes.device)


@torch.library.custom_op("scalepoint::rows", mutates_args=())
def quantize_rows(x: Tensor) -> Tensor:
    """Asymmetric, of ranges that hold zero, over the last axis."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


@quantize_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _broadcast_along_axis(scale: Tensor, zero_point: Tensor, rank: int, axis: int) -> tuple[Tensor, Tensor]:
    """Both as they broadcast against a tensor of so many axes."""
    shape = [1] * rank
    if scale.ndim:
        shape[axis] = -1
    return scale.to(torch.float32).view(shape), zero_point.to(torch.float32).view(shape)
