"""Palettes: a table of values for each group of a tensor, and indices into it. `spec/palette.py` calls this.

    index = argmin_k |x - table[k]|^2,      x' = table[index]
    table = k-means of the group: the table with the least sum of  weight * |x - x'|^2

Entries are values, or vectors of `dim` values for neighbouring channels. Tables of values are ascending, so the nearest
entry is found by bisection between the midpoints. Their k-means is exact for groups of at most MIN_POINTS values
(dynamic programming over the sorted values); in larger ones it starts from the best tables of up to MAX_POINTS bins.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.numerics.fake_quantize import fake_quantize
from scalepoint.numerics.formats import CodeType, Grid, QuantizationScheme, get_format
from scalepoint.numerics.qparams import QParams

MAX_ITERATIONS = 300  # of Lloyd's algorithm
MAX_VECTOR_ITERATIONS = 25
# Points where a cluster can end, in the dynamic program: its time grows with their number.
MIN_POINTS = 256  # of a group, however many groups there are
MAX_POINTS = 2048  # of a group
MAX_ALL_POINTS = 2**15  # of all groups together
MAX_DYNAMIC_ENTRIES = 16  # larger tables start from the density of the data, which is nearly optimal for many entries
# The histogram from which tables of many entries start.
MAX_BINS = 512
VALUES_PER_BIN = 16
MAX_DISTANCES = 2**22  # distances of vectors to entries that are computed at once: 16 MB


def make_tables(rows: Tensor, entries: int, weights: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """Compute a table (groups, entries) for values (groups, values), in float32.

    Args:
        rows: The values of each group.
        entries: Entries of a table.
        weights: The importance of each value; None for equal importance.
        start: Tables to improve by one iteration, instead of computing the best ones.
    """
    order = rows.detach().to(torch.float32).sort(-1)
    sorted_weights = None if weights is None else weights.expand_as(rows).gather(-1, order.indices)
    sums = _PrefixSums(order.values, sorted_weights)
    if start is not None:
        return _improve(start, order.values, sums, 1)
    if entries <= MAX_DYNAMIC_ENTRIES:
        tables = _best_tables(order.values, sums, entries)
    else:
        tables = _density_tables(order.values, entries)
    return _improve(tables, order.values, sums, MAX_ITERATIONS)


class _PrefixSums:
    """Sums of weights, of weighted values and of weighted squares up to each sorted value, in float64."""

    def __init__(self, rows: Tensor, weights: Tensor | None) -> None:
        values = rows.to(torch.float64)
        w = torch.ones_like(values) if weights is None else weights.to(torch.float64).clamp(min=0)
        self.weight, self.first, self.second = (
            torch.cat([torch.zeros_like(part[:, :1]), part.cumsum(-1)], -1) for part in (w, w * values, w * values**2)
        )

    def at(self, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight.gather(-1, edges), self.first.gather(-1, edges), self.second.gather(-1, edges)

    def means(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted mean between neighbouring edges, and whether any weight lies between them."""
        weight, first = self.weight.gather(-1, edges).diff(dim=-1), self.first.gather(-1, edges).diff(dim=-1)
        return (first / weight.clamp(min=1e-300)).to(torch.float32), weight > 0


def _improve(tables: Tensor, rows: Tensor, sums: _PrefixSums, iterations: int) -> Tensor:
    """Run Lloyd's algorithm: each entry becomes the weighted mean of its values, until nothing changes."""
    count = rows.shape[-1]
    for _ in range(iterations):
        ends = torch.searchsorted(rows, _midpoints(tables), right=True)
        edges = torch.cat([torch.zeros_like(ends[:, :1]), ends, torch.full_like(ends[:, :1], count)], -1)
        means, is_used = sums.means(edges)
        next_tables = torch.where(is_used, means, tables).sort(-1).values
        if torch.equal(next_tables, tables):
            break
        tables = next_tables
    return tables


