"""From a range to scale, zero point and minval: the table of contract A3 and what lies at its edges."""

import numpy as np
import pytest
import torch

from scalepoint.errors import SpecError
from scalepoint.numerics import (
    E4M3,
    E5M2,
    E8M0,
    EPS,
    FORMATS,
    FP4,
    Float6,
    ScaleRounding,
    block_scale,
    choose_qparams,
    dtype_name,
    fake_quantize,
    get_format,
    min_max,
    power_of_two_scale,
    tensor_scale,
)
from tests import reference
from tests.reference import grid_of

TINY = torch.finfo(torch.float32).tiny


def choose(low, high, grid):
    return choose_qparams(torch.tensor([low]), torch.tensor([high]), grid)


TABLE = {
    "int8-symmetric": ("int8", "symmetric", -2.0, 1.0, 2 / 127.5, 0, -2.0),
    "int8-symmetric-high-end": ("int8", "symmetric", -2.0, 5.0, 5 / 127.5, 0, -5.0),
    "int8-clipping": ("int8", "symmetric_with_clipping", -2.0, 1.0, 2 / 127, 0, -2.0),
    "int8-asymmetric": ("int8", "asymmetric", -1.0, 3.0, 4 / 255, -64, -1.0),
    "int8-asymmetric-positive": ("int8", "asymmetric", 1.0, 3.0, 3 / 255, -128, 0.0),
    "int8-asymmetric-negative": ("int8", "asymmetric", -3.0, -1.0, 3 / 255, 127, -3.0),
    "uint8-symmetric": ("uint8", "symmetric", -2.0, 1.0, 2 / 127.5, 128, -2.0),
    "uint8-clipping": ("uint8", "symmetric_with_clipping", -2.0, 1.0, 2 / 127.5, 128, -2.0),
    "uint8-asymmetric": ("uint8", "asymmetric", -1.0, 3.0, 4 / 255, 64, -1.0),
    "uint8-asymmetric-positive": ("uint8", "asymmetric", 1.0, 3.0, 3 / 255, 0, 0.0),
    "int4-symmetric": ("int4", "symmetric", -3.0, 1.0, 3 / 7.5, 0, -3.0),
    "int4-clipping": ("int4", "symmetric_with_clipping", -3.0, 1.0, 3 / 7, 0, -3.0),
    "uint4-symmetric": ("uint4", "symmetric", -3.0, 1.0, 3 / 7.5, 8, -3.0),
    "int2-symmetric": ("int2", "symmetric", -3.0, 1.0, 3 / 1.5, 0, -3.0),
    "int2-clipping": ("int2", "symmetric_with_clipping", -3.0, 1.0, 3.0, 0, -3.0),
    "uint2-asymmetric": ("uint2", "asymmetric", -1.0, 2.0, 1.0, 1, -1.0),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_the_parameters_follow_the_table_of_the_contract(row):
    name, scheme, low, high, scale, zero_point, minval = row
    got = choose(low, high, grid_of(name, scheme))
    assert got.scale.item() == pytest.approx(scale, rel=1e-7)
    assert got.zero_point.tolist() == [zero_point]
    assert got.minval.tolist() == [minval]


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_a_float_scale_maps_the_largest_value_to_the_largest_code(name, largest):
    got = choose(-3.0, 2.0, grid_of(name))
    assert got.scale.item() == pytest.approx(3 / largest, rel=1e-7)
    assert got.zero_point is None
    assert got.minval is None


def ranges():
    rng = np.random.default_rng(1)
    ends = rng.normal(0, 1, (400, 2)) * 10.0 ** rng.integers(-6, 7, (400, 1))
    special = [(0, 0), (0, 1), (-1, 0), (1, 2), (-2, -1), (-1e-40, 1e-40), (-1e38, 1e38), (0, 1e-12)]
    ends = np.concatenate([np.sort(ends, axis=1), np.array(special)]).astype(np.float32)
    return ends[:, 0], ends[:, 1]


@pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)
def test_the_parameters_follow_the_general_rule(case):
    name, scheme, _, scale_dtype = case
    low, high = ranges()
    scale, zero_point, minval = reference.qparams(low, high, name, scheme, scale_dtype)
    got = choose_qparams(torch.from_numpy(low), torch.from_numpy(high), grid_of(*case))
    np.testing.assert_allclose(got.scale.numpy(), scale, rtol=1e-7)
    assert got.scale.dtype == torch.float32
    if name in reference.FLOATS:
        assert got.zero_point is None
        assert got.minval is None
    else:
        np.testing.assert_array_equal(got.zero_point.numpy(), zero_point)
        np.testing.assert_array_equal(got.minval.numpy(), minval)
        assert got.zero_point.dtype == torch.int32


