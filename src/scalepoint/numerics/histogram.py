"""A streaming histogram whose memory is fixed, and which is exact to merge.

Bins of equal width cover [-2^e, 2^e), e a whole number. When a larger value comes, e grows and neighbouring
bins are added in pairs, so bins are nested: the same data in any order, in any number of parts, gives the same
counts. The price is at most one bit of resolution against bins fitted to the data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.blocks import as_blocks, block_counts, is_ragged, segments
from scalepoint.numerics.rounding import exponent, power_of_two

LOWEST = -126  # the exponent of a histogram that has seen nothing but zeros


class Histogram(NamedTuple):
    """counts: (blocks, bins) int64; power: (blocks,) int32, the e of each block's range."""

    counts: Tensor
    power: Tensor


def histogram_of(rows: Tensor, bins: int) -> Histogram:
    """The histogram of each row of finite values; `bins` is even."""
    rows = rows.to(torch.float32)
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    power = (exponent(largest.view(torch.int32)) + 1).clamp(LOWEST, 127).to(torch.int32)
    # Two exact multiplications: 2^-e alone would be subnormal for the largest ranges.
    unit = rows * power_of_two(-power // 2)[:, None] * power_of_two(-power - (-power // 2))[:, None]
    index = (unit * (bins // 2)).floor().clamp(-(bins // 2), bins // 2 - 1).to(torch.int64) + bins // 2
    index = torch.where(rows < 0, index.clamp(max=bins // 2 - 1), index)  # also what underflowed to zero above
    counts = torch.zeros(rows.shape[0], bins, dtype=torch.int64, device=rows.device)
    counts.scatter_add_(1, index, torch.ones((), dtype=torch.int64, device=rows.device).expand_as(index))
    return Histogram(counts, power)


def histogram_of_blocks(tensor: Tensor, block: tuple[int, ...], bins: int) -> Histogram:
    """The histogram of every block, in the order of the parameters; the last block of an axis may be shorter."""
    if not is_ragged(tensor.shape, block):
        return histogram_of(as_blocks(tensor, block), bins)
    grid = block_counts(tensor.shape, block)
    counts = torch.empty(*grid, bins, dtype=torch.int64, device=tensor.device)
    power = torch.empty(grid, dtype=torch.int32, device=tensor.device)
    for at, params, extents in segments(tensor.shape, block):
        part = histogram_of(as_blocks(tensor[at], extents), bins)
        counts[params] = part.counts.view(*counts[params].shape)
        power[params] = part.power.view(power[params].shape)
    return Histogram(counts.view(-1, bins), power.view(-1))


def merge(first: Histogram, second: Histogram) -> Histogram:
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
