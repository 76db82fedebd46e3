"""Rounding to a float format: torch's own casts for fp8, the list of its values for fp4."""

import numpy as np
import pytest
import torch

from scalepoint.numerics import E4M3, E5M2, FP4, dtype_name, format_of, round_to_float
from scalepoint.numerics.rounding import exponent, power_of_two
from tests import reference

FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=dtype_name)
ALL = pytest.mark.parametrize("dtype", [E4M3, E5M2, FP4], ids=dtype_name)


def bits(x):
    return x.view(torch.int32)


def within(x, fmt):
    return x[x.abs() <= fmt.high]


def every_float16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)


def random_float32():
    patterns = np.random.default_rng(0).integers(-(2**31), 2**31, 500_000, dtype=np.int64).astype(np.int32)
    small = np.random.default_rng(1).normal(0, 1, 200_000) * 2.0 ** np.random.default_rng(2).integers(-30, 17, 200_000)
    return torch.cat([torch.from_numpy(patterns).view(torch.float32), torch.from_numpy(small.astype(np.float32))])


def ties_and_their_neighbours(name):
    values = torch.tensor(reference.positive_values(name))
    middles = (values[1:] + values[:-1]) / 2
    infinity = torch.tensor(torch.inf)
    positive = torch.cat([values, middles, middles.nextafter(infinity), middles.nextafter(-infinity)])
    return torch.cat([positive, -positive])


SOURCES = {
    "every_float16": lambda name: every_float16(),
    "random_float32": lambda name: random_float32(),
    "ties": ties_and_their_neighbours,
    "subnormal_float32": lambda name: torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40]),
}


@FP8
@pytest.mark.parametrize("source", SOURCES)
def test_rounding_to_fp8_is_torchs_cast_bit_for_bit(dtype, source):
    fmt = format_of(dtype)
    x = within(SOURCES[source](dtype_name(dtype)), fmt)
    assert x.numel() > 5
    assert torch.equal(bits(round_to_float(x, fmt)), bits(x.to(dtype).to(torch.float32)))


@pytest.mark.parametrize("source", SOURCES)
def test_rounding_to_fp4_is_the_nearest_of_its_values(source):
    x = within(SOURCES[source]("float4_e2m1fn_x2"), format_of(FP4))
    x = x if x.numel() < 20_000 else x[:: x.numel() // 20_000]
    expected = torch.from_numpy(np.array([reference.nearest(value, "float4_e2m1fn_x2") for value in x.numpy()]))
    assert torch.equal(bits(round_to_float(x, format_of(FP4))), bits(expected))


@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)], ids=str
)
def test_a_tie_of_fp4_goes_to_the_even_code(tie, even):
    assert round_to_float(torch.tensor([tie, -tie]), format_of(FP4)).tolist() == [even, -even]


@ALL
def test_every_value_of_a_format_rounds_to_itself(dtype):
    values = torch.tensor(reference.positive_values(dtype_name(dtype)))
    values = torch.cat([values, -values])
    assert values.numel() == {E4M3: 254, E5M2: 248, FP4: 16}[dtype]
    assert torch.equal(bits(round_to_float(values, format_of(dtype))), bits(values))


@ALL
def test_nan_stays_nan(dtype):
    assert round_to_float(torch.tensor([torch.nan, -torch.nan]), format_of(dtype)).isnan().all()


@ALL
def test_rounding_in_place_with_a_scratch_gives_the_same(dtype):
    fmt = format_of(dtype)
    x = within(random_float32()[:20_000], fmt)
    expected = round_to_float(x, fmt)
    work = x.clone()
    result = round_to_float(work, fmt, out=work, scratch=torch.empty_like(work))
    assert result is work
    assert torch.equal(bits(work), bits(expected))


def test_without_out_the_input_is_left_alone():
    x = torch.tensor([0.3, 5.1])
    round_to_float(x, format_of(FP4))
    assert x.tolist() == torch.tensor([0.3, 5.1]).tolist()


def test_exponent_and_power_of_two_are_inverse_for_every_normal_power():
    powers = torch.arange(-126, 128, dtype=torch.int32)
    values = power_of_two(powers)
    assert values.tolist() == [2.0**power for power in range(-126, 128)]
    assert torch.equal(exponent(bits(values)), powers)
    assert torch.equal(exponent(bits(values * 1.999)), powers)
    assert exponent(bits(torch.tensor([0.0, 1e-40]))).tolist() == [-127, -127]
