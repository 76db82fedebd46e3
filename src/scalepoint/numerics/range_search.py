"""Search for ranges narrower than min and max: clipping a few values makes the others more precise.

Range calculators call them for one tensor, histogram calculators for the histogram of all batches. All functions take
one row per block and return (low, high), one value per row.
"""

import torch
from torch import Tensor

from scalepoint.numerics.fake_quantize import fake_quantize
from scalepoint.numerics.formats import Grid
from scalepoint.numerics.histogram import Histogram, bin_centres, bin_width
from scalepoint.numerics.qparams import choose_qparams

Range = tuple[Tensor, Tensor]
VALUES_PER_STEP = 65536  # quantized at a time by a search: they fit into the L2 cache of a core
SMALLEST_FACTOR = 0.02  # of the observed range, by which `least_squares` shrinks it


def percentile_of_rows(rows: Tensor, percentile: float) -> Range:
    """Return the (100 - p)-th and p-th percentile of each row, interpolated between neighbours like in numpy."""
    return _quantile(rows, 1 - percentile / 100), _quantile(rows, percentile / 100)


def _quantile(rows: Tensor, share: float) -> Tensor:
    position = share * (rows.shape[1] - 1)
    below = min(max(int(position), 0), rows.shape[1] - 1)
    above = min(below + 1, rows.shape[1] - 1)
    low, high = (rows.kthvalue(k + 1, dim=1).values.to(torch.float32) for k in (below, above))
    return torch.lerp(low, high, position - below)


def percentile_of_histogram(histogram: Histogram, percentile: float) -> Range:
    """Return the percentiles of a histogram, interpolated inside the bin."""
    return _histogram_quantile(histogram, 1 - percentile / 100), _histogram_quantile(histogram, percentile / 100)


