"""Signed scales compared with llama.cpp's rounding in the gguf package."""

import pytest
import torch
from torch.distributions import Laplace, Normal, StudentT

from scalepoint.errors import SpecError
from scalepoint.spec import PerBlockGranularity, QuantizationComponentFactory, QuantizationSpec

quants = pytest.importorskip("gguf.quants")
FIELDS = {"granularity": PerBlockGranularity(axis=1, block_size=32), "qparam_calculator_cls": "signed_scale"}


def rounded(weight, dtype="int4"):
    quantizer = QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(dtype=dtype, **FIELDS), "weight")
    return quantizer(weight), quantizer.qparams_calculator.scale


def rounded_by_llama_cpp(weight, kind):
    blocks = kind.quantize_blocks(weight.numpy().reshape(-1, 32).copy())
    return torch.from_numpy(kind.dequantize_blocks(blocks)).view_as(weight)


@pytest.mark.parametrize(("dtype", "kind"), [("int4", "Q4_0"), ("int5", "Q5_0")])
@pytest.mark.parametrize(
    "distribution", [Normal(0.0, 0.02), Laplace(0.0, 0.02), StudentT(4.0)], ids=["normal", "laplace", "student"]
)
def test_no_block_has_a_larger_error_than_in_llama_cpp(distribution, dtype, kind):
    torch.manual_seed(0)
    weight = distribution.sample((64, 576)) * torch.linspace(0.1, 3.0, 576)
    if dtype == "int5":
        weight[0] = 0
    theirs = rounded_by_llama_cpp(weight, getattr(quants, kind))
    ours, _ = extended(weight, dtype) if dtype == "int5" else rounded(weight, dtype)
    our_error, their_error = ((rounded - weight).square().view(-1, 32).sum(1) for rounded in (ours, theirs))
    assert (our_error <= their_error * 1.01 + 1e-12).all()  # theirs has scales in float16, ours not yet
    assert our_error.sum() <= their_error.sum()


def extended(weight, dtype):
    from scalepoint.spec import ExtendedQuantizationSpec  # int5 is not in the base spec

    spec = ExtendedQuantizationSpec(dtype=dtype, **FIELDS)
    quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    return quantizer(weight), quantizer.qparams_calculator.scale


def test_the_sign_of_a_scale_gives_the_extra_code_to_the_largest_weight():
    weight = torch.zeros(2, 32)
    weight[0, 3], weight[0, 4], weight[1, 3], weight[1, 4] = 8.0, -7.0, -8.0, 7.0
    values, scale = rounded(weight)
    assert torch.equal(values, weight)
    assert scale.flatten().tolist() == [-1.0, 1.0]


def test_zeros_stay_zero_and_the_smallest_numbers_stay_finite():
    weight = torch.zeros(3, 32)
    weight[1] = 1e-40
    weight[2, 0] = -1e-30
    values, scale = rounded(weight)
    assert torch.isfinite(values).all()
    assert torch.isfinite(1 / scale).all()
    assert (values[0] == 0).all()


@pytest.mark.parametrize(
    "fields", [{"dtype": "uint4"}, {"qscheme": "asymmetric"}, {"dtype": "float8_e4m3fn"}, {"qformulation": "minval"}]
)
def test_only_signed_integers_have_signed_scales(fields):
    spec = QuantizationSpec(**{"dtype": "int4", "qparam_calculator_cls": "signed_scale", **fields})
    with pytest.raises(SpecError, match="signed integers"):
        QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
