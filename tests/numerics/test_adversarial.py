"""Values that break careless arithmetic: infinities, NaN, subnormal numbers, the largest floats."""

import numpy as np
import pytest
import torch

from scalepoint.numerics import QParams, choose_qparams, dequantize, fake_quantize, min_max, quantize
from scalepoint.numerics.affine import PIECE_ELEMENTS
from tests import reference
from tests.reference import grid_of

LARGEST = torch.finfo(torch.float32).max
SIZES = pytest.mark.parametrize("size", [64, 2 * PIECE_ELEMENTS], ids=["small", "large"])
EACH_CASE = pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)

# Formats with a grid fine enough to tell these values apart.
CASES_8 = [case for case in reference.CASES if case[0] in ("int8", "uint8", *reference.FLOATS)]
EACH_CASE_8 = pytest.mark.parametrize("case", CASES_8, ids=reference.case_id)


def unit(grid, *, zero_point=None):
    """Scale 1; zero in the middle, or where it is said to be."""
    if grid.format.is_float:
        return QParams(torch.ones(1))
    zero_point = grid.middle if zero_point is None else zero_point
    return QParams(torch.ones(1), torch.tensor([zero_point], dtype=torch.int32), torch.tensor([-float(zero_point)]))


def embed(values, size):
    """A tensor of zeros that ends with the values, in the last piece of a large one."""
    x = torch.zeros(size)
    x[-len(values) :] = torch.tensor(values)
    return x


@EACH_CASE_8
@SIZES
def test_infinities_and_the_largest_floats_are_clamped_to_the_ends(case, size):
    grid = grid_of(*case)
    x = embed([-torch.inf, -LARGEST, LARGEST, torch.inf], size)
    zero = 0.0 if grid.format.is_float or grid.formulation == "minval" else grid.middle
    ends = (grid.low - zero, grid.high - zero)
    if grid.formulation == "minval":
        ends = (-float(grid.middle), grid.span - grid.middle)
    qparams = unit(grid)
    assert fake_quantize(x, qparams, grid)[-4:].tolist() == [ends[0], ends[0], ends[1], ends[1]]
    assert quantize(x, qparams, grid)[-4:].tolist() == [grid.low, grid.low, grid.high, grid.high]


