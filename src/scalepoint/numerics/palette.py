"""Palettes: a table of values for each group of a tensor, and indices into it.

    index = argmin_k |x - table[k]|,      x' = table[index]
    table = 1-D k-means of the group: Lloyd's algorithm, which finds a local optimum of the sum of squared distances. It
            starts with points as dense as the cube root of the data's density, which is optimal for many entries

Tables are ascending, so the nearest entry is found by bisection between the midpoints.
"""

import torch
from torch import Tensor

MAX_ITERATIONS = 300
MAX_BINS, VALUES_PER_BIN = 512, 16  # of the histogram for the first tables


def make_tables(rows: Tensor, entries: int) -> Tensor:
    """Compute a table (groups, entries) for values (groups, values), in float32."""
    rows = rows.detach().to(torch.float32).sort(-1).values
    count = rows.shape[-1]
    sums = torch.cat([torch.zeros_like(rows[:, :1], dtype=torch.float64), rows.to(torch.float64).cumsum(-1)], -1)
    tables = _first_tables(rows, entries)
    for _ in range(MAX_ITERATIONS):
        ends = torch.searchsorted(rows, _midpoints(tables), right=True)
        edges = torch.cat([torch.zeros_like(ends[:, :1]), ends, torch.full_like(ends[:, :1], count)], -1)
        sizes = edges.diff(dim=-1)
        means = sums.gather(-1, edges).diff(dim=-1) / sizes.clamp(min=1)
        next_tables = torch.where(sizes > 0, means.to(torch.float32), tables).sort(-1).values
        if torch.equal(next_tables, tables):
            break
        tables = next_tables
    return tables


def _first_tables(rows: Tensor, entries: int) -> Tensor:
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
    return ((tables[:, 1:] + tables[:, :-1]) / 2).contiguous()


def nearest_entries(rows: Tensor, tables: Tensor) -> Tensor:
    """Return the index of the nearest entry. A tie goes to the lower entry."""
    return torch.searchsorted(_midpoints(tables), rows.detach().to(torch.float32).contiguous())


def to_groups(tensor: Tensor, axis: int, groups: int) -> Tensor:
    """Arrange a tensor as (groups, values), where neighbouring channels of an axis form a group."""
    return tensor.movedim(axis, 0).reshape(groups, -1)


def from_groups(rows: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Undo `to_groups`."""
    axis_first = [shape[axis], *shape[:axis], *shape[axis + 1 :]]
    return rows.reshape(axis_first).movedim(0, axis)
