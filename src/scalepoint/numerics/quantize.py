"""Quantize and dequantize a tensor with given parameters.

`block` is the size of a block along each axis (`granularity.get_block_size(shape)`). None means that the parameters
broadcast as they are, which they do per tensor and per channel.
"""

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from scalepoint.numerics.affine import (
    PIECE_ELEMENTS,
    code_offset,
    compute_centred_code,
    make_steps,
    quantize_in_pieces,
    restore,
)
from scalepoint.numerics.blocks import block_view, is_ragged, split_ragged
from scalepoint.numerics.formats import Grid
from scalepoint.numerics.qparams import QParams
from scalepoint.numerics.tracing import is_traced

Block = tuple[int, ...] | None


def quantize(
    x: Tensor, qparams: QParams, grid: Grid, block: Block = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute clamp(round(x / scale) + zero_point, low, high), or the nearest value of a float format.

    NaN becomes the lowest code of an integer format, as in ONNX Runtime.

    Args:
        x: The tensor.
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        block: Size of a block along each axis. None: the parameters broadcast.
        dtype: The dtype of the result.

    Returns:
        The codes.
    """

    def to_codes(part: Tensor, params: QParams) -> Tensor:
        if _can_quantize_in_pieces(part, params, grid):
            return quantize_in_pieces(part, params, grid, dtype)
        c = compute_centred_code(part.to(torch.float32), make_steps(params, grid), grid.format)
        if not grid.format.is_float:
            c = torch.nan_to_num(c + code_offset(params, grid), nan=grid.low)
        return c.to(dtype)

    return apply_by_block(to_codes, x, qparams, block)


def _can_quantize_in_pieces(x: Tensor, qparams: QParams, grid: Grid) -> bool:
    """Whether x is large and plain, the format an integer, and the zero point the same integer for all blocks."""
    if grid.format.is_float or x.numel() < 2 * PIECE_ELEMENTS or x.device.type != "cpu" or not x.is_contiguous():
        return False
    needs_grad = any(tensor.requires_grad for tensor in (x, *qparams) if tensor is not None)
    if is_traced(x) or (torch.is_grad_enabled() and needs_grad):
        return False
    zero_point = qparams.zero_point
    return zero_point is None or bool((zero_point == zero_point.reshape(-1)[0].round()).all())


def dequantize(codes: Tensor, qparams: QParams, grid: Grid, block: Block = None) -> Tensor:
    """Compute (code - zero_point) * scale, or (code - low) * scale + minval, as float32.

    Args:
        codes: The codes.
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        block: Size of a block along each axis. None: the parameters broadcast.
    """

    def to_values(part: Tensor, params: QParams) -> Tensor:
        return restore(part.to(torch.float32) - code_offset(params, grid), make_steps(params, grid))

    return apply_by_block(to_values, codes, qparams, block)


def apply_by_block(run: Callable[[Tensor, QParams], Tensor], x: Tensor, qparams: QParams, block: Block) -> Tensor:
    """Run an elementwise function on the view in which the parameters broadcast; part by part if blocks are ragged."""
    if block is None:
        return run(x, qparams)
    if is_ragged(x.shape, block):
        results = [
            (region, apply_by_block(run, x[region], qparams.map(itemgetter(params)), extents))
            for region, params, extents in split_ragged(x.shape, block)
        ]
        y = torch.empty_like(x, dtype=results[0][1].dtype)
        for region, result in results:
            y[region] = result
        return y
    view = block_view(x.shape, block)
    if len(view.tensor) == x.ndim:
        return run(x, qparams)
    return run(x.view(view.tensor), qparams.map(lambda value: value.view(view.params))).reshape(x.shape)
