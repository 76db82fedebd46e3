"""Range calculators: shapes for every granularity, percentiles, searches, calculators of users."""

import numpy as np
import pytest
import torch

from scalepoint.numerics import Grid, QuantizationScheme, choose_qparams, fake_quantize, get_format
from scalepoint.spec import (
    EntropyRangeCalculator,
    MinMaxRangeCalculator,
    MseRangeCalculator,
    PerBlockGranularity,
    PercentileRangeCalculator,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
    RangeCalculatorBase,
)

GRANULARITIES = {
    "tensor": (PerTensorGranularity(), (1, 1, 1)),
    "channel 0": (PerChannelGranularity(axis=0), (4, 1, 1)),
    "channel -1": (PerChannelGranularity(axis=-1), (1, 1, 5)),
    "block": (PerBlockGranularity(axis=1, block_size=3), (4, 2, 1)),
    "ragged": (PerBlockGranularity(axis=1, block_size=4, pad=True), (4, 2, 1)),
    "tile": (PerBlockGranularity(block_size=(2, 3, -1)), (2, 2, 1)),
    "token": (PerTokenGranularity(), (4, 6, 1)),
}
KINDS = [MinMaxRangeCalculator, PercentileRangeCalculator, MseRangeCalculator, EntropyRangeCalculator]
each_granularity = pytest.mark.parametrize(("granularity", "counts"), GRANULARITIES.values(), ids=GRANULARITIES.keys())


@each_granularity
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_has_one_value_per_block_within_the_data(kind, granularity, counts):
    x = torch.randn(4, 6, 5)
    low, high = kind(granularity)(x)
    assert low.shape == high.shape == counts
    assert low.dtype == torch.float32
    assert (low >= x.min()).all()
    assert (high <= x.max()).all()


@each_granularity
def test_min_and_max_are_those_of_each_block(granularity, counts):
    x = torch.randn(4, 6, 5)
    low, high = MinMaxRangeCalculator(granularity)(x)
    block = granularity.get_block_size(x.shape)
    for index in np.ndindex(*counts):
        part = x[tuple(slice(i * extent, (i + 1) * extent) for i, extent in zip(index, block, strict=True))]
        assert low[index] == part.min()
        assert high[index] == part.max()


@pytest.mark.parametrize("shape", [(10,), (10, 10), (2, 3, 4, 5)])
@pytest.mark.parametrize("low", [-20.0, 0.0, 10.0])
def test_a_range_may_exclude_zero(shape, low):
    x = torch.rand(shape) + low
    extremes = MinMaxRangeCalculator(PerTensorGranularity())(x)
    assert (extremes[0], extremes[1]) == (x.min(), x.max())


@pytest.mark.parametrize("percentile", [75, 99, 99.9, 100])
def test_a_percentile_equals_numpy(percentile):
    x = torch.randn(3, 1001)
    low, high = PercentileRangeCalculator(PerChannelGranularity(axis=0), percentile=percentile)(x)
    np.testing.assert_allclose(high.flatten(), np.percentile(x.numpy(), percentile, axis=1), rtol=1e-5)
    np.testing.assert_allclose(low.flatten(), np.percentile(x.numpy(), 100 - percentile, axis=1), rtol=1e-5)


@pytest.mark.parametrize("scheme", list(QuantizationScheme), ids=str)
@pytest.mark.parametrize("dtype", ["int4", "int2", "uint4", "float4_e2m1fn"])
def test_the_searched_range_is_never_worse_than_min_and_max(dtype, scheme):
    if dtype.startswith("float") and scheme != QuantizationScheme.SYMMETRIC:
        pytest.skip("float formats are symmetric")
    x = torch.randn(8, 256) ** 3 + 0.3
    spec = QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=PerChannelGranularity(axis=0))
    errors = {}
    for key in ("minmax", "mse"):
        fq = QuantizationComponentFactory.create_fake_quantizer(spec.replace(range_calculator_cls=key), "weight")
        errors[key] = (fq(x) - x).square().sum(1)
    assert (errors["mse"] <= errors["minmax"]).all()
    if not dtype.startswith("float"):  # a power-of-two scale has few choices
        assert errors["mse"].sum() < errors["minmax"].sum()


def test_the_search_knows_the_codes_of_the_spec():
    spec = QuantizationSpec(dtype="int4", range_calculator_cls="mse", qscheme="symmetric_with_clipping")
    grid = QuantizationComponentFactory.create_range_calculator(spec).grid
    assert (grid.low, grid.high, grid.scheme) == (-7, 7, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)


def test_entropy_clips_a_heavy_tail_and_keeps_a_flat_distribution():
    x = torch.randn(100_000)
    x[0] = 50.0
    low, high = EntropyRangeCalculator(PerTensorGranularity())(x)
    assert 2 < high < 25
    assert low >= x.min()
    flat = torch.rand(100_000) * 2 - 1
    assert EntropyRangeCalculator(PerTensorGranularity())(flat)[1] > 0.9


def test_a_wrong_number_of_values_names_the_calculator():
    class Wrong(RangeCalculatorBase):
        def _generate_min_max(self, tensor):
            return torch.zeros(3), torch.zeros(3)

    with pytest.raises(ValueError, match=r"Wrong\._generate_min_max returned shape \(3,\)"):
        Wrong(PerTensorGranularity())(torch.randn(4, 4))


def test_a_users_calculator_sees_ragged_tensors_part_by_part():
    class Mean(RangeCalculatorBase):
        def _generate_min_max(self, tensor):
            rows = self.blocks(tensor)
            return rows.mean(1), rows.mean(1)

    x = torch.arange(10.0).view(1, 10)
    low, _ = Mean(PerBlockGranularity(axis=1, block_size=4, pad=True))(x)
    assert low.tolist() == [[1.5, 5.5, 8.5]]


@pytest.mark.parametrize("percentile", [0, 50, 101])
def test_a_percentile_out_of_bounds_is_refused(percentile):
    with pytest.raises(ValueError, match=r"50.*100"):
        PercentileRangeCalculator(PerTensorGranularity(), percentile=percentile)


def test_an_outlier_pays_for_itself_only_in_the_searched_range():
    x = torch.randn(4096)
    x[0] = 100.0
    low, high = MseRangeCalculator(PerTensorGranularity(), dtype=torch.int4)(x)
    fmt = get_format(torch.int4)
    grid = Grid(fmt, fmt.low, fmt.high)
    bulk = x[1:]
    narrow = fake_quantize(bulk, choose_qparams(low, high, grid), grid)
    wide = fake_quantize(bulk, choose_qparams(x.min().view(1), x.max().view(1), grid), grid)
    assert (narrow - bulk).square().mean() <= (wide - bulk).square().mean()
