"""Block types: what they hold is read back bit by bit by the gguf package."""

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
from tests.formats.gguf.checkpoints import nearest, spec_of

gguf = pytest.importorskip("gguf", reason='needs the package gguf: pip install "scalepoint[gguf]"')

MINVAL = {"qscheme": "asymmetric", "qformulation": "minval"}
ZERO = {"qscheme": "asymmetric"}
CASES = {
    "int8": ("Q8_0", spec_of("int8", 32), 32, 96),
    "int8 in blocks of 64": ("Q8_0", spec_of("int8", 64), 64, 128),
    "int8 a channel": ("Q8_0", spec_of("int8", 96), 96, 96),
    "int7": ("Q8_0", spec_of("int7", 32), 32, 96),
    "int6": ("Q6_K", spec_of("int6", 16), 16, 512),
    "int6 where super-blocks do not fit": ("Q8_0", spec_of("int6", 32), 32, 96),
    "int5": ("Q5_0", spec_of("int5", 32), 32, 96),
    "int4": ("Q4_0", spec_of("int4", 32), 32, 96),
    "int4 in blocks of 128": ("Q4_0", spec_of("int4", 128), 128, 256),
    "int3": ("Q3_K", spec_of("int3", 16), 16, 512),
    "int3 in blocks of 64": ("Q3_K", spec_of("int3", 64), 64, 512),
    "int3 a channel": ("Q3_K", spec_of("int3", 512), 512, 512),
    "int3 where super-blocks do not fit": ("Q4_0", spec_of("int3", 32), 32, 96),
    "int2": ("Q2_K", spec_of("int2", 16), 16, 512),
    "uint5 with least values": ("Q5_K", spec_of("uint5", 32, **MINVAL), 32, 512),
    "uint5 with least values, short": ("Q5_1", spec_of("uint5", 32, **MINVAL), 32, 96),
    "uint5 with zero points": ("Q5_1", spec_of("uint5", 32, **ZERO), 32, 96),
    "uint4 with least values": ("Q4_K", spec_of("uint4", 32, **MINVAL), 32, 512),
    "uint4 with least values in blocks of 128": ("Q4_K", spec_of("uint4", 128, **MINVAL), 128, 512),
    "uint4 with least values, short": ("Q4_1", spec_of("uint4", 32, **MINVAL), 32, 96),
    "uint4 with zero points": ("Q4_1", spec_of("uint4", 32, **ZERO), 32, 96),
    "uint3 with least values": ("Q4_K", spec_of("uint3", 32, **MINVAL), 32, 512),
    "uint2 with least values": ("Q2_K", spec_of("uint2", 16, **MINVAL), 16, 512),
    "int4 with least values": ("Q4_K", spec_of("int4", 32, **MINVAL), 32, 512),
}


def read_back(packed, kind):
    data = pack_weight(packed, kind)
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name]))


@pytest.mark.parametrize("case", CASES)
def test_what_is_packed_is_what_is_read(case):
    name, spec, block, columns = CASES[case]
    weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)) * 0.05
    packed = nearest(weight, spec, block)
    kind = choose_block_type([packed], "w")
    assert kind.name == name == plan_block_type(spec, columns, block).name
    assert torch.equal(read_back(packed, kind), packed.dequantize())


@pytest.mark.parametrize("case", CASES)
def test_the_extreme_codes_are_held_too(case):
    _, spec, block, columns = CASES[case]
    packed = nearest(torch.randn(4, columns, generator=torch.Generator().manual_seed(1)), spec, block)
    row = torch.iinfo(packed.codes.dtype)
    edge = packed.codes.clone()
    low, high = packed.spec.quant_min, packed.spec.quant_max
    edge[:, ::2], edge[:, 1::2] = int(low), int(high)
    assert row.min <= low
    packed = QuantizedWeight(edge, packed.scale, spec, packed.zero_point, minval=packed.minval)
    assert torch.equal(read_back(packed, choose_block_type([packed], "w")), packed.dequantize())


