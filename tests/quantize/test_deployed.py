"""Deployed tensors of a quantized layer: nearest or chosen codes, the bias, and the cache of eval mode."""

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

from scalepoint.analysis import compare, sensitivity
from scalepoint.errors import UsageError
from scalepoint.formats import export
from scalepoint.numerics import QParams
from scalepoint.quantize import (
    QuantConfig,
    disable_fake_quant,
    enable_fake_quant,
    freeze,
    load,
    prepare_qat,
    quantize,
    save,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.verification import verify
from tests.models import with_norm_statistics

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph


class Net(nn.Module):
    """A convolution with a batch norm, one without a bias, a linear layer stored as (in, out)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, bias=False)
        self.head = nn.Parameter(torch.randn(8, 5) / 3)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        return x.mean((2, 3)) @ self.head


def batches(count=3):
    return [torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return with_norm_statistics(Net())


def quantized(model, **options):
    return quantize(model, batches()[0], forward_loop=batches(), **({"target": "onnxruntime"} | options))


def layers(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def rewrite(model):
    """Set other codes, another scale and a bias shift, as GPTQ does; return the deployed tensors."""
    for index, layer in enumerate(layers(model)):
        quant, codes = layer.weight_quant, layer.get_deployed().codes
        moves = torch.randint(-1, 2, codes.shape, generator=torch.Generator().manual_seed(index))
        chosen = (codes.int() + moves).clamp(quant.spec.quant_min, quant.spec.quant_max)
        scale = quant.broadcast_qparams(codes).scale * 1.01
        layer.set_codes(chosen, QParams(scale), bias_shift=torch.linspace(-0.1, 0.1, layer.out_channels))
    return [layer.get_deployed() for layer in layers(model)]


def run(model, x):
    with torch.no_grad():
        return model(x)


class TestChosenCodes:
    def test_eval_uses_the_chosen_codes_and_adds_the_shift(self, net):
        model = quantized(net, target=None)
        x = torch.randn(2, 8, 6, 6)
        layer = next(candidate for candidate in layers(model) if candidate.operation is model.get_submodule("second"))
        chosen = torch.randint(-100, 101, layer.weight.shape)
        shift = torch.randn(8)
        layer.set_codes(chosen, bias_shift=shift)
        scale = layer.weight_quant.scale.view(-1, 1, 1, 1)
        expected = F.conv2d(x, chosen * scale, shift)
        assert torch.allclose(run(layer, x), expected, atol=1e-5)
        assert torch.allclose(layer(x), expected, atol=1e-5)  # with gradients, without the cache

    def test_the_float_model_does_not_change(self, net):
        model, x = quantized(net), batches()[0]
        before = {name: value.clone() for name, value in model.named_parameters()}
        disable_fake_quant(model)
        plain = run(model, x)
        enable_fake_quant(model)
        rewrite(model)
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
        assert not torch.equal(run(model, x), plain)
        disable_fake_quant(model)
        assert torch.equal(run(model, x), plain)

    def test_compare_and_sensitivity_include_the_error_of_chosen_codes(self, net):
        model = quantized(net)
        near = {row.name: row.weight_sqnr_db for row in compare(net, model, batches(), progress=False).rows}
        calm = {row.name: row.score for row in sensitivity(model, batches(), progress=False)}
        rewrite(model)
        compared = compare(net, model, batches(), progress=False)
        assert compared.graph_sqnr_db > 100  # the float side is still the float model
        for row in compared.rows:
            if row.weight_sqnr_db is not None:
                assert row.weight_sqnr_db < near[row.name] - 3
        shaken = {row.name: row.score for row in sensitivity(model, batches(), progress=False)}
        assert all(shaken[name] > 2 * score for name, score in calm.items())

    def test_exported_files_contain_and_run_the_chosen_codes(self, net, tmp_path):
        model, x = quantized(net), batches()[1]
        export(model, tmp_path / "near.onnx", x, float_path=tmp_path / "before.onnx")
        deployed = rewrite(model)
        export(model, tmp_path / "model.onnx", x, float_path=tmp_path / "float.onnx")
        assert (tmp_path / "float.onnx").read_bytes() == (tmp_path / "before.onnx").read_bytes()
        initializers = [
            numpy_helper.to_array(initializer) for initializer in onnx.load(tmp_path / "model.onnx").graph.initializer
        ]
        for tensors in deployed:
            codes = tensors.codes.transpose(0, 1) if tensors.codes.ndim == 2 else tensors.codes
            assert any(np.array_equal(array, codes.numpy()) for array in initializers)
            assert any(
                np.array_equal(array, tensors.bias.int().numpy()) and array.dtype == np.int32 for array in initializers
            )
        verification = verify(tmp_path / "model.onnx", model, x)
        verification.check()
        assert verification.sqnr > 40
        other = verify(tmp_path / "near.onnx", model, x)
        assert other.sqnr < verification.sqnr - 10  # the file with the nearest codes computes something else

    def test_a_plain_onnx_export_contains_the_chosen_codes(self, net, tmp_path):
        model, x = quantized(net, target=None), batches()[1]
        rewrite(model)
        torch.onnx.export(model, (x,), tmp_path / "plain.onnx", verbose=False, external_data=False)
        assert verify(tmp_path / "plain.onnx", model, x).sqnr > 40

    def test_chosen_codes_are_saved_and_loaded_bit_equal(self, net, tmp_path):
        model, x = quantized(net), batches()[1]
        deployed = rewrite(model)
        save(model, tmp_path / "saved")
        loaded = load(tmp_path / "saved", net, x)
        assert torch.equal(run(loaded, x), run(model, x))
        for one, other in zip(deployed, [layer.get_deployed() for layer in layers(loaded)], strict=True):
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.bias, other.bias)

    def test_loading_a_state_without_chosen_codes_removes_them(self, net):
        model, x = quantized(net), batches()[1]
        expected, state = run(model, x), copy.deepcopy(model.state_dict())
        rewrite(model)
        model.load_state_dict(state)
        assert torch.equal(run(model, x), expected)

    def test_freezing_again_keeps_chosen_codes_and_prepare_qat_removes_them(self, net):
        model = quantized(net)
        deployed = rewrite(model)
        freeze(model)
        assert all(
            torch.equal(one.codes, layer.get_deployed().codes)
            for one, layer in zip(deployed, layers(model), strict=True)
        )
        prepare_qat(model)
        assert all(layer.weight_quant.chosen is None for layer in layers(model))

    def test_four_bits_in_blocks_can_be_chosen(self, tmp_path):
        torch.manual_seed(0)
        model = quantize(
            nn.Sequential(nn.Linear(64, 32)),
            torch.randn(2, 64),
            QuantConfig.weight_only("int4", block_size=32),
            target="onnxruntime",
        )
        layer = layers(model)[0]
        codes = torch.randint(-8, 8, (32, 64))
        layer.set_codes(codes)
        values = (codes.view(32, 2, 32) * layer.weight_quant.scale.unsqueeze(-1)).view(32, 64)
        x = torch.randn(3, 64)
        assert torch.allclose(run(model, x), F.linear(x, values, layer.bias), atol=1e-5)
        export(model, tmp_path / "model.onnx", x)
        assert verify(tmp_path / "model.onnx", model, x).sqnr > 30

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda codes: codes[:1], "shape"),
            (lambda codes: codes + 1000, "-127 to 127"),
            (lambda codes: codes + 0.5, "must be integers"),
            (lambda codes: codes.fill_(float("nan")), "codes must be from"),
        ],
        ids=["shape", "range", "fraction", "nan"],
    )
    def test_invalid_codes_are_refused(self, net, change, message):
        layer = layers(quantized(net))[0]
        before = layer.get_deployed().codes.clone()
        with pytest.raises(UsageError, match=message):
            layer.set_codes(change(before.float() * 0.5 // 1))
        assert torch.equal(layer.get_deployed().codes, before)

    def test_a_shift_must_have_one_value_per_channel(self, net):
        with pytest.raises(UsageError, match="8 output channels"):
            layers(quantized(net))[0].set_bias_shift(torch.zeros(3))


class Twice(nn.Module):
    """One weight, read in two places with very different inputs."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 8)
        with torch.no_grad():
            self.shared.weight[0] = 1e-7 * torch.randn(8)
            self.shared.bias[0] = 900.0

    def forward(self, x):
        return self.shared(x) + F.linear(x * 1000.0, self.shared.weight, self.shared.bias)


class TestFreezing:
    def test_a_weight_with_two_readers_fits_the_bias_of_both(self, tmp_path):
        torch.manual_seed(0)
        net, x = Twice().eval(), torch.randn(4, 8)
        model = quantize(net, x, forward_loop=[x], target="onnxruntime")
        assert len({id(layer.weight_quant) for layer in layers(model)}) < len(layers(model)) == 2
        for layer in layers(model):
            assert layer.get_deployed().bias.abs().max() < 2**31
        export(model, tmp_path / "model.onnx", x)
        verify(tmp_path / "model.onnx", model, x).check()


class TestWhatEvalKeeps:
    def test_switching_the_mode_updates_the_cache_after_writes_through_data(self, net):
        model, x = quantized(net), batches()[0]
        before = run(model, x)
        second = model.get_submodule("second")
        second.weight.data.mul_(0.5)
        model.train()
        model.eval()
        assert not torch.equal(run(model, x), before)

    def test_the_cache_works_in_inference_mode(self, net):
        model, x = quantized(net), batches()[0]
        layer = layers(model)[0]
        with torch.inference_mode():
            first = model(x)
            cache = layer._weight_cache
            assert torch.equal(model(x), first)
            assert layer._weight_cache is cache
        assert cache is not None
        assert torch.equal(run(model, x), first)
        assert layer._weight_cache is cache
        with torch.no_grad():
            layer.operation.weight.mul_(2)
        with torch.inference_mode():
            assert not torch.equal(model(x), first)

    def test_a_model_created_in_inference_mode_runs(self):
        with torch.inference_mode():
            torch.manual_seed(0)
            model = quantized(with_norm_statistics(Net()))
            first = model(batches()[0])
            assert torch.equal(model(batches()[0]), first)
