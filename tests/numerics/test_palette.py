"""Tables by k-means, and indices into them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalepoint.numerics.palette import from_groups, make_tables, nearest_entries, to_groups


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
