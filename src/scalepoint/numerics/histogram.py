"""A streaming histogram with fixed memory that can be merged exactly.

Bins of equal width cover [-2^e, 2^e) with an integer e. When a larger value arrives, e grows and neighbouring bins are
added in pairs. So the same data gives the same counts in any order and in any number of parts. The resolution is at
most one bit lower than that of bins fitted to the data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE_ELEMENTS
from scalepoint.numerics.blocks import as_blocks, as_memory_order, block_counts, is_ragged, split_ragged
from scalepoint.numerics.rounding import floor_log2, power_of_two
from scalepoint.numerics.tracing import is_traced

MAX_INT32_INDEX = 2**31
MIN_POWER = -126  # the exponent of a histogram of zeros only


class Histogram(NamedTuple):
    """counts: (blocks, bins) int64; power: (blocks,) int32, the e of each block's range."""

    counts: Tensor
    power: Tensor


def compute_histogram(rows: Tensor, bins: int) -> Histogram:
    """Compute the histogram of each row of finite values. `bins` must be even."""
    rows = rows.to(torch.float32)
    largest = _largest_magnitude(rows) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    power = (floor_log2(largest.view(torch.int32)) + 1).clamp(MIN_POWER, 127).to(torch.int32)
    if rows.device.type == "cpu" and not is_traced(rows) and rows.shape[0] * bins < MAX_INT32_INDEX:
        return Histogram(_count_in_pieces(rows, power, bins), power)
    counts = torch.zeros(rows.shape[0], bins, dtype=torch.int64, device=rows.device)
    index = _bin_index(rows, power, bins, is_exact=False).to(torch.int64) + bins // 2
    counts.scatter_add_(1, index, torch.ones((), dtype=torch.int64, device=rows.device).expand_as(index))
    return Histogram(counts, power)


def _largest_magnitude(rows: Tensor) -> Tensor:
    """Compute max |x| of each row, without a temporary tensor as large as `rows`."""
    if rows.shape[0] > 1:
        low, high = torch.aminmax(rows, dim=1)
    else:
        low, high = (extreme[None] for extreme in torch.aminmax(rows))  # faster than with dim=1
    return torch.maximum(-low, high).abs()  # abs() turns -0 into 0


def _bin_index(rows: Tensor, power: Tensor, bins: int, *, is_exact: bool) -> Tensor:
    """Compute floor(x * half / 2^power), in [-half, half).

    `is_exact`: no product underflows, and no value lies outside of the bins.
    """
    half = bins // 2
    if is_exact:
        return (rows * (power_of_two(-power)[:, None] * half)).floor_()
    # Two exact multiplications: 2^-e alone would be subnormal for the largest ranges.
    half_power = -power // 2
    unit = rows * power_of_two(half_power)[:, None] * power_of_two(-power - half_power)[:, None]
    index = (unit * half).floor().clamp(-half, half - 1)
    # A negative value whose product underflowed to 0 belongs into bin -1.
    return torch.where(rows < 0, index.clamp(max=-1), index)


def _count_in_pieces(rows: Tensor, power: Tensor, bins: int) -> Tensor:
    """Count in one pass over pieces that fit into the cache."""
    counts = torch.zeros(rows.shape[0], bins, dtype=torch.int64)
    width = rows.shape[1]
    if not rows.numel():
        return counts
    rows_per_piece = max(1, PIECE_ELEMENTS // width)
    # If half / 2^power is a power of two, at least 1 and finite, every product is exact.
    half_exponent = bins.bit_length() - 2
    is_power_of_two = bins == 2 ** (half_exponent + 1)
    is_in_range = (power <= half_exponent) & (power > half_exponent - 127)
    is_exact = is_power_of_two and bool(is_in_range.all())
    for start in range(0, len(rows), rows_per_piece):
        stop = start + rows_per_piece
        part, part_power = rows[start:stop], power[start:stop]
        row_offsets = (torch.arange(len(part), dtype=torch.int32) * bins + bins // 2)[:, None]
        total = counts[start:stop].view(-1)
        for piece in torch.split(part, PIECE_ELEMENTS, dim=1):
            index = _bin_index(piece, part_power, bins, is_exact=is_exact).to(torch.int32).add_(row_offsets)
            total += torch.bincount(index.reshape(-1), minlength=total.numel())
    return counts


def compute_block_histograms(tensor: Tensor, block: tuple[int, ...], bins: int) -> Histogram:
    """Compute the histogram of each block, in the order of the parameters. The last block of an axis may be shorter."""
    if tuple(tensor.shape) == tuple(block) and not torch.compiler.is_compiling():
        return compute_histogram(as_memory_order(tensor)[None], bins)
    if not is_ragged(tensor.shape, block):
        return compute_histogram(as_blocks(tensor, block), bins)
    grid = block_counts(tensor.shape, block)
    counts = torch.empty(*grid, bins, dtype=torch.int64, device=tensor.device)
    power = torch.empty(grid, dtype=torch.int32, device=tensor.device)
    for region, params, extents in split_ragged(tensor.shape, block):
        part = compute_histogram(as_blocks(tensor[region], extents), bins)
        counts[params] = part.counts.view(*counts[params].shape)
        power[params] = part.power.view(power[params].shape)
    return Histogram(counts.view(-1, bins), power.view(-1))


def merge_histograms(first: Histogram, second: Histogram) -> Histogram:
    """Return the histogram of both data sets together."""
    power = torch.maximum(first.power, second.power)
    return Histogram(_coarsen(first, power) + _coarsen(second, power), power)


def _coarsen(histogram: Histogram, power: Tensor) -> Tensor:
    """Return the counts over a wider range 2^power: bin i becomes bin floor((i - half) / 2^steps) + half."""
    bins = histogram.counts.shape[1]
    steps = (power - histogram.power).clamp(0, 31)
    index = torch.arange(-(bins // 2), bins // 2, device=power.device)
    index = (index >> steps[:, None].to(torch.int64)) + bins // 2
    return torch.zeros_like(histogram.counts).scatter_add_(1, index, histogram.counts)


def bin_width(histogram: Histogram) -> Tensor:
    """Return the width of the bins of each block, shape (blocks, 1), as float32."""
    return power_of_two(histogram.power)[:, None] / (histogram.counts.shape[1] // 2)


def bin_centres(histogram: Histogram) -> Tensor:
    """Return the value in the middle of each bin, shape (blocks, bins), as float32."""
    bins = histogram.counts.shape[1]
    index = torch.arange(-(bins // 2), bins // 2, device=histogram.power.device, dtype=torch.float32)
    return (index + 0.5) * bin_width(histogram)