@EACH_CASE
@SIZES
def test_nan_stays_nan_and_changes_no_other_value(case, size):
    grid = grid_of(*case)
    x = torch.linspace(-3, 3, size)
    expected = fake_quantize(x, unit(grid), grid)
    x[size // 2] = torch.nan
    y = fake_quantize(x, unit(grid), grid)
    assert y.isnan().nonzero().tolist() == [[size // 2]]
    keep = torch.arange(size) != size // 2
    assert torch.equal(y[keep], expected[keep])


@pytest.mark.parametrize("case", reference.INTEGER_CASES, ids=reference.case_id)
def test_nan_gets_the_lowest_code_of_an_integer(case):
    grid = grid_of(*case)
    assert quantize(torch.tensor([torch.nan, 0.0]), unit(grid), grid)[0].item() == grid.low


@pytest.mark.parametrize("case", reference.FLOAT_CASES, ids=reference.case_id)
def test_nan_stays_nan_as_a_float_code(case):
    grid = grid_of(*case)
    assert quantize(torch.tensor([torch.nan, 0.0]), unit(grid), grid).isnan().tolist() == [True, False]


@SIZES
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_nan_and_infinities_get_no_gradient(name, size):
    x = embed([torch.nan, torch.inf, -torch.inf, 1.0], size).requires_grad_()
    fake_quantize(x, unit(grid_of(name)), grid_of(name)).sum().backward()
    assert x.grad[-4:].tolist() == [0.0, 0.0, 0.0, 1.0]


@EACH_CASE_8
def test_subnormals_become_zero_under_an_ordinary_scale(case):
    grid = grid_of(*case)
    x = torch.tensor([1e-45, -1e-45, 1e-40, -1e-40, torch.finfo(torch.float32).tiny])
    assert (fake_quantize(x, unit(grid), grid) == 0).all()


@EACH_CASE
def test_a_tensor_of_subnormals_gives_finite_values_no_larger_than_its_step(case):
    grid = grid_of(*case)
    x = torch.tensor([1e-45, -1e-45, 1e-40, -1e-40, 1e-38])
    qparams = choose_qparams(*min_max(x, (5,)), grid)
    y = fake_quantize(x, qparams, grid)
    assert y.isfinite().all()
    assert ((y - x).abs() <= qparams.scale).all()


@EACH_CASE_8
def test_a_negative_zero_is_zero(case):
    grid = grid_of(*case)
    x = torch.tensor([-0.0, 0.0])
    codes = quantize(x, unit(grid), grid)
    assert codes[0] == codes[1]
    assert (fake_quantize(x, unit(grid), grid) == 0).all()


@pytest.mark.parametrize("name", reference.FLOATS)
def test_a_float_keeps_the_sign_of_zero(name):
    grid = grid_of(name)
    assert quantize(torch.tensor([-0.0, 0.0, -1e-30]), unit(grid), grid).signbit().tolist() == [True, False, True]
    assert fake_quantize(torch.tensor([-0.0, 0.0]), unit(grid), grid).signbit().tolist() == [True, False]


@pytest.mark.parametrize("zero_point", [-128, -7, 0, 127])
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.1, 1 / 3])
def test_a_value_on_a_tie_goes_to_the_even_integer_before_the_zero_point_is_added(scale, zero_point):
    step = np.float32(scale)
    x = (np.arange(-60, 60, dtype=np.float32) + np.float32(0.5)) * step
    grid = grid_of("int8", "asymmetric")
    qparams = QParams(torch.tensor([step]), torch.tensor([zero_point], dtype=torch.int32), torch.zeros(1))
    codes = quantize(torch.from_numpy(x), qparams, grid).numpy()
    np.testing.assert_array_equal(codes, np.clip(np.rint(x / step) + zero_point, -128, 127))


def test_a_tie_under_an_odd_zero_point_is_not_decided_by_the_sum():
    grid = grid_of("int8", "asymmetric")
    codes = quantize(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), unit(grid, zero_point=7), grid)
    assert codes.tolist() == [7.0, 9.0, 9.0, 7.0, 5.0]


@EACH_CASE_8
def test_a_range_of_1e38_gives_the_codes_and_values_of_the_formula(case):
    name, scheme, formulation, scale_dtype = case
    x = np.array([-1e38, -3e37, -1.0, 0.0, 1.0, 7e37, 1e38], np.float32)
    params = reference.qparams(*reference.extremes(x, (7,)), name, scheme, scale_dtype)
    codes = reference.quantize(x, params, name, scheme, formulation, (7,))
    values = reference.dequantize(codes, params, name, scheme, formulation, (7,))
    grid = grid_of(*case)
    qparams = choose_qparams(*min_max(torch.from_numpy(x), (7,)), grid)
    assert torch.equal(quantize(torch.from_numpy(x), qparams, grid), torch.from_numpy(codes))
    assert torch.equal(fake_quantize(torch.from_numpy(x), qparams, grid), torch.from_numpy(values))


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_every_code_survives_dequantize_and_quantize(name):
    grid = grid_of(name, "asymmetric")
    codes = torch.arange(int(grid.low), int(grid.high) + 1, dtype=torch.float32)
    for scale in (0.1, 1e-5, 3e30, 2.0**-20):
        qparams = QParams(torch.tensor([scale]), torch.tensor([3], dtype=torch.int32), torch.zeros(1))
        assert torch.equal(quantize(dequantize(codes, qparams, grid), qparams, grid), codes)


def test_a_double_beyond_float32_is_clamped_like_an_infinity():
    grid = grid_of("int8")
    assert fake_quantize(torch.tensor([1e300, -1e300], dtype=torch.float64), unit(grid), grid).tolist() == [127, -128]


def test_one_outlier_coarsens_its_own_block_only():
    x = torch.full((2, 8), 0.5)
    x[1, 0] = 1e30
    grid = grid_of("int8", "symmetric_with_clipping")
    y = fake_quantize(x, choose_qparams(*min_max(x, (1, 8)), grid), grid, (1, 8))
    assert torch.equal(y[0], x[0])
    assert y[1, 1:].tolist() == [0.0] * 7
