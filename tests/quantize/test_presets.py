"""Configs of block formats: simulated on the reference target, and refused by formats without these dtypes."""

import copy

import pytest
import torch
from torch import nn

from scalepoint import export, tensorrt
from scalepoint.errors import ExportError, TargetError
from scalepoint.numerics import get_format
from scalepoint.quantize import QuantConfig, TensorQuantConfig, load, presets, quantize, save
from scalepoint.quantize.quantized_layers import QuantizedLayer
from tests.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph

MX = {"MXFP8": 448.0, "MXFP6_E2M3": 7.5, "MXFP6_E3M2": 28.0, "MXFP4": 6.0}  # the largest values
each_preset = pytest.mark.parametrize("name", presets.__all__)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def simulated(model, config):
    return quantize(model, X, config, forward_loop=[X], target="reference", freeze_weights=True)


def error(model, config):
    with torch.no_grad():
        exact = model(X)
        return float((simulated(model, config)(X) - exact).norm() / exact.norm())


@each_preset
def test_a_preset_round_trips_through_a_file(name):
    config = getattr(presets, name)
    assert QuantConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("name", MX)
def test_mx_weights_are_format_values_times_a_power_of_two_per_block(model, name):
    quantized = simulated(model, getattr(presets, name))
    layers = [module for module in quantized.modules() if isinstance(module, QuantizedLayer)]
    assert len(layers) == 2
    for layer in layers:
        scale = layer.weight_quant.scale
        assert scale.shape == (layer.weight.shape[0], layer.weight.shape[1] // 32)
        assert torch.equal(scale.log2() % 1, torch.zeros_like(scale))
        with torch.no_grad():
            codes = layer.quantize_weight(layer.weight).unflatten(1, (-1, 32)) / scale[:, :, None]
        fmt = get_format(layer.weight_quant.spec.dtype)
        assert codes.abs().max() <= MX[name] == fmt.high
        assert torch.equal(codes.to(fmt.storage).to(torch.float32), codes)
        assert codes.unique().numel() <= 2**fmt.bits


def test_more_bits_are_closer_to_the_float_model(model):
    names = [name for name in presets.__all__ if not getattr(presets, name).overrides]  # those name embeddings
    errors = {name: error(model, getattr(presets, name)) for name in names}
    assert errors["MXFP6_E2M3"] < errors["MXFP6_E3M2"] < errors["NVFP4"] < errors["MXFP4"]  # mantissa bits: 3, 2, 1
    assert errors["MXFP8"] < errors["MXFP6_E3M2"]
    assert 0 < errors["MXFP6_E2M3"] < 1.3 * errors["MXFP8"] < 0.1 < errors["MXFP4"] < 0.5


@pytest.mark.parametrize("name", ["MXFP6_E2M3", "MXFP6_E3M2"])
def test_an_fp6_model_is_copied_saved_and_loaded_bit_for_bit(model, tmp_path, name):
    quantized = simulated(model, getattr(presets, name))
    save(quantized, tmp_path / "saved")
    with torch.no_grad():
        expected = quantized(X)
        assert torch.equal(copy.deepcopy(quantized)(X), expected)
        assert torch.equal(load(tmp_path / "saved", model, X)(X), expected)


def test_tensorrt_offers_the_presets_that_it_supports():
    assert (tensorrt.MXFP8, tensorrt.NVFP4) == (presets.MXFP8, presets.NVFP4)


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_the_error_of_a_target_without_fp6_names_the_nearest_format(model, target):
    nearest = "float8_e4m3fn|float4_e2m1fn_x2" if target == "tensorrt" else "int8"
    with pytest.raises(TargetError, match=rf"{target}'.*float6_e2m3fn.*u?({nearest})"):
        quantize(model, X, presets.MXFP6_E2M3, forward_loop=[X], target=target)


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (presets.MXFP6_E2M3.weight, "float6_e2m3fn"),
        (presets.MXFP6_E3M2.weight, "float6_e3m2fn"),
        (TensorQuantConfig(n_bits=3, per_channel=True), "int3"),
    ],
    ids=["e2m3", "e3m2", "int3"],
)
def test_a_format_without_the_weight_dtype_is_refused_with_a_list(model, tmp_path, weight, name):
    quantized = simulated(model, QuantConfig(activation="float", weight=weight))
    with raises(ExportError, "0.weight", name, "int8, uint8, float8"):
        export(quantized, tmp_path / "m.onnx", X)
    assert not (tmp_path / "m.onnx").exists()


def test_a_format_without_the_activation_dtype_is_refused(model, tmp_path):
    quantized = simulated(model, QuantConfig(activation=TensorQuantConfig(n_bits=6)))
    with pytest.raises(ExportError, match="no type for int6"):
        export(quantized, tmp_path / "m.onnx", X)