@pytest.mark.parametrize("case", CASES)
def test_rows_of_nothing_but_zero_are_held(case):
    _, spec, block, columns = CASES[case]
    weight = torch.zeros(4, columns)
    weight[1, 0] = 1e-9
    packed = nearest(weight, spec, block)
    values = packed.dequantize()
    if torch.isfinite(values).all():
        assert torch.equal(read_back(packed, choose_block_type([packed], "w")), values)


def test_snapping_moves_scales_little_and_is_done_once():
    spec = spec_of("uint4", 32, **MINVAL)
    scale = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.005
    found, minval = round_to_block_type(spec, 512, scale, -8 * scale)
    assert ((found - scale).abs() / scale).max() < 0.5 / 63 * 3 + 1e-3
    again, least = round_to_block_type(spec, 512, found, minval)
    assert torch.equal(again, found)
    assert torch.equal(least, minval)


def test_a_format_moves_scales_by_spec_and_shape():
    scale = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    assert torch.equal(GGUF.round_scales(spec_of("int4", 32), 512, scale), scale.half().float())
    assert torch.equal(
        GGUF.round_scales(spec_of("int3", 32), 512, scale), round_to_block_type(spec_of("int3", 32), 512, scale)[0]
    )
    few = GGUF.round_scales(spec_of("uint4", 32, **ZERO), 512, scale)
    assert torch.equal((few * 15).half().float(), few * 15)
    assert torch.equal(
        GGUF.round_scales(spec_of("int4", 8), 128, scale), scale.half().float()
    )  # no type holds blocks of 8


def test_scales_that_are_not_snapped_take_a_wider_type_or_none():
    codes = torch.randint(-4, 4, (4, 512), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = (torch.rand(4, 16) + 0.5).half().float()
    packed = QuantizedWeight(codes, scale, spec_of("int3", 32))
    assert choose_block_type([packed], "w").name == "Q4_0"
    assert torch.equal(read_back(packed, choose_block_type([packed], "w")), packed.dequantize())
    with raises(ExportError, "proj", "torch.int3", "blocks of 32"):
        choose_block_type([QuantizedWeight(codes, scale + 1e-6, spec_of("int3", 32))], "proj")


def test_a_zero_point_whose_product_is_no_float16_takes_a_bit_more():
    spec = spec_of("uint4", 32, **ZERO)
    codes = torch.randint(0, 16, (2, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scale = torch.full((2, 2), 2047 / 2048)
    packed = QuantizedWeight(codes, scale, spec, torch.full((2, 2), 7, dtype=torch.int32))
    kind = choose_block_type([packed], "w")
    assert kind.name == "Q5_0"
    assert torch.equal(read_back(packed, kind), packed.dequantize())


def test_experts_of_a_layer_share_the_type_that_holds_all():
    spec = spec_of("int3", 32)
    codes = torch.zeros(4, 512, dtype=torch.int8)
    snug = QuantizedWeight(codes, torch.full((4, 16), 0.5), spec)
    wide = QuantizedWeight(codes, (torch.rand(4, 16) + 0.5).half().float(), spec)
    assert choose_block_type([snug], "w").name == "Q3_K"
    assert choose_block_type([snug, wide], "w").name == "Q4_0"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"spec": spec_of("float8_e4m3fn", 32)}, "integer codes.*float8_e4m3fn"),
        ({"activation": spec_of("int8", 32)}, "GGUF holds weights alone"),
        (
            {"codes": torch.zeros(2, 48, dtype=torch.int8), "scale": torch.ones(2, 3)},
            "multiple of 32",
        ),
        ({"codes": torch.zeros(2, 64, dtype=torch.int8), "scale": torch.ones(2, 8)}, "16 or 32"),
    ],
)
def test_what_no_block_holds_is_refused(fields, says):
    given = {"codes": torch.zeros(2, 64, dtype=torch.int8), "scale": torch.ones(2, 2), "spec": spec_of("int4", 32)}
    with pytest.raises(ExportError, match=says):
        choose_block_type([QuantizedWeight(**(given | fields))], "w")


def test_the_table_grows_by_bits():
    bits = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] for kind in BLOCK_TYPES]
    sizes = [size * 8 / block for block, size in bits]
    assert sizes == sorted(sizes)
    assert [block for block, _ in bits] == [kind.columns for kind in BLOCK_TYPES]
