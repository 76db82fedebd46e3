"""Properties of every tensor, range and format; Hypothesis searches for counterexamples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalepoint.numerics import choose_qparams, fake_quantize, min_max, quantize
from tests import reference
from tests.reference import grid_of

settings.register_profile("numerics", deadline=None, max_examples=60, derandomize=True, database=None)
FEW = settings(settings.get_profile("numerics"))

integer_cases = st.sampled_from(reference.INTEGER_CASES)
cases = st.sampled_from(reference.CASES)
numbers = st.floats(-1e6, 1e6, width=32) | st.floats(-1, 1, width=32) | st.integers(-300, 300).map(float)
vectors = st.lists(numbers, min_size=1, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))


@st.composite
def matrices(draw, columns):
    rows = draw(st.integers(1, 4))
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).view(rows, columns)


def fitted(x, grid):
    return choose_qparams(*min_max(x, tuple(x.shape)), grid)


@FEW
@given(vectors, integer_cases)
def test_an_integer_inside_the_range_comes_back_within_half_a_step(x, case):
    grid = grid_of(*case)
    qparams = fitted(x, grid)
    error = (fake_quantize(x, qparams, grid).double() - x.double()).abs()
    rounding = x.abs().max().double() * 2.0**-21
    assert (error <= qparams.scale.double() / 2 + rounding).all()


@FEW
@given(vectors, st.sampled_from(reference.FLOAT_CASES))
def test_a_float_inside_the_range_comes_back_within_half_a_step_of_its_format(x, case):
    grid = grid_of(*case)
    qparams = fitted(x, grid)
    error = (fake_quantize(x, qparams, grid).double() - x.double()).abs()
    inside = (x / qparams.scale).abs() <= grid.high
    fmt = grid.format
    finest = qparams.scale.double() * 2.0 ** (fmt.min_exponent - fmt.mantissa)
    step = torch.maximum(x.double().abs() * 2.0**-fmt.mantissa, finest)
    assert (error[inside] <= step[inside] / 2 * (1 + 2.0**-20)).all()


@FEW
@given(vectors, vectors, cases)
def test_it_is_monotone(x, calibration, case):
    grid = grid_of(*case)
    y = fake_quantize(x.sort().values, fitted(calibration, grid), grid)
    assert (y.diff() >= 0).all()


@FEW
@given(vectors, vectors, cases)
def test_it_is_idempotent(x, calibration, case):
    grid = grid_of(*case)
    qparams = fitted(calibration, grid)
    once = fake_quantize(x, qparams, grid)
    assert torch.equal(fake_quantize(once, qparams, grid), once)


@FEW
@given(vectors, vectors, integer_cases)
def test_codes_are_integers_within_the_limits(x, calibration, case):
    codes = quantize(x, fitted(calibration, grid_of(*case)), grid_of(*case))
    low, high = reference.limits(*case[:2])
    assert (codes >= low).all()
    assert (codes <= high).all()
    assert torch.equal(codes, codes.round())


@FEW
@given(vectors, vectors, st.sampled_from(reference.FLOAT_CASES))
def test_float_codes_are_values_of_their_format(x, calibration, case):
    codes = quantize(x, fitted(calibration, grid_of(*case)), grid_of(*case))
    assert np.isin(codes.abs().numpy(), reference.positive_values(case[0])).all()


@FEW
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(0, 2.0**120, width=32), cases)
def test_the_scale_is_positive_and_finite_and_the_zero_point_is_a_code(low, width, case):
    low = max(min(low, 1e38), -1e38)
    qparams = choose_qparams(torch.tensor([low]), torch.tensor([low + width]), grid_of(*case))
    assert (qparams.scale > 0).all()
    assert qparams.scale.isfinite().all()
    if qparams.zero_point is not None:
        least, most = reference.limits(*case[:2])
        assert least <= qparams.zero_point.item() <= most


@FEW
@given(vectors, cases)
def test_zero_stays_zero_for_every_zero_point(x, case):
    name, scheme, _, scale_dtype = case
    grid = grid_of(name, scheme, "zp", scale_dtype)
    assert fake_quantize(torch.zeros(3), fitted(x, grid), grid).tolist() == [0.0, 0.0, 0.0]


@FEW
@given(matrices(24), cases)
def test_blocks_are_the_channels_of_the_tensor_folded_by_them(x, case):
    grid = grid_of(*case)
    folded = x.view(-1, 8)
    in_blocks = fake_quantize(x, choose_qparams(*min_max(x, (1, 8)), grid), grid, (1, 8))
    by_channel = fake_quantize(folded, choose_qparams(*min_max(folded, (1, 8)), grid), grid, (1, 8))
    assert torch.equal(in_blocks.view(-1, 8), by_channel)


@FEW
@given(matrices(10), cases)
def test_a_ragged_block_is_quantized_like_a_tensor_of_its_own(x, case):
    grid = grid_of(*case)
    together = fake_quantize(x, choose_qparams(*min_max(x, (1, 8)), grid), grid, (1, 8))
    alone = [
        fake_quantize(part, choose_qparams(*min_max(part, block), grid), grid, block)
        for part, block in ((x[:, :8], (1, 8)), (x[:, 8:], (1, 2)))
    ]
    assert torch.equal(together, torch.cat(alone, 1))


SIGNED_AND_CLIPPED = [case for case in reference.INTEGER_CASES if case[0][0] == "i" and "clipping" in case[1]]


@FEW
@given(vectors, st.sampled_from([*(case for case in SIGNED_AND_CLIPPED if case[2] == "zp"), *reference.FLOAT_CASES]))
def test_with_equal_ends_the_negative_is_quantized_to_the_negative(x, case):
    grid = grid_of(*case)
    forward, backward = fitted(x, grid), fitted(-x, grid)
    assert torch.equal(forward.scale, backward.scale)
    assert torch.equal(fake_quantize(-x, backward, grid), -fake_quantize(x, forward, grid))
    assert torch.equal(quantize(-x, backward, grid), -quantize(x, forward, grid))


@FEW
@given(vectors, integer_cases, st.integers(-10, 10))
def test_a_power_of_two_on_the_data_is_one_on_the_scale(x, case, power):
    grid = grid_of(*case)
    x = torch.where(x.abs() < 1e-3, 0.0, x)
    if not x.any():
        return
    scaled = x * 2.0**power
    first, second = fitted(x, grid), fitted(scaled, grid)
    if first.scale.item() * min(1.0, 2.0**power) <= 2.0**-22:
        return
    assert torch.equal(first.scale * 2.0**power, second.scale)
    assert torch.equal(quantize(x, first, grid), quantize(scaled, second, grid))


@pytest.mark.parametrize("case", SIGNED_AND_CLIPPED, ids=reference.case_id)
def test_clipping_leaves_the_lowest_code_unused(case):
    x = torch.linspace(-5, 5, 999)
    grid = grid_of(*case)
    codes = quantize(x, fitted(x, grid), grid)
    assert codes.min() == -codes.max() == -grid.high
