"""Tables by k-means, and indices into them."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalepoint.numerics.palette import (
    from_groups,
    from_vectors,
    make_tables,
    make_vector_tables,
    nearest_entries,
    nearest_vectors,
    to_groups,
    to_vectors,
)


def error(rows: torch.Tensor, tables: torch.Tensor) -> float:
    return float((tables.gather(-1, nearest_entries(rows, tables)) - rows).square().sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 200), st.sampled_from([1e-6, 1.0, 1e4]), st.integers(0, 99))
def test_tables_ascend_indices_are_nearest_and_no_mean_is_better(bits, groups, count, size, seed) -> None:
    rows = torch.randn(groups, count, generator=torch.Generator().manual_seed(seed)) * size
    tables = make_tables(rows, 2**bits)
    assert tables.shape == (groups, 2**bits)
    assert bool((tables.diff(dim=-1) >= 0).all())
    indices = nearest_entries(rows, tables)
    apart = (rows[:, :, None] - tables[:, None, :]).abs()
    chosen = apart.gather(-1, indices[..., None])[..., 0]
    torch.testing.assert_close(chosen, apart.amin(-1), rtol=1e-4, atol=1e-6 * size)
    for row, table, index in zip(rows, tables, indices, strict=True):  # each entry is the mean of its values
        for entry in index.unique():
            torch.testing.assert_close(table[entry], row[index == entry].mean(), rtol=1e-3, atol=1e-5 * size)


def test_values_that_fit_into_a_table_are_kept_exactly() -> None:
    rows = torch.tensor([[3.0, -1.0, 3.0, 0.5, -1.0, 7.0]])
    assert error(rows, make_tables(rows, 8)) == 0
    assert error(torch.full((2, 5), 0.3), make_tables(torch.full((2, 5), 0.3), 2)) == 0


def test_a_normal_row_comes_near_the_best_known_quantizer() -> None:
    """16 levels of a normal distribution: 0.009497 (Max 1960); even steps have 0.01154 at best."""
    rows = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    assert error(rows, make_tables(rows, 16)) / rows.numel() == pytest.approx(0.009497, rel=0.03)


def test_groups_are_neighbours_along_the_axis_and_come_back() -> None:
    tensor = torch.arange(24.0).view(4, 2, 3)
    assert to_groups(tensor, 0, 2)[1].tolist() == tensor[2:].reshape(-1).tolist()
    for axis, groups in ((0, 2), (1, 2), (2, 3)):
        assert torch.equal(from_groups(to_groups(tensor, axis, groups), tensor.shape, axis), tensor)


def least_cost(values: list[float], weights: list[float], parts: int) -> float:
    """The least weighted squared distance of sorted values to `parts` means, by trying all ways to divide them."""

    def cost(start: int, end: int) -> float:
        mass = sum(weights[start:end])
        mean = sum(w * x for w, x in zip(weights[start:end], values[start:end], strict=True)) / mass
        return sum(w * (x - mean) ** 2 for w, x in zip(weights[start:end], values[start:end], strict=True))

    count = len(values)
    return min(
        sum(cost(start, end) for start, end in pairwise((0, *cuts, count)))
        for cuts in combinations(range(1, count), min(parts, count) - 1)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=11, unique=True), st.integers(0, 99)
)
def test_few_values_get_the_best_tables(bits, values, seed) -> None:
    rows = torch.tensor([values, values])
    generator = torch.Generator().manual_seed(seed)
    weights = torch.stack([torch.ones(len(values)), 0.1 + torch.rand(len(values), generator=generator)])
    tables = make_tables(rows, 2**bits, weights)
    distances = (tables.gather(-1, nearest_entries(rows, tables)) - rows).square() * weights
    for row in range(2):
        order = rows[row].argsort()
        best = least_cost(rows[row][order].tolist(), weights[row][order].tolist(), 2**bits)
        assert float(distances[row].sum()) <= best * 1.0001 + 1e-6


def test_the_start_of_large_groups_is_at_least_as_good_as_that_of_the_density() -> None:
    """Two far clusters and an outlier, where Lloyd's algorithm alone ends in a worse table."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3000, generator=generator) * size + at for size, at in ((1.0, 0.0), (0.01, 40.0), (0.1, -3.0))]
    rows = torch.cat([*parts, torch.tensor([400.0])])[None]
    tables = make_tables(rows, 8)
    assert float((tables - 400).abs().min()) < 1e-3
    assert error(rows, tables) < 1.02 * error(rows, make_tables(rows, 8, start=tables))


def test_vectors_are_neighbouring_channels_and_come_back() -> None:
    tensor = torch.arange(48.0).view(4, 4, 3)
    assert to_vectors(tensor, 0, 2, 2)[0, 0].tolist() == [tensor[0, 0, 0], tensor[1, 0, 0]]
    for axis, groups, dim in ((0, 2, 2), (1, 1, 4), (0, 4, 1)):
        assert torch.equal(from_vectors(to_vectors(tensor, axis, groups, dim), tensor.shape, axis), tensor)


def test_tables_of_vectors_are_closer_than_even_corners_and_weights_matter() -> None:
    vectors = torch.randn(2, 4000, 2, generator=torch.Generator().manual_seed(0))
    tables = make_vector_tables(vectors, 16)
    index, distance = nearest_vectors(vectors, tables)
    chosen = tables.gather(1, index[..., None].expand(-1, -1, 2))
    torch.testing.assert_close((chosen - vectors).square().sum(-1), distance, atol=1e-4, rtol=1e-3)
    # 4 levels per axis of a normal distribution: 0.1175 each (Max 1960); vectors fill the plane better.
    assert float(distance.mean()) < 2 * 0.1175
    weights = torch.tensor([[1.0, 100.0]]).expand_as(vectors)
    weighted = make_vector_tables(vectors, 16, weights)
    index, _ = nearest_vectors(vectors, weighted, weights)
    errors = (weighted.gather(1, index[..., None].expand(-1, -1, 2)) - vectors).square().mean((0, 1))
    assert errors[1] < errors[0] / 4
