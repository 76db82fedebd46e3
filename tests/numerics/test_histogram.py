"""The streaming histogram, and the ranges that are searched with it."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalepoint.numerics import choose_qparams, fake_quantize
from scalepoint.numerics.histogram import bin_centres, bin_width, compute_histogram, merge_histograms
from scalepoint.numerics.range_search import (
    least_divergence,
    least_squares,
    least_squares_of_histogram,
    percentile_of_histogram,
    percentile_of_rows,
)
from tests.reference import grid_of

BINS = 256


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(first, second):
    return torch.equal(first.counts, second.counts) and torch.equal(first.power, second.power)


def merged(parts, bins=BINS):
    total = compute_histogram(parts[0], bins)
    for part in parts[1:]:
        total = merge_histograms(total, compute_histogram(part, bins))
    return total


def spread_rows(seed=0):
    """Three rows whose magnitudes grow a thousandfold along the row."""
    return randn(3, 4000, seed=seed) * torch.logspace(-2, 1, 4000) * torch.tensor([[1e-5], [1.0], [1e6]])


@pytest.mark.parametrize("parts", [2, 7, 400])
def test_merged_parts_equal_the_histogram_of_all_data(parts):
    rows = spread_rows()
    assert same(merged(rows.chunk(parts, dim=1)), compute_histogram(rows, BINS))


@pytest.mark.parametrize("order", ["reversed", "shuffled", "pairwise"])
def test_the_order_of_the_parts_does_not_matter(order):
    parts = list(spread_rows().chunk(8, dim=1))
    forward = merged(parts)
    if order == "pairwise":
        pairs = [
            merge_histograms(compute_histogram(a, BINS), compute_histogram(b, BINS))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        other = merge_histograms(merge_histograms(pairs[3], pairs[1]), merge_histograms(pairs[0], pairs[2]))
    else:
        other = merged(parts[::-1] if order == "reversed" else [parts[i] for i in (3, 7, 0, 5, 1, 6, 2, 4)])
    assert same(other, forward)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(st.lists(finite, min_size=1, max_size=12), st.lists(finite, min_size=1, max_size=12))
@example([-1e-38], [1e8])
@example([-1e-45], [1.0])
@example([0.0, -0.0], [3.4e38])
def test_merging_equals_the_histogram_of_both_data_sets(first, second):
    first, second = torch.tensor([first]), torch.tensor([second])
    assert same(merged([first, second], 64), compute_histogram(torch.cat([first, second], 1), 64))


def test_every_value_is_counted_in_its_bin():
    rows = spread_rows()
    histogram = compute_histogram(rows, BINS)
    for row, counts, width in zip(rows, histogram.counts, bin_width(histogram), strict=True):
        edges = (np.arange(BINS + 1) - BINS // 2) * width.double().item()
        np.testing.assert_array_equal(counts.numpy(), np.histogram(row.double().numpy(), edges)[0])


@pytest.mark.parametrize("shape", [(1, 200_000), (3, 70_000), (40_000, 9), (2, 65_536)], ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e-3, 1.0, 1e5, 1e38], ids=str)
@pytest.mark.parametrize("bins", [16, 100, 256])
def test_counting_in_pieces_gives_the_same_counts(shape, size, bins):
    rows = randn(*shape).clamp(-3, 3) * size
    with torch.autograd.forward_ad.dual_level():  # traced: the operations run on the whole tensor
        traced = compute_histogram(rows, bins)
    assert same(compute_histogram(rows, bins), traced)


def test_centres_lie_in_the_middle_of_equal_bins_around_zero():
    histogram = compute_histogram(torch.tensor([[3.0, -1.0]]), 8)
    assert histogram.power.tolist() == [2]
    assert bin_width(histogram).tolist() == [[1.0]]
    assert bin_centres(histogram).tolist() == [[-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]]
    assert histogram.counts.tolist() == [[0, 0, 0, 1, 0, 0, 0, 1]]


def test_memory_is_fixed_and_no_count_is_lost():
    total = compute_histogram(randn(2, 100), BINS)
    for seed in range(20):
        total = merge_histograms(total, compute_histogram(randn(2, 100, seed=seed) * 10.0**seed, BINS))
    assert total.counts.shape == (2, BINS)
    assert total.counts.dtype == torch.int64
    assert total.counts.sum(1).tolist() == [2100, 2100]


def test_a_larger_value_doubles_the_range_until_it_fits():
    histogram = merged([torch.tensor([[0.9, -0.9]]), torch.tensor([[1000.0]])])
    assert histogram.power.tolist() == [10]
    width = bin_width(histogram).item()
    assert width == 2 * 1024 / BINS
    at = histogram.counts[0].nonzero().flatten().tolist()
    assert at == [BINS // 2 - 1, BINS // 2, BINS // 2 + int(1000 // width)]


def test_each_row_has_its_own_range():
    assert compute_histogram(torch.tensor([[0.9], [100.0], [1e-3]]), BINS).power.tolist() == [0, 7, -9]


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3.4e38, -3.4e38, -(2.0**127)], ids=str)
def test_the_ends_of_float32_are_counted(value):
    histogram = compute_histogram(torch.tensor([[value]]), BINS)
    assert histogram.counts.sum() == 1
    assert (histogram.counts[0].nonzero() >= BINS // 2).item() is (value >= 0)


def test_rows_without_values_count_nothing():
    histogram = compute_histogram(torch.empty(2, 0), BINS)
    assert histogram.counts.sum() == 0
    assert same(
        merge_histograms(histogram, compute_histogram(spread_rows()[:2], BINS)),
        compute_histogram(spread_rows()[:2], BINS),
    )


PERCENTILES = pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 100.0], ids=str)


@PERCENTILES
def test_the_percentile_of_rows_equals_numpy(percentile):
    rows = randn(4, 3001)
    low, high = percentile_of_rows(rows, percentile)
    np.testing.assert_allclose(low.numpy(), np.percentile(rows.numpy(), 100 - percentile, axis=1), rtol=1e-5)
    np.testing.assert_allclose(high.numpy(), np.percentile(rows.numpy(), percentile, axis=1), rtol=1e-5)


@PERCENTILES
def test_the_percentile_of_a_histogram_equals_numpy_within_a_bin(percentile):
    rows = randn(4, 30_000) * torch.tensor([[1.0], [0.1], [50.0], [1e-6]])
    histogram = compute_histogram(rows, 2048)
    width = bin_width(histogram).squeeze(1).numpy()
    for ours, share in zip(percentile_of_histogram(histogram, percentile), (100 - percentile, percentile), strict=True):
        lower, higher = (np.percentile(rows.numpy(), share, axis=1, method=method) for method in ("lower", "higher"))
        assert (ours.numpy() >= lower - 1.01 * width).all()
        assert (ours.numpy() <= higher + 1.01 * width).all()


GRIDS = {
    "int8": ("int8", "symmetric"),
    "int4": ("int4", "symmetric_with_clipping"),
    "uint4_asymmetric": ("uint4", "asymmetric"),
    "int4_minval": ("int4", "asymmetric", "minval"),
    "fp4_e8m0": ("float4_e2m1fn_x2", "symmetric", "zp", "float8_e8m0fnu"),
}
DATA = {
    "normal": lambda: randn(3, 2000),
    "heavy_tail": lambda: randn(3, 2000) ** 3,
    "one_outlier": lambda: torch.cat([randn(3, 1999), torch.full((3, 1), 30.0)], 1),
    "positive": lambda: randn(3, 2000).abs(),
    "constant": lambda: torch.full((3, 2000), 0.7),
    "zeros": lambda: torch.zeros(3, 2000),
}


def squared_error(rows, low, high, grid):
    qparams = choose_qparams(low[:, None], high[:, None], grid)
    return (fake_quantize(rows, qparams, grid).double() - rows.double()).square().sum(1)


@pytest.mark.parametrize("grid", [grid_of(*row) for row in GRIDS.values()], ids=GRIDS.keys())
@pytest.mark.parametrize("data", DATA)
def test_the_range_of_least_squares_is_never_worse_than_min_and_max(grid, data):
    rows = DATA[data]()
    low, high = rows.amin(1), rows.amax(1)
    searched = least_squares(rows, None, low, high, grid)
    assert (squared_error(rows, *searched, grid) <= squared_error(rows, low, high, grid) * (1 + 1e-5)).all()
    assert (searched[0] >= low.clamp(max=0)).all()
    assert (searched[1] <= high.clamp(min=0)).all()


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_the_range_of_least_squares_clips_a_heavy_tail(name):
    rows = DATA["heavy_tail"]()
    grid = grid_of(name, "asymmetric")
    low, high = rows.amin(1), rows.amax(1)
    searched = least_squares(rows, None, low, high, grid)
    assert (squared_error(rows, *searched, grid) < 0.9 * squared_error(rows, low, high, grid)).all()


@pytest.mark.parametrize("data", ["normal", "heavy_tail", "one_outlier", "positive"])
def test_least_squares_of_a_histogram_is_close_to_that_of_the_values(data):
    rows = DATA[data]()
    grid = grid_of("int4", "asymmetric")
    low, high = rows.amin(1), rows.amax(1)
    exact = squared_error(rows, *least_squares(rows, None, low, high, grid), grid)
    binned = squared_error(rows, *least_squares_of_histogram(compute_histogram(rows, 4096), low, high, grid), grid)
    assert (binned <= 1.05 * exact).all()


def test_weights_count_as_repetitions():
    values, counts = randn(1, 50) ** 3, torch.randint(1, 6, (1, 50), generator=torch.Generator().manual_seed(1))
    grid = grid_of("int2", "symmetric_with_clipping")
    low, high = values.amin(1), values.amax(1)
    repeated = values.repeat_interleave(counts[0], dim=1)
    weighted = squared_error(repeated, *least_squares(values, counts.float(), low, high, grid), grid)
    plain = squared_error(repeated, *least_squares(repeated, None, low, high, grid), grid)
    torch.testing.assert_close(weighted, plain, rtol=1e-5, atol=0)


def test_least_divergence_clips_a_heavy_tail():
    rows = randn(1, 100_000)
    rows[0, :5] = torch.tensor([40.0, -45.0, 50.0, -48.0, 42.0])
    low, high = least_divergence(compute_histogram(rows, 4096), rows.amin(1), rows.amax(1), 256)
    assert 2 < high.item() < 25
    assert -25 < low.item() < -2


def test_least_divergence_hardly_clips_a_uniform_distribution():
    rows = torch.rand(1, 100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    low, high = least_divergence(compute_histogram(rows, 4096), rows.amin(1), rows.amax(1), 256)
    assert high.item() > 0.95
    assert low.item() < -0.95


def test_least_divergence_stays_within_the_observed_range():
    rows = torch.cat([randn(3, 2000).abs(), torch.zeros(1, 2000)])
    low, high = rows.amin(1), rows.amax(1)
    searched_low, searched_high = least_divergence(compute_histogram(rows, 1024), low, high, 256)
    assert (searched_low >= low).all()
    assert (searched_high <= high).all()