ONE_CODE = ("int1", "symmetric_with_clipping")


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("name", reference.INTEGERS)
def test_every_integer_has_a_finite_positive_scale_in_every_scheme(name, scheme):
    if (name, scheme) == ONE_CODE:
        pytest.skip("only one code: refused, see below")
    grid = grid_of(name, scheme)
    scale = choose_qparams(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.0]), grid).scale
    assert scale.isfinite().all()
    assert (scale > 0).all()


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("dtype", FORMATS, ids=dtype_name)
def test_a_format_has_the_limits_of_the_contract(dtype, scheme):
    if (dtype_name(dtype), scheme) == ONE_CODE:
        with pytest.raises(SpecError, match="only one code"):
            get_format(dtype).limits(scheme)
    else:
        assert get_format(dtype).limits(scheme) == reference.limits(dtype_name(dtype), scheme)


def test_a_dtype_without_a_format_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match=r"dtype complex64 is not supported.*int8"):
        get_format(torch.complex64)


UNIFORM_SCALES = (*reference.INTEGER_CASES, ("float8_e4m3fn", "symmetric", "zp", None))


@pytest.mark.parametrize("case", UNIFORM_SCALES, ids=reference.case_id)
def test_the_scale_never_falls_below_epsilon(case):
    got = choose_qparams(torch.tensor([0.0, -1e-40, -1e-20]), torch.tensor([0.0, 1e-40, 1e-20]), grid_of(*case))
    assert got.scale.tolist() == [EPS] * 3


@pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)
def test_a_block_of_zeros_comes_back_as_zeros(case):
    grid = grid_of(*case)
    qparams = choose(0.0, 0.0, grid)
    assert qparams.scale.isfinite().all()
    assert (qparams.scale > 0).all()
    assert fake_quantize(torch.zeros(9), qparams, grid).tolist() == [0.0] * 9


@pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)
def test_a_range_of_1e38_keeps_everything_finite(case):
    grid = grid_of(*case)
    qparams = choose(-1e38, 1e38, grid)
    assert qparams.scale.isfinite().all()
    assert fake_quantize(torch.tensor([-1e38, -1.0, 0.0, 1e37, 1e38]), qparams, grid).isfinite().all()


@pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)
def test_a_range_as_wide_as_float32_keeps_everything_finite_and_in_order(case):
    grid = grid_of(*case)
    largest = torch.finfo(torch.float32).max
    qparams = choose(-largest, largest, grid)
    assert qparams.scale.isfinite().all()
    assert (qparams.scale > 0).all()
    y = fake_quantize(torch.tensor([-largest, -1e38, 0.0, 1e38, largest]), qparams, grid)
    assert y.isfinite().all()
    assert (y.diff() >= 0).all()