def _best_tables(rows: Tensor, sums: _PrefixSums, entries: int) -> Tensor:
    """Return the best tables whose clusters end between bins of neighbouring values.

    With few values a bin is a value. Otherwise half of the bins have equal width, the others equal numbers of values.
    """
    groups, count = rows.shape
    points = max(min(MAX_POINTS, MAX_ALL_POINTS // groups), MIN_POINTS)
    if count <= points:
        edges = torch.arange(count + 1).expand(groups, -1)
    else:
        half = points // 2
        shares = torch.linspace(0, 1, half + 1, dtype=torch.float32)
        levels = rows[:, :1] + (rows[:, -1:] - rows[:, :1]) * shares
        by_width = torch.searchsorted(rows, levels.contiguous())
        by_number = (shares.to(torch.float64) * count).round().long().expand(groups, -1)
        edges = torch.cat([by_width, by_number], -1).sort(-1).values
    ends = edges.gather(-1, _best_partition(*sums.at(edges), entries))
    means, is_used = sums.means(ends)
    first_used = means.gather(-1, is_used.to(torch.int8).argmax(-1, keepdim=True))
    return torch.where(is_used, means, first_used).sort(-1).values


def _best_partition(weight: Tensor, first: Tensor, second: Tensor, parts: int) -> Tensor:
    """Divide the points into consecutive parts with the least sum of squared distances to the mean of their part.

    best[k][i] = min over j <= i of  best[k - 1][j] + cost(j, i) is the least sum of the points before i in k parts.

    Args:
        weight: Prefix sums of the weights, (groups, points), as in `_PrefixSums`.
        first: Prefix sums of the weighted values.
        second: Prefix sums of the weighted squares.
        parts: The number of parts.

    Returns:
        The ends of the parts, (groups, parts + 1).
    """
    groups, size = weight.shape
    # In numpy, whose small operations start faster. All groups are in one flat array; `offset` is where each begins.
    sums = [part.numpy().reshape(-1) for part in (weight.contiguous(), first.contiguous(), second.contiguous())]
    offset = np.arange(groups)[:, None] * size

    def cost(start: Any, end: Any) -> Any:  # sum of w (x - mean)^2 = sum of w x^2 - (sum of w x)^2 / sum of w
        w, s, q = (part[end] - part[start] for part in sums)
        return np.maximum(q - s * s / np.maximum(w, 1e-300), 0.0)

    best = cost(np.broadcast_to(offset, (groups, size)), np.arange(size) + offset)
    choices = [np.zeros((groups, size), dtype=np.int64)]
    for _ in range(parts - 1):
        best, choice = _add_part(best, offset, cost)
        choices.append(choice)
    ends = [np.full((groups, 1), size - 1)]
    for choice in reversed(choices):
        ends.append(np.take_along_axis(choice, ends[-1], 1))
    return torch.from_numpy(np.concatenate(ends[::-1], 1))


def _add_part(best: Any, offset: Any, cost: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return best[k] and the best j of every i, given best[k - 1].

    The best j never falls when i grows. So every second i is solved first, and bounds the j of those between: each
    level looks at every candidate j about once.
    """
    groups, size = best.shape
    values, choice = best.copy(), np.zeros((groups, size), dtype=np.int64)
    is_done = np.zeros(size, dtype=bool)
    stride = 1 << size.bit_length()
    while stride:
        ends = np.arange(0, size, stride)
        ends = ends[~is_done[ends]]
        if len(ends):  # the neighbours at this distance are solved, except beyond the last one
            low = choice[:, np.maximum(ends - stride, 0)]
            after = ends + stride
            high = np.where(after < size, choice[:, np.minimum(after, size - 1)], ends)
            high = np.maximum(np.minimum(high, ends), low)
            lengths = (high - low + 1).reshape(-1)
            begin = lengths.cumsum() - lengths
            candidate = np.arange(lengths.sum()) + np.repeat((low + offset).reshape(-1) - begin, lengths)
            totals = best.reshape(-1)[candidate] + cost(candidate, np.repeat((ends + offset).reshape(-1), lengths))
            least = np.minimum.reduceat(totals, begin)
            is_least = np.flatnonzero(totals == np.repeat(least, lengths))
            chosen = candidate[is_least[np.searchsorted(is_least, begin)]]  # the first of equal ones
            values[:, ends] = least.reshape(groups, -1)
            choice[:, ends] = chosen.reshape(groups, -1) - offset
            is_done[ends] = True
        stride //= 2
    return values, choice


def _density_tables(rows: Tensor, entries: int) -> Tensor:
    """Return the quantiles of the cube root of a histogram, at equal distances."""
    low, high = rows[:, :1], rows[:, -1:]
    width = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    bins = min(max(rows.shape[-1] // VALUES_PER_BIN, 4), MAX_BINS)
    value_bins = ((rows - low) / width * bins).long().clamp(0, bins - 1)
    density = torch.zeros(len(rows), bins, dtype=torch.float32).scatter_add_(-1, value_bins, torch.ones_like(rows))
    mass = (density / rows.shape[-1] + 1e-9).pow(1 / 3).cumsum(-1)
    quantiles = (torch.arange(entries, dtype=torch.float32) + 0.5) / entries * mass[:, -1:]
    bin_indices = torch.searchsorted(mass, quantiles.contiguous()).clamp(max=bins - 1)
    before = torch.where(bin_indices > 0, mass.gather(-1, (bin_indices - 1).clamp(min=0)), 0.0)
    inside = (quantiles - before) / (mass.gather(-1, bin_indices) - before)
    return low + (bin_indices + inside) / bins * width


def _midpoints(tables: Tensor) -> Tensor:
    return ((tables[..., 1:] + tables[..., :-1]) / 2).contiguous()


def nearest_entries(rows: Tensor, tables: Tensor) -> Tensor:
    """Return the index (.., values) of the nearest entry (.., entries). A tie goes to the lower entry."""
    return torch.searchsorted(_midpoints(tables), rows.detach().to(tables.dtype).contiguous())


def make_vector_tables(
    vectors: Tensor, entries: int, weights: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """Compute a table (groups, entries, dim) for vectors (groups, count, dim), in float32.

    Lloyd's algorithm from evenly spaced vectors, sorted by their sum. An entry without vectors moves to the vector that
    is farthest from its own entry.

    Args:
        vectors: The vectors of each group.
        entries: Entries of a table.
        weights: The importance of each value, in the shape of the vectors; None for equal importance.
        start: Tables to improve by one iteration, instead of computing good ones.
    """
    vectors = vectors.detach().to(torch.float32)
    weights = torch.ones_like(vectors) if weights is None else weights.expand_as(vectors).to(torch.float32)
    if start is None:
        order = vectors.sum(-1).argsort(-1)
        picks = ((torch.arange(entries) + 0.5) / entries * vectors.shape[1]).long()
        tables = vectors.gather(1, order[:, picks, None].expand(-1, -1, vectors.shape[-1]))
    else:
        tables = start
    best, best_cost = tables, torch.full((len(vectors), 1, 1), torch.inf)
    for _ in range(MAX_VECTOR_ITERATIONS if start is None else 1):
        index, distance = nearest_vectors(vectors, tables, weights)
        index = index[..., None].expand_as(vectors)
        mass = torch.zeros_like(tables).scatter_add_(1, index, weights)
        sums = torch.zeros_like(tables).scatter_add_(1, index, weights * vectors)
        cost = distance.sum(-1)[:, None, None]
        is_better = cost < best_cost
        best, best_cost = torch.where(is_better, tables, best), torch.minimum(cost, best_cost)
        if not bool(is_better.any()):
            break
        farthest = (
            distance.topk(min(entries, vectors.shape[1]), -1).indices[..., None].expand(-1, -1, vectors.shape[-1])
        )
        spare = vectors.gather(1, farthest)
        spare = torch.cat([spare, tables[:, spare.shape[1] :]], 1)
        tables = torch.where(mass > 0, sums / mass.clamp(min=1e-30), spare)
    if start is not None:
        return tables
    _, distance = nearest_vectors(vectors, tables, weights)
    return torch.where(distance.sum(-1)[:, None, None] < best_cost, tables, best)


def nearest_vectors(vectors: Tensor, tables: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the index (groups, count) of the nearest entry (groups, entries, dim), and the squared distance."""
    indices, distances = [], []
    size = max(MAX_DISTANCES // max(tables.shape[0] * tables.shape[1], 1), 1)
    for start in range(0, vectors.shape[1], size):
        part = vectors[:, start : start + size].to(tables.dtype)
        if weights is None:
            products, squares = part @ tables.mT, tables.square().sum(-1)[:, None]
            vector_squares = part.square().sum(-1)
        else:
            weight = weights[:, start : start + size].to(tables.dtype)
            products, squares = (weight * part) @ tables.mT, weight @ tables.square().mT
            vector_squares = (weight * part.square()).sum(-1)
        least = (squares - 2 * products).min(-1)
        indices.append(least.indices)
        distances.append((least.values + vector_squares).clamp(min=0))
    return torch.cat(indices, -1), torch.cat(distances, -1)


def round_tables(tables: Tensor, dtype: CodeType) -> Tensor:
    """Round the entries of tables to the values of an 8-bit dtype, with one scale per table.

    The scale is rounded to float16 values, so products of codes and scale are exact in float32. A file can compute it
    from the largest entry: scale = max|entry| / largest code.
    """
    fmt = get_format(dtype)
    low, high = fmt.limits(QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
    axes = tuple(range(1, tables.ndim))
    largest = tables.abs().amax(axes, keepdim=True)
    scale = (largest / high).clamp(min=2.0**-14, max=65504.0).half().to(torch.float32)
    grid = Grid(fmt, low, high, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
    return fake_quantize(tables, QParams(scale, torch.zeros_like(scale, dtype=torch.int32)), grid)


def to_groups(tensor: Tensor, axis: int, groups: int) -> Tensor:
    """Arrange a tensor as (groups, values), where neighbouring channels of an axis form a group."""
    return tensor.movedim(axis, 0).reshape(groups, -1)


def from_groups(rows: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Undo `to_groups`."""
    axis_first = [shape[axis], *shape[:axis], *shape[axis + 1 :]]
    return rows.reshape(axis_first).movedim(0, axis)


def to_vectors(tensor: Tensor, axis: int, groups: int, dim: int) -> Tensor:
    """Arrange a tensor as (groups, vectors, dim): the vectors of a group are `dim` neighbouring channels of an axis."""
    channels = tensor.movedim(axis, 0).reshape(groups, tensor.shape[axis] // (groups * dim), dim, -1)
    return channels.mT.reshape(groups, -1, dim)


def from_vectors(vectors: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Undo `to_vectors`."""
    groups, _, dim = vectors.shape
    channels = vectors.reshape(groups, shape[axis] // (groups * dim), -1, dim).mT
    return from_groups(channels.reshape(groups, -1), shape, axis)
