"""Compute scale (float32), zero point (int32) and minval (float32) of each block from its range.

symmetric    scale = max_abs / ((high - low) / 2)   zero_point = middle code   minval = -max_abs
asymmetric   scale = (hi - lo) / (high - low)       zero_point = clip(low - round(lo / scale))   minval = lo
float        scale = max_abs / high                 e8m0: a power of two           e4m3: two levels (NVFP4)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.blocks import as_memory_order, block_counts, block_view, is_ragged, split_ragged
from scalepoint.numerics.formats import (
    E4M3,
    E8M0,
    FORMATS,
    Format,
    Grid,
    QuantizationFormulation,
    ScaleRounding,
)
from scalepoint.numerics.rounding import floor_log2, power_of_two, round_to_float

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max
MANTISSA = 0x7FFFFF  # the 23 mantissa bits of float32


class QParams(NamedTuple):
    """Scale, zero point (int32) and minval; the last two are None for float formats."""

    scale: Tensor
    zero_point: Tensor | None = None
    minval: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "QParams":
        """Return parameters with every tensor changed."""
        values: list[Any] = [None if value is None else change(value) for value in self]
        return QParams(*values)


def min_max(tensor: Tensor, block: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of every block as float32. NaN is passed on.

    Args:
        tensor: The tensor.
        block: Size of a block along each axis.
    """
    if is_ragged(tensor.shape, block):
        low = tensor.new_empty(block_counts(tensor.shape, block), dtype=torch.float32)
        high = torch.empty_like(low)
        for region, params, extents in split_ragged(tensor.shape, block):
            low[params], high[params] = min_max(tensor[region], extents)
        return low, high
    view = block_view(tensor.shape, block)
    if len(view.spans) == len(view.tensor):
        extremes = torch.aminmax(tensor if torch.compiler.is_compiling() else as_memory_order(tensor))
        low, high = extremes.min, extremes.max
    elif not view.spans:
        low, high = tensor.clone(), tensor.clone()
    else:
        blocks = tensor.view(view.tensor)
        low, high = blocks.amin(view.spans), blocks.amax(view.spans)
    return low.to(torch.float32).reshape(view.counts), high.to(torch.float32).reshape(view.counts)


def choose_qparams(low: Tensor, high: Tensor, grid: Grid, outer: Tensor | None = None) -> QParams:
    """Compute scale, zero point and minval for a range. The range is widened to contain zero.

    Args:
        low: Lower end, one value per block.
        high: Upper end, one value per block.
        grid: dtype, scheme and formulation.
        outer: Scale of the tensor, for two-level formats.

    Returns:
        The quantization parameters.
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    max_abs = torch.maximum(-low, high)
    if grid.format.is_float:
        return QParams(float_scale(max_abs, grid, outer))
    if grid.is_symmetric:
        scale = (max_abs / (grid.span / 2)).clamp(min=_smallest_scale(grid, grid.span / 2))
        zero_point = torch.full_like(scale, grid.middle, dtype=torch.int32)
        minval = -max_abs
    else:
        width = high - low
        # high - low may overflow float32: divide first, then the scale is finite.
        scale = torch.where(width.isinf(), high / grid.span - low / grid.span, width / grid.span)
        scale = scale.clamp(min=_smallest_scale(grid, grid.span))
        zero_point = (grid.low - (low / scale).round()).clamp(grid.low, grid.high).to(torch.int32)
        minval = low
    # Near the largest float32: no code may dequantize to infinity.
    farthest = torch.maximum(zero_point - grid.low, grid.high - zero_point).to(torch.float32)
    if grid.formulation == QuantizationFormulation.MINVAL:
        farthest = torch.full_like(farthest, grid.span)
    scale = torch.minimum(scale, HUGE / farthest.clamp(min=1))
    if grid.exact_zero and grid.formulation == QuantizationFormulation.MINVAL:
        minval = (minval / scale).round() * scale
    return QParams(scale, zero_point, minval)


def _smallest_scale(grid: Grid, steps: float) -> float:
    return EPS if grid.least_range is None else grid.least_range / steps


def float_scale(max_abs: Tensor, grid: Grid, outer: Tensor | None = None) -> Tensor:
    """Return the scale of a float format, rounded to the dtype of scales."""
    if grid.scale_dtype == E8M0:
        rounded = power_of_two_scale(max_abs, grid.format, grid.scale_rounding)
        return _with_exact_gradient(rounded, max_abs / grid.format.high) if max_abs.requires_grad else rounded
    if grid.scale_dtype == E4M3:
        outer = tensor_scale(max_abs, grid.format) if outer is None else outer
        return block_scale(max_abs, outer, grid.format) * outer
    return (max_abs / grid.format.high).clamp(min=EPS)


def _with_exact_gradient(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return the rounded value with the gradient of the exact one (straight-through)."""
    return rounded.detach() + (exact - exact.detach())


def power_of_two_scale(max_abs: Tensor, fmt: Format, rounding: ScaleRounding) -> Tensor:
    """Compute a power-of-two scale 2^e (OCP MX v1.0, section 6.3).

    With p the largest exponent of the element format and M its largest value:

        floor  e = floor(log2 max_abs) - p                    the rule of the standard; the largest values may saturate
        ceil   e = ceil(log2 max_abs) - p
        even   floor, after max_abs is rounded to the element's mantissa
        rne    2^e nearest to max_abs / M, a tie to the even exponent
        rceil  e = ceil(log2(max_abs / M))                    the smallest scale that never saturates (Blackwell)

    Args:
        max_abs: Largest magnitude of each block.
        fmt: The element format.
        rounding: Which of the rules above.
    """
    # Exponent and mantissa are read from the bits of float32: log2() would round.
    if rounding in (ScaleRounding.RNE, ScaleRounding.RCEIL):
        bits = (max_abs / fmt.high).view(torch.int32)
        power, rest = floor_log2(bits), bits & MANTISSA
        if rounding == ScaleRounding.RCEIL:
            power = power + (rest > 0)
        else:
            half = 1 << 22  # the highest mantissa bit: the value is in the middle between two powers
            power = power + ((rest > half) | ((rest == half) & (power % 2 != 0)))
    else:
        bits = max_abs.view(torch.int32)
        if rounding == ScaleRounding.EVEN:
            bits = bits + (1 << (22 - (fmt.mantissa or 0)))
        power = floor_log2(bits) - fmt.max_exponent
        if rounding == ScaleRounding.CEIL:
            power = power + ((bits & MANTISSA) > 0)
    return power_of_two(power.clamp(-126, 127))


def tensor_scale(max_abs: Tensor, fmt: Format) -> Tensor:
    """Compute the outer scale of a two-level format (NVFP4): largest magnitude of the tensor / (448 * 6).

    Args:
        max_abs: Largest magnitude of the tensor.
        fmt: The element format.
    """
    return (max_abs.amax() / (FORMATS[E4M3].high * fmt.high)).clamp(min=TINY)


def block_scale(max_abs: Tensor, outer: Tensor, fmt: Format) -> Tensor:
    """Compute the inner scale of a two-level format: round(max_abs / 6 / outer) as float8_e4m3fn, at least 2^-9.

    Args:
        max_abs: Largest magnitude of each block.
        outer: Scale of the tensor.
        fmt: The element format.
    """
    inner = FORMATS[E4M3]
    smallest = 2.0 ** (inner.min_exponent - (inner.mantissa or 0))
    exact = (max_abs / fmt.high / outer).clamp(smallest, inner.high)
    rounded = round_to_float(exact, inner)
    return _with_exact_gradient(rounded, exact) if exact.requires_grad else rounded