ROUNDINGS = {
    "fp4-4": (FP4, 4.0, {"floor": 1, "ceil": 1, "even": 1, "rne": 0.5, "rceil": 1}),
    "fp4-6": (FP4, 6.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 1}),
    "fp4-6.99": (FP4, 6.99, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 2}),
    "fp4-7": (FP4, 7.0, {"floor": 1, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "fp4-9": (FP4, 9.0, {"floor": 2, "ceil": 4, "even": 2, "rne": 1, "rceil": 2}),
    "fp4-18": (FP4, 18.0, {"floor": 4, "ceil": 8, "even": 4, "rne": 4, "rceil": 4}),
    "e2m3-7.5": (Float6.E2M3, 7.5, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 1}),
    "e2m3-7.75": (Float6.E2M3, 7.75, {"floor": 1, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "e2m3-8": (Float6.E2M3, 8.0, {"floor": 2, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "e3m2-28": (Float6.E3M2, 28.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 1}),
    "e3m2-29": (Float6.E3M2, 29.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 2}),
    "e3m2-30": (Float6.E3M2, 30.0, {"floor": 1, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "e4m3-448": (E4M3, 448.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 1}),
    "e4m3-480": (E4M3, 480.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 2}),
    "e4m3-496": (E4M3, 496.0, {"floor": 1, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "e4m3-512": (E4M3, 512.0, {"floor": 2, "ceil": 2, "even": 2, "rne": 1, "rceil": 2}),
    "e5m2-1": (E5M2, 1.0, {"floor": 2**-15, "ceil": 2**-15, "even": 2**-15, "rne": 2**-16, "rceil": 2**-15}),
    "e5m2-57344": (E5M2, 57344.0, {"floor": 1, "ceil": 2, "even": 1, "rne": 1, "rceil": 1}),
}


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("row", ROUNDINGS.values(), ids=ROUNDINGS.keys())
def test_a_power_of_two_scale_is_the_one_computed_by_hand(row, rounding):
    dtype, max_abs, scales = row
    assert power_of_two_scale(torch.tensor([max_abs]), get_format(dtype), rounding).tolist() == [scales[rounding]]


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("dtype", [FP4, *Float6, E4M3, E5M2], ids=dtype_name)
def test_a_power_of_two_scale_is_a_normal_number_of_e8m0_for_any_range(dtype, rounding):
    max_abs = torch.tensor([0.0, 1e-45, 1e-40, TINY, 1e-30, 1.0, 1e38, torch.finfo(torch.float32).max])
    scale = power_of_two_scale(max_abs, get_format(dtype), rounding)
    assert torch.equal(scale.to(E8M0).to(torch.float32), scale)
    assert (scale >= TINY).all()
    assert scale[:4].tolist() == [TINY] * 4


@pytest.mark.parametrize("dtype", [FP4, *Float6, E4M3, E5M2], ids=dtype_name)
def test_rceil_is_the_smallest_scale_that_never_saturates(dtype):
    fmt = get_format(dtype)
    edges = fmt.high * 2.0 ** torch.arange(-20, 20)
    max_abs = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), torch.rand(2000) * 1000 + 1e-3])
    scale = power_of_two_scale(max_abs, fmt, ScaleRounding.RCEIL)
    assert (max_abs.double() / scale <= fmt.high).all()
    assert (max_abs.double() / (scale / 2) > fmt.high).all()


def test_two_level_scales_are_an_e4m3_number_times_the_scale_of_the_tensor():
    max_abs = torch.tensor([[6.0, 3.0], [5.3, 1e-9]])
    outer = tensor_scale(max_abs, get_format(FP4))
    inner = block_scale(max_abs, outer, get_format(FP4))
    assert outer.item() == pytest.approx(6 / (448 * 6), rel=1e-7)
    assert inner.tolist() == [[448.0, 224.0], [384.0, 2.0**-9]]
    scale = choose_qparams(-max_abs, max_abs / 2, grid_of("float4_e2m1fn_x2", scale_dtype="float8_e4m3fn")).scale
    assert torch.equal(scale, inner * outer)


def test_the_outer_one_of_two_level_scales_covers_the_tensor():
    fmt = get_format(FP4)
    alone = tensor_scale(torch.tensor([[1.0]]), fmt)
    assert torch.equal(tensor_scale(torch.tensor([[1.0], [0.25]]), fmt), alone)
    assert torch.equal(tensor_scale(torch.tensor([[1.0], [4.0]]), fmt), alone * 4)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-30, 1e38, 3.4e38])
def test_two_level_scales_are_finite_and_positive_for_any_range(largest):
    max_abs = torch.tensor([[largest, largest / 3]])
    grid = grid_of("float4_e2m1fn_x2", scale_dtype="float8_e4m3fn")
    scale = choose_qparams(-max_abs, max_abs, grid).scale
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert fake_quantize(torch.zeros(1, 2), choose_qparams(-max_abs, max_abs, grid), grid).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint2"])
def test_exact_zero_moves_minval_to_the_grid_so_that_zero_is_a_code(name, scheme):
    low, high = (torch.from_numpy(ends[:400]) for ends in ranges())
    plain = choose_qparams(low, high, grid_of(name, scheme, "minval"))
    grid = grid_of(name, scheme, "minval", exact_zero=True)
    moved = choose_qparams(low, high, grid)
    assert torch.equal(moved.scale, plain.scale)
    assert torch.equal(moved.minval, (plain.minval / plain.scale).round() * plain.scale)
    assert (fake_quantize(torch.zeros(400), moved, grid) == 0).all()
    assert not torch.equal(moved.minval, plain.minval)


def test_without_exact_zero_minval_is_the_low_end_itself():
    assert choose(-1.0, 2.3, grid_of("int8", "asymmetric", "minval")).minval.tolist() == [-1.0]


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
def test_the_extremes_of_every_block_are_found(layout, dtype):
    shape, block = reference.LAYOUTS[layout]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    low, high = reference.extremes(x.float().numpy(), block)
    got_low, got_high = min_max(x, block)
    assert got_low.dtype == got_high.dtype == torch.float32
    np.testing.assert_array_equal(got_low.numpy(), low)
    np.testing.assert_array_equal(got_high.numpy(), high)


def test_a_nan_appears_only_in_the_extremes_of_its_own_block():
    x = torch.ones(2, 4)
    x[1, 2] = torch.nan
    low, high = min_max(x, (1, 4))
    assert low.isnan().flatten().tolist() == high.isnan().flatten().tolist() == [False, True]
