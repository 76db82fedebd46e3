"""The custom torch operators of a stored graph. Every file format translates them.

    quantize      codes = clamp(round(x / scale) + zero_point, low, high)
    dequantize    x' = (codes - zero_point) * scale
    look_up       x' = table[codes], for palettized weights; entries may be vectors of neighbouring channels
    look_up_kept  the same; pruned weights are 0
    rows          x' = x rounded to int8 per row, with parameters computed from each row
    symmetric_rows      the same without zero points

    quantize_minval     codes = clamp(round((x - minval) / scale) + low, low, high)
    dequantize_minval   x' = (codes - low) * scale + minval

`axis` is the axis of the scales. With `block` > 0 that many elements along it share a scale. `fmt` is the numerics
format of the codes, for example int4 codes that are stored in int8.
"""

import torch
from torch import Tensor

from scalepoint.numerics import get_format
from scalepoint.numerics.palette import from_groups, from_vectors, to_groups
from scalepoint.spec.spec import to_dtype


@torch.library.custom_op("scalepoint::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    """Return the codes in their storage dtype. Float formats have no zero point."""
    scale, zero_point = _broadcast_along_axis(scale, zero_point, x.ndim, axis)
    steps = x.to(torch.float32) / scale
    storage = get_format(to_dtype(fmt)).storage
    codes = steps if storage.is_floating_point else steps.round() + zero_point
    return codes.clamp(low, high).to(storage)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    return torch.empty_like(x, dtype=get_format(to_dtype(fmt)).storage)


@torch.library.custom_op("scalepoint::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    """Return the values of the codes. `zero_point=None` stands for 0."""
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    if block:
        scale = _expand_blocks(scale, codes.shape, axis, block)
        zero_point = _expand_blocks(zero_point, codes.shape, axis, block)
    else:
        scale, zero_point = _broadcast_along_axis(scale, zero_point, codes.ndim, axis)
    return (codes.to(torch.float32) - zero_point) * scale


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    dtype = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@torch.library.custom_op("scalepoint::quantize_minval", mutates_args=())
def quantize_minval(x: Tensor, scale: Tensor, minval: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    """Return the codes in their storage dtype."""
    scale, minval = _broadcast_along_axis(scale, minval, x.ndim, axis)
    codes = ((x.to(torch.float32) - minval) / scale).round() + low
    return codes.clamp(low, high).to(get_format(to_dtype(fmt)).storage)


@quantize_minval.register_fake
def _(x: Tensor, scale: Tensor, minval: Tensor, axis: int, low: float, high: float, fmt: str) -> Tensor:
    return torch.empty_like(x, dtype=get_format(to_dtype(fmt)).storage)


@torch.library.custom_op("scalepoint::dequantize_minval", mutates_args=())
def dequantize_minval(codes: Tensor, scale: Tensor, minval: Tensor, axis: int, block: int, fmt: str) -> Tensor:
    """Return the values of the codes; the lowest code has the value `minval`."""
    if block:
        scale, minval = (_expand_blocks(value, codes.shape, axis, block) for value in (scale, minval))
    else:
        scale, minval = _broadcast_along_axis(scale, minval, codes.ndim, axis)
    return (codes.to(torch.float32) - get_format(to_dtype(fmt)).low) * scale + minval


@dequantize_minval.register_fake
def _(codes: Tensor, scale: Tensor, minval: Tensor, axis: int, block: int, fmt: str) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


@torch.library.custom_op("scalepoint::look_up", mutates_args=())
def look_up(codes: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    """Return the table entries that `codes` index; consecutive channels form a group.

    Tables: (groups, entries), or (groups, entries, dim). With vectors, a code stands for `dim` channels of `axis`.
    """
    index = to_groups(codes, axis, tables.shape[0]).long()
    if tables.ndim == 2:
        return from_groups(tables.gather(-1, index), codes.shape, axis).contiguous()
    vectors = tables.gather(1, index[..., None].expand(*index.shape, tables.shape[-1]))
    return from_vectors(vectors, torch.Size(_looked_up_shape(codes, tables, axis)), axis).contiguous()


@look_up.register_fake
def _(codes: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    return torch.empty(_looked_up_shape(codes, tables, axis), dtype=tables.dtype, device=codes.device)


def _looked_up_shape(codes: Tensor, tables: Tensor, axis: int) -> list[int]:
    dim = tables.shape[2] if tables.ndim == 3 else 1
    return [size * dim if index == axis else size for index, size in enumerate(codes.shape)]


@torch.library.custom_op("scalepoint::look_up_kept", mutates_args=())
def look_up_kept(codes: Tensor, mask: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    """Return the table entries (groups, entries) that `codes` index; 0 where `mask` is 0."""
    values: Tensor = look_up(codes, tables, axis, fmt)
    return values * mask


@look_up_kept.register_fake
def _(codes: Tensor, mask: Tensor, tables: Tensor, axis: int, fmt: str) -> Tensor:
    return torch.empty(codes.shape, dtype=tables.dtype, device=codes.device)


@torch.library.custom_op("scalepoint::rows", mutates_args=())
def quantize_rows(x: Tensor) -> Tensor:
    """Quantize and dequantize each row (last axis) asymmetrically; its range is extended to include zero."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero_point = (-128 - (low / scale).round()).clamp(-128, 127)
    return (((x / scale).round() + zero_point).clamp(-128, 127) - zero_point) * scale


@quantize_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("scalepoint::symmetric_rows", mutates_args=())
def quantize_rows_symmetric(x: Tensor) -> Tensor:
    """Quantize and dequantize each row (last axis) to int8 without a zero point. The scale is max|x| / 127.5."""
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (x / scale).round().clamp(-128, 127) * scale


@quantize_rows_symmetric.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _broadcast_along_axis(scale: Tensor, zero_point: Tensor, rank: int, axis: int) -> tuple[Tensor, Tensor]:
    """Reshape both so that they broadcast along `axis` of a tensor with `rank` axes."""
    shape = [1] * rank
    if scale.ndim:
        shape[axis] = -1
    return scale.to(torch.float32).view(shape), zero_point.to(torch.float32).view(shape)


def _expand_blocks(values: Tensor, shape: torch.Size, axis: int, block: int) -> Tensor:
    """Repeat one value per block for the elements of the block; other axes may have blocks too."""
    values = values.to(torch.float32).repeat_interleave(block, axis)
    for other, size in enumerate(shape):
        if other != axis and values.shape[other] not in (1, size):
            values = values.repeat_interleave(size // values.shape[other], other)
    return values
