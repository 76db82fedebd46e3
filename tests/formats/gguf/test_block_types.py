"""Block types: the gguf package reads back the values that were packed, bit by bit."""

import pytest
import torch

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.gguf import GGUF
from scalepoint.formats.gguf.block_types import (
    BLOCK_TYPES,
    choose_block_type,
    pack_weight,
    plan_block_type,
    round_to_block_type,
)
from tests.errors import raises
from tests.formats.gguf.checkpoints import block_spec, round_to_nearest

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')

MINVAL = {"qscheme": "asymmetric", "qformulation": "minval"}
ZERO = {"qscheme": "asymmetric"}
CASES = {
    "int8": ("Q8_0", block_spec("int8", 32), 32, 96),
    "int8 in blocks of 64": ("Q8_0", block_spec("int8", 64), 64, 128),
    "int8 per channel": ("Q8_0", block_spec("int8", 96), 96, 96),
    "int7": ("Q8_0", block_spec("int7", 32), 32, 96),
    "int6": ("Q6_K", block_spec("int6", 16), 16, 512),
    "int6 where super-blocks do not fit": ("Q8_0", block_spec("int6", 32), 32, 96),
    "int5": ("Q5_0", block_spec("int5", 32), 32, 96),
    "int4": ("Q4_0", block_spec("int4", 32), 32, 96),
    "int4 in blocks of 128": ("Q4_0", block_spec("int4", 128), 128, 256),
    "int3": ("Q3_K", block_spec("int3", 16), 16, 512),
    "int3 in blocks of 64": ("Q3_K", block_spec("int3", 64), 64, 512),
    "int3 per channel": ("Q3_K", block_spec("int3", 512), 512, 512),
    "int3 where super-blocks do not fit": ("Q4_0", block_spec("int3", 32), 32, 96),
    "int2": ("Q2_K", block_spec("int2", 16), 16, 512),
    "uint5 with minima": ("Q5_K", block_spec("uint5", 32, **MINVAL), 32, 512),
    "uint5 with minima, short": ("Q5_1", block_spec("uint5", 32, **MINVAL), 32, 96),
    "uint5 with zero points": ("Q5_1", block_spec("uint5", 32, **ZERO), 32, 96),
    "uint4 with minima": ("Q4_K", block_spec("uint4", 32, **MINVAL), 32, 512),
    "uint4 with minima in blocks of 128": ("Q4_K", block_spec("uint4", 128, **MINVAL), 128, 512),
    "uint4 with minima, short": ("Q4_1", block_spec("uint4", 32, **MINVAL), 32, 96),
    "uint4 with zero points": ("Q4_1", block_spec("uint4", 32, **ZERO), 32, 96),
    "uint3 with minima": ("Q4_K", block_spec("uint3", 32, **MINVAL), 32, 512),
    "uint2 with minima": ("Q2_K", block_spec("uint2", 16, **MINVAL), 16, 512),
    "int4 with minima": ("Q4_K", block_spec("int4", 32, **MINVAL), 32, 512),
}


def read_back(weight, block_type):
    """Pack a weight and dequantize it with the gguf package."""
    data = pack_weight(weight, block_type)
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[block_type.name]))


@pytest.mark.parametrize("case", CASES)
def test_packed_weights_are_read_back_unchanged(case):
    name, spec, block_size, columns = CASES[case]
    values = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)) * 0.05
    weight = round_to_nearest(values, spec, block_size)
    block_type = choose_block_type({"w": weight}, ["w"])
    assert block_type.name == name == plan_block_type(spec, columns, block_size).name
    assert torch.equal(read_back(weight, block_type), weight.dequantize())


@pytest.mark.parametrize("case", CASES)
def test_the_lowest_and_highest_codes_are_stored_too(case):
    _, spec, block_size, columns = CASES[case]
    values = torch.randn(4, columns, generator=torch.Generator().manual_seed(1))
    rounded = round_to_nearest(values, spec, block_size)
    low, high = rounded.spec.quant_min, rounded.spec.quant_max
    assert torch.iinfo(rounded.codes.dtype).min <= low
    codes = rounded.codes.clone()
    codes[:, ::2], codes[:, 1::2] = int(low), int(high)
    weight = QuantizedWeight(codes, rounded.scale, spec, rounded.zero_point, minval=rounded.minval)
    assert torch.equal(read_back(weight, choose_block_type({"w": weight}, ["w"])), weight.dequantize())


