"""Rounding to a float format: torch's own casts for fp8, the list of their values for fp6 and fp4."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from scalepoint.numerics import E4M3, E5M2, FP4, Float6, dtype_name, get_format, round_to_float
from scalepoint.numerics.rounding import floor_log2, power_of_two
from tests import reference

FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=dtype_name)
ALL = pytest.mark.parametrize("dtype", [E4M3, E5M2, *Float6, FP4], ids=dtype_name)


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
def test_rounding_to_fp8_equals_the_cast_of_torch_bit_for_bit(dtype, source):
    fmt = get_format(dtype)
    x = within(SOURCES[source](dtype_name(dtype)), fmt)
    assert x.numel() > 5
    assert torch.equal(bits(round_to_float(x, fmt)), bits(x.to(dtype).to(torch.float32)))


@pytest.mark.parametrize("dtype", [FP4, *Float6], ids=dtype_name)
@pytest.mark.parametrize("source", SOURCES)
def test_rounding_to_fp4_and_fp6_is_the_nearest_of_their_values(dtype, source):
    name = dtype_name(dtype)
    x = within(SOURCES[source](name), get_format(dtype))
    x = x if x.numel() < 20_000 else x[:: x.numel() // 20_000]
    expected = torch.from_numpy(np.array([reference.nearest(value, name) for value in x.numpy()]))
    assert torch.equal(bits(round_to_float(x, get_format(dtype))), bits(expected))


# Every code of OCP MX v1.0, 5.3.2: the subnormal ones, then a row an exponent.
E2M3_VALUES = [
    *(0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
    *(1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875),
    *(2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75),
    *(4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5),
]
E3M2_VALUES = [
    *(0.0, 0.0625, 0.125, 0.1875),
    *(0.25, 0.3125, 0.375, 0.4375),
    *(0.5, 0.625, 0.75, 0.875),
    *(1.0, 1.25, 1.5, 1.75),
    *(2.0, 2.5, 3.0, 3.5),
    *(4.0, 5.0, 6.0, 7.0),
    *(8.0, 10.0, 12.0, 14.0),
    *(16.0, 20.0, 24.0, 28.0),
]
FP6 = pytest.mark.parametrize(
    ("dtype", "table"), [(Float6.E2M3, E2M3_VALUES), (Float6.E3M2, E3M2_VALUES)], ids=["e2m3", "e3m2"]
)


@FP6
def test_the_values_of_fp6_are_those_of_the_standard_and_their_storage_holds_them(dtype, table):
    values = torch.tensor([*table, *(-value for value in table)])
    fmt = get_format(dtype)
    assert reference.positive_values(dtype_name(dtype)) == table
    assert (fmt.bits, fmt.low, fmt.high, fmt.max_exponent) == (6, -table[-1], table[-1], int(np.log2(table[-1])))
    assert torch.equal(round_to_float(values, fmt), values)
    assert torch.equal(values.to(fmt.storage).to(torch.float32), values)


@FP6
def test_fp6_rounds_to_the_nearer_value_and_ties_to_the_even_code(dtype, table):
    for code, (below, above) in enumerate(pairwise(table)):
        middle = torch.tensor((below + above) / 2)
        x = torch.stack([middle.nextafter(torch.tensor(-torch.inf)), middle, middle.nextafter(torch.tensor(torch.inf))])
        expected = [below, above if code % 2 else below, above]
        assert round_to_float(x, get_format(dtype)).tolist() == expected
        assert round_to_float(-x, get_format(dtype)).tolist() == [-value for value in expected]
        inner = torch.linspace(below, above, 101)[1:-1]
        rounded = round_to_float(inner, get_format(dtype))
        assert torch.equal((rounded - inner).abs(), torch.minimum(inner - below, above - inner))


@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)], ids=str
)
def test_a_tie_of_fp4_goes_to_the_even_code(tie, even):
    assert round_to_float(torch.tensor([tie, -tie]), get_format(FP4)).tolist() == [even, -even]


@ALL
def test_every_value_of_a_format_rounds_to_itself(dtype):
    values = torch.tensor(reference.positive_values(dtype_name(dtype)))
    values = torch.cat([values, -values])
    assert values.numel() == {E4M3: 254, E5M2: 248, Float6.E2M3: 64, Float6.E3M2: 64, FP4: 16}[dtype]
    assert torch.equal(bits(round_to_float(values, get_format(dtype))), bits(values))


@ALL
def test_nan_stays_nan(dtype):
    assert round_to_float(torch.tensor([torch.nan, -torch.nan]), get_format(dtype)).isnan().all()


@ALL
def test_rounding_in_place_with_a_scratch_gives_the_same(dtype):
    fmt = get_format(dtype)
    x = within(random_float32()[:20_000], fmt)
    expected = round_to_float(x, fmt)
    work = x.clone()
    result = round_to_float(work, fmt, out=work, scratch=torch.empty_like(work))
    assert result is work
    assert torch.equal(bits(work), bits(expected))


def test_without_out_the_input_does_not_change():
    x = torch.tensor([0.3, 5.1])
    round_to_float(x, get_format(FP4))
    assert x.tolist() == torch.tensor([0.3, 5.1]).tolist()


def test_exponent_and_power_of_two_are_inverse_for_every_normal_power():
    powers = torch.arange(-126, 128, dtype=torch.int32)
    values = power_of_two(powers)
    assert values.tolist() == [2.0**power for power in range(-126, 128)]
    assert torch.equal(floor_log2(bits(values)), powers)
    assert torch.equal(floor_log2(bits(values * 1.999)), powers)
    assert floor_log2(bits(torch.tensor([0.0, 1e-40]))).tolist() == [-127, -127]
