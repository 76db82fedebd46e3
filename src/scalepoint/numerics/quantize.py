"""Quantize and dequantize a tensor whose parameters are known.

`block` is the extent of a block on every axis (`granularity.get_block_size(shape)`); None says that the
parameters broadcast as they are, which is so per tensor and per channel.
"""

from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE, code_offset, compute_centred_code, make_steps, quantize_in_pieces, restore
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

    def codes(part: Tensor, params: QParams) -> Tensor:
        if _can_quantize_in_pieces(part, params, grid):
            return quantize_in_pieces(part, params, grid, dtype)
        c = compute_centred_code(part.to(torch.float32), make_steps(params, grid), grid.format)
        whole = c if grid.format.is_float else torch.nan_to_num(c + code_offset(params, grid), nan=grid.low)
        return whole.to(dtype)

    return apply_by_block(codes, x, qparams, block)


def _can_quantize_in_pieces(x: Tensor, qparams: QParams, grid: Grid) -> bool:
    """Large and plain, integers, and one whole zero point for all: then the limits are two numbers."""
    if grid.format.is_float or x.numel() < 2 * PIECE or x.device.type != "cpu" or not x.is_contiguous():
        return False
    if is_traced(x) or (
        torch.is_grad_enabled() and any(each.requires_grad for each in (x, *qparams) if each is not None)
    ):
        return False
    zero = qparams.zero_point
    return zero is None or bool((zero == zero.reshape(-1)[0].round()).all())


def dequantize(codes: Tensor, qparams: QParams, grid: Grid, block: Block = None) -> Tensor:
    """Compute (code - zero_point) * scale, or (code - low) * scale + minval, as float32.

    Args:
        codes: The codes.
        qparams: Scale, zero point and minval.
        grid: dtype, scheme and formulation.
        block: Size of a block along each axis. None: the parameters broadcast.
    """

    def values(part: Tensor, params: QParams) -> Tensor:
        return restore(part.to(torch.float32) - code_offset(params, grid), make_steps(params, grid))

    return apply_by_block(values, codes, qparams, block)


def apply_by_block(run: Callable[[Tensor, QParams], Tensor], x: Tensor, qparams: QParams, block: Block) -> Tensor:
    """Run an elementwise function on the view in which the parameters broadcast; segment by segment if ragged."""
    if block is None:
        return run(x, qparams)
    if is_ragged(x.shape, block):
        results = [
            (at, apply_by_block(run, x[at], qparams.map(itemgetter(cut)), extents))
            for at, cut, extents in split_ragged(x.shape, block)
        ]
        y = torch.empty_like(x, dtype=results[0][1].dtype)
        for at, result in results:
            y[at] = result
        return y
    view = block_view(x.shape, block)
    if len(view.tensor) == x.ndim:
        return run(x, qparams)
    return run(x.view(view.tensor), qparams.map(lambda value: value.view(view.params))).reshape(x.shape)