@pytest.mark.parametrize("case", CASES)
def test_rows_of_zeros_are_stored(case):
    _, spec, block_size, columns = CASES[case]
    values = torch.zeros(4, columns)
    values[1, 0] = 1e-9
    weight = round_to_nearest(values, spec, block_size)
    dequantized = weight.dequantize()
    if torch.isfinite(dequantized).all():
        assert torch.equal(read_back(weight, choose_block_type({"w": weight}, ["w"])), dequantized)


def test_rounding_scales_changes_them_little_and_is_idempotent():
    spec = block_spec("uint4", 32, **MINVAL)
    scale = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.005
    rounded, minval = round_to_block_type(spec, 512, scale, -8 * scale)
    assert ((rounded - scale).abs() / scale).max() < 0.5 / 63 * 3 + 1e-3
    rounded_twice, minval_twice = round_to_block_type(spec, 512, rounded, minval)
    assert torch.equal(rounded_twice, rounded)
    assert torch.equal(minval_twice, minval)


def test_the_format_rounds_scales_by_spec_and_shape():
    scale = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    assert torch.equal(GGUF.round_scales(block_spec("int4", 32), 512, scale), scale.half().float())
    assert torch.equal(
        GGUF.round_scales(block_spec("int3", 32), 512, scale),
        round_to_block_type(block_spec("int3", 32), 512, scale)[0],
    )
    rounded = GGUF.round_scales(block_spec("uint4", 32, **ZERO), 512, scale)
    assert torch.equal((rounded * 15).half().float(), rounded * 15)
    # No type stores blocks of 8.
    assert torch.equal(GGUF.round_scales(block_spec("int4", 8), 128, scale), scale.half().float())


def test_a_weight_whose_scales_are_not_rounded_gets_a_wider_type_or_none():
    codes = torch.randint(-4, 4, (4, 512), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = (torch.rand(4, 16) + 0.5).half().float()
    weight = QuantizedWeight(codes, scale, block_spec("int3", 32))
    assert choose_block_type({"w": weight}, ["w"]).name == "Q4_0"
    assert torch.equal(read_back(weight, choose_block_type({"w": weight}, ["w"])), weight.dequantize())
    with raises(ExportError, "proj", "torch.int3", "blocks of 32"):
        choose_block_type({"proj": QuantizedWeight(codes, scale + 1e-6, block_spec("int3", 32))}, ["proj"])


def test_a_weight_gets_a_wider_type_if_scale_times_zero_point_is_not_a_float16():
    spec = block_spec("uint4", 32, **ZERO)
    codes = torch.randint(0, 16, (2, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scale = torch.full((2, 2), 2047 / 2048)
    weight = QuantizedWeight(codes, scale, spec, torch.full((2, 2), 7, dtype=torch.int32))
    block_type = choose_block_type({"w": weight}, ["w"])
    assert block_type.name == "Q5_0"
    assert torch.equal(read_back(weight, block_type), weight.dequantize())


def test_experts_of_a_layer_get_the_type_that_stores_all_of_them():
    spec = block_spec("int3", 32)
    codes = torch.zeros(4, 512, dtype=torch.int8)
    narrow = QuantizedWeight(codes, torch.full((4, 16), 0.5), spec)
    wide = QuantizedWeight(codes, (torch.rand(4, 16) + 0.5).half().float(), spec)
    weights = {"narrow": narrow, "wide": wide}
    for names, expected in ((("narrow",), "Q3_K"), (("narrow", "wide"), "Q4_0"), (("wide", "narrow"), "Q4_0")):
        assert choose_block_type(weights, names).name == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spec": block_spec("float8_e4m3fn", 32)}, "integer codes.*float8_e4m3fn"),
        ({"activation": block_spec("int8", 32)}, "GGUF cannot store quantized activations"),
        (
            {"codes": torch.zeros(2, 48, dtype=torch.int8), "scale": torch.ones(2, 3)},
            "multiple of 32",
        ),
        ({"codes": torch.zeros(2, 64, dtype=torch.int8), "scale": torch.ones(2, 8)}, "16 or 32"),
    ],
)
def test_weights_that_no_block_type_stores_are_rejected(fields, message):
    valid = {"codes": torch.zeros(2, 64, dtype=torch.int8), "scale": torch.ones(2, 2), "spec": block_spec("int4", 32)}
    with pytest.raises(ExportError, match=message):
        choose_block_type({"w": QuantizedWeight(**(valid | fields))}, ["w"])


def test_the_table_is_sorted_by_bits_per_value():
    blocks = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type.name]] for block_type in BLOCK_TYPES]
    bits_per_value = [block_bytes * 8 / columns for columns, block_bytes in blocks]
    assert bits_per_value == sorted(bits_per_value)
    assert [columns for columns, _ in blocks] == [block_type.columns for block_type in BLOCK_TYPES]
