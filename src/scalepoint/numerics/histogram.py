"""A streaming histogram whose memory is fixed, and which is exact to merge.

Bins of equal width cover [-2^e, 2^e), e a whole number. When a larger value comes, e grows and neighbouring
bins are added in pairs, so bins are nested: the same data in any order, in any number of parts, gives the same
counts. The price is at most one bit of resolution against bins fitted to the data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.affine import PIECE
from scalepoint.numerics.blocks import as_blocks, as_memory_order, block_counts, is_ragged, split_ragged
from scalepoint.numerics.rounding import floor_log2, power_of_two
from scalepoint.numerics.tracing import is_traced

LARGEST_INDEX = 2**31
LOWEST = -126  # the exponent of a histogram that has seen nothing but zeros


class Histogram(NamedTuple):
    """counts: (blocks, bins) int64; power: (blocks,) int32, the e of each block's range."""

    counts: Tensor
    power: Tensor


def compute_histogram(rows: Tensor, bins: int) -> Histogram:
    """The histogram of each row of finite values; `bins` is even."""
    rows = rows.to(torch.float32)
    largest = _largest_magnitude(rows) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    power = (floor_log2(largest.view(torch.int32)) + 1).clamp(LOWEST, 127).to(torch.int32)
    if rows.device.type == "cpu" and not is_traced(rows) and rows.shape[0] * bins < LARGEST_INDEX:
        return Histogram(_count_in_pieces(rows, power, bins), power)
    counts = torch.zeros(rows.shape[0], bins, dtype=torch.int64, device=rows.device)
    index = _bin_index(rows, power, bins, is_tame=False).to(torch.int64) + bins // 2
    counts.scatter_add_(1, index, torch.ones((), dtype=torch.int64, device=rows.device).expand_as(index))
    return Histogram(counts, power)


def _largest_magnitude(rows: Tensor) -> Tensor:
    """max |x| of each row, without a second tensor of their size."""
    low, high = torch.aminmax(rows, dim=1) if rows.shape[0] > 1 else (each[None] for each in torch.aminmax(rows))
    return torch.maximum(-low, high).abs()  # of zeros, never -0


def _bin_index(rows: Tensor, power: Tensor, bins: int, *, is_tame: bool) -> Tensor:
    """floor(x * half / 2^power), in [-half, half). Tame: no product underflows and no value lies beyond the bins."""
    half = bins // 2
    if is_tame:
        return (rows * (power_of_two(-power)[:, None] * half)).floor_()
    # Two exact multiplications: 2^-e alone would be subnormal for the largest ranges.
    unit = rows * power_of_two(-power // 2)[:, None] * power_of_two(-power - (-power // 2))[:, None]
    index = (unit * half).floor().clamp(-half, half - 1)
    return torch.where(rows < 0, index.clamp(max=-1), index)  # also what underflowed to zero above


def _count_in_pieces(rows: Tensor, power: Tensor, bins: int) -> Tensor:
    """The counts in one pass over pieces that stay in cache: bin and count each before the next is read."""
    counts = torch.zeros(rows.shape[0], bins, dtype=torch.int64)
    width = rows.shape[1]
    if not rows.numel():
        return counts
    together = max(1, PIECE // width)
    # half / 2^power is a power of two, at least 1 and finite: then every product is exact.
    most = bins.bit_length() - 2
    is_tame = bins == 2 ** (most + 1) and bool(((power <= most) & (power > most - 127)).all())
    for start in range(0, len(rows), together):
        part, of = rows[start : start + together], power[start : start + together]
        base = (torch.arange(len(part), dtype=torch.int32) * bins + bins // 2)[:, None]
        total = counts[start : start + together].view(-1)
        for piece in torch.split(part, PIECE, dim=1):
            index = _bin_index(piece, of, bins, is_tame=is_tame).to(torch.int32).add_(base)
            total += torch.bincount(index.reshape(-1), minlength=total.numel())
    return counts


def compute_block_histograms(tensor: Tensor, block: tuple[int, ...], bins: int) -> Histogram:
    """The histogram of every block, in the order of the parameters; the last block of an axis may be shorter."""
    if tuple(tensor.shape) == tuple(block) and not torch.compiler.is_compiling():
        return compute_histogram(as_memory_order(tensor)[None], bins)
    if not is_ragged(tensor.shape, block):
        return compute_histogram(as_blocks(tensor, block), bins)
    grid = block_counts(tensor.shape, block)
    counts = torch.empty(*grid, bins, dtype=torch.int64, device=tensor.device)
    power = torch.empty(grid, dtype=torch.int32, device=tensor.device)
    for at, params, extents in split_ragged(tensor.shape, block):
        part = compute_histogram(as_blocks(tensor[at], extents), bins)
        counts[params] = part.counts.view(*counts[params].shape)
        power[params] = part.power.view(power[params].shape)
    return Histogram(counts.view(-1, bins), power.view(-1))


def merge_histograms(first: Histogram, second: Histogram) -> Histogram:
    """The histogram of both data sets together."""
    power = torch.maximum(first.power, second.power)
    return Histogram(_coarsen(first, power) + _coarsen(second, power), power)


def _coarsen(histogram: Histogram, power: Tensor) -> Tensor:
    """Counts over the wider range 2^power: bin i becomes bin floor((i - half) / 2^steps) + half."""
    bins = histogram.counts.shape[1]
    steps = (power - histogram.power).clamp(0, 31)
    index = torch.arange(-(bins // 2), bins // 2, device=power.device)
    index = (index >> steps[:, None].to(torch.int64)) + bins // 2
    return torch.zeros_like(histogram.counts).scatter_add_(1, index, histogram.counts)


def bin_width(histogram: Histogram) -> Tensor:
    """(blocks, 1) float32."""
    return power_of_two(histogram.power)[:, None] / (histogram.counts.shape[1] // 2)


def bin_centres(histogram: Histogram) -> Tensor:
    """(blocks, bins) float32: the value in the middle of each bin."""
    bins = histogram.counts.shape[1]
    index = torch.arange(-(bins // 2), bins // 2, device=histogram.power.device, dtype=torch.float32)
    return (index + 0.5) * bin_width(histogram)