def _histogram_quantile(histogram: Histogram, share: float) -> Tensor:
    counts = histogram.counts.to(torch.float64)
    total = counts.cumsum(1)
    rank = total[:, -1:] * share
    # Skip empty bins: for a low share take the first bin that is not empty, for a high share the last one.
    index = torch.searchsorted(total, rank, right=share < 0.5).clamp(max=counts.shape[1] - 1)
    inside = counts.gather(1, index)
    before = total.gather(1, index) - inside
    part = torch.where(inside > 0, (rank - before) / inside.clamp(min=1), 0.0).clamp(0, 1)
    edge = (index - counts.shape[1] // 2 + part) * bin_width(histogram)
    return edge.squeeze(1).to(torch.float32)


def least_squares(
    values: Tensor,
    weights: Tensor | None,
    low: Tensor,
    high: Tensor,
    grid: Grid,
    *,
    steps: int = 80,
) -> Range:
    """Return the range inside [low, high] with the smallest quantization error sum(w * (fq(x) - x)^2).

    Tries to shrink both ends by the same factor, with `steps` factors from 1 down to 0.02. An asymmetric grid then
    tries to shrink each end alone.
    """
    powers = torch.linspace(0.0, 1.0, steps, dtype=torch.float32, device=values.device)
    shrink = torch.pow(SMALLEST_FACTOR, powers).unbind()
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    best = _find_best_range(values, weights, [(low * factor, high * factor) for factor in shrink], grid)
    if not grid.is_symmetric:
        other_highs = [(best[0], high * factor) for factor in shrink]
        best = _find_best_range(values, weights, [best, *other_highs], grid)
        other_lows = [(low * factor, best[1]) for factor in shrink]
        best = _find_best_range(values, weights, [best, *other_lows], grid)
    return best


def _find_best_range(values: Tensor, weights: Tensor | None, ranges: list[Range], grid: Grid) -> Range:
    """Return the range with the smallest error, the first one of equals. Tries many ranges at once for few values."""
    lows, highs = (torch.stack(ends, 1) for ends in zip(*ranges, strict=True))  # (rows, ranges)
    values = values.detach()  # no gradient of the error: gradients go through the chosen ends
    ranges_per_step = max(1, VALUES_PER_STEP // max(values.numel(), 1))
    errors = []
    low_steps, high_steps = (torch.split(ends.detach(), ranges_per_step, 1) for ends in (lows, highs))
    for low, high in zip(low_steps, high_steps, strict=True):
        qparams = choose_qparams(low[..., None], high[..., None], grid)
        repeated = values[:, None].expand(-1, low.shape[1], -1).contiguous()
        error = (fake_quantize(repeated, qparams, grid) - repeated).square_()
        if weights is not None:
            error.mul_(weights[:, None])
        errors.append(error.sum(2))
    best = torch.cat(errors, 1).nan_to_num(torch.inf, posinf=torch.inf).argmin(1, keepdim=True)
    return lows.gather(1, best).squeeze(1), highs.gather(1, best).squeeze(1)


def least_squares_of_histogram(
    histogram: Histogram, low: Tensor, high: Tensor, grid: Grid, *, steps: int = 80
) -> Range:
    """Run `least_squares` on the centres of the bins of a histogram, weighted by their counts."""
    centres = torch.maximum(torch.minimum(bin_centres(histogram), high[:, None]), low[:, None])
    return least_squares(centres, histogram.counts.to(torch.float32), low, high, grid, steps=steps)


def least_divergence(histogram: Histogram, low: Tensor, high: Tensor, levels: int, *, steps: int = 80) -> Range:
    """Return the range with the smallest KL divergence KL(P || Q) (Migacz, GTC 2017, as in TensorRT).

    P is the histogram with all counts outside of the range moved into the last bins inside. Q divides the range into
    `levels` equal cells and spreads the counts of each cell evenly over its bins that are not empty.
    """
    bins = histogram.counts.shape[1]
    counts = histogram.counts.to(torch.float32)
    centres = bin_centres(histogram)
    ends = torch.maximum(low.abs(), high.abs())
    smallest = bin_width(histogram).squeeze(1) * (levels // 2)
    smallest = torch.minimum(smallest, ends)
    best, least_divergence_so_far = ends, torch.full_like(ends, torch.inf)
    for fraction in torch.linspace(1.0, 0.0, steps, dtype=torch.float32, device=ends.device).unbind():
        clip = torch.lerp(smallest, ends, fraction)[:, None]
        inside = (centres.abs() <= clip).to(torch.float32)
        divergence = _divergence(counts, inside, _cell_indices(centres, clip.detach(), levels), levels, bins)
        is_better = divergence < least_divergence_so_far
        best = torch.where(is_better, clip.squeeze(1), best)
        least_divergence_so_far = torch.where(is_better, divergence, least_divergence_so_far)
    return torch.maximum(-best, low), torch.minimum(best, high)


def _cell_indices(centres: Tensor, clip: Tensor, levels: int) -> Tensor:
    width = (2 * clip / levels).clamp(min=torch.finfo(torch.float32).tiny)
    return ((centres + clip) / width).floor().nan_to_num(0.0).clamp(0, levels - 1).to(torch.int64)


def _divergence(counts: Tensor, inside: Tensor, cells: Tensor, levels: int, bins: int) -> Tensor:
    """Return KL(P || Q) of each row; `inside` is 1 for the bins in the range, `cells` the cell of each bin."""
    inside_counts = counts * inside
    # Q: the mean count of the bins of a cell that are not empty.
    is_used = (inside_counts > 0).to(torch.float32)
    zeros = counts.new_zeros(counts.shape[0], levels)
    cell_counts, used_bins = zeros.scatter_add(1, cells, inside_counts), zeros.scatter_add(1, cells, is_used)
    q = (cell_counts / used_bins.clamp(min=1)).gather(1, cells) * is_used
    # P: the counts above the range are added to its last bin, those below to its first bin.
    index = torch.arange(bins, device=counts.device)
    is_positive = index >= bins // 2
    outside_counts = counts * (1 - inside)
    last = torch.where(inside > 0, index, -1).amax(1, keepdim=True)
    first = torch.where(inside > 0, index, bins).amin(1, keepdim=True)
    p = inside_counts.scatter_add(1, last.clamp(0, bins - 1), (outside_counts * is_positive).sum(1, keepdim=True))
    p = p.scatter_add(1, first.clamp(0, bins - 1), (outside_counts * ~is_positive).sum(1, keepdim=True))
    p, q = p / p.sum(1, keepdim=True).clamp(min=1e-30), q / q.sum(1, keepdim=True).clamp(min=1e-30)
    terms = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - q.clamp(min=1e-8).log()), 0.0)
    return terms.sum(1)
