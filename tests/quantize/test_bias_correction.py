"""Bias correction keeps the mean output of every layer at its float value."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint import transform
from scalepoint.errors import UsageError
from scalepoint.quantize import (
    QuantConfig,
    QuantStub,
    WeightFakeQuantize,
    calibrate,
    insert_qdq,
    load,
    prepare_qat,
    quantize,
    save,
)
from scalepoint.quantize.bias_correction import BiasCorrection
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.targets import onnxruntime_target
from scalepoint.tuning import tune

TARGET = onnxruntime_target("avx2")
CORRECTED, PLAIN = QuantConfig(correct_bias=True), QuantConfig(correct_bias=False)


class Net(nn.Module):
    """Padded, strided, grouped and depthwise convolutions, with batch norms and without, and linear layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=4)
        self.one, self.two = nn.Linear(32, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.grouped(torch.relu(self.depthwise(x))))
        return self.two(torch.relu(self.one(x.mean((2, 3)))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def data():
    return [torch.rand(4, 3, 17, 17, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def layers_of(quantized):
    return {layer.weight_quant.name: layer for layer in quantized.modules() if isinstance(layer, QuantizedLayer)}


def switch_off(quantized):
    for module in quantized.modules():
        if isinstance(module, QuantStub | WeightFakeQuantize):
            module.enabled = False


def distance(model, quantized, data):
    x = torch.cat(data)
    with torch.no_grad():
        return float((model(x) - quantized(x)).square().mean() / model(x).square().mean())


def means_of_errors(quantized, data):
    """Yield each layer with the mean error of its outputs that rounding its weight causes."""
    inputs_by_layer = {}
    for name, layer in layers_of(quantized).items():
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: inputs_by_layer.setdefault(name, []).append(inputs[0])
        )
    switch_off(quantized)
    with torch.no_grad():
        for batch in data:
            quantized(batch)
        for name, layer in layers_of(quantized).items():
            weight, _ = layer.fold_norm()
            values = layer.from_output_first(
                layer.weight_quant.values(layer.weight_quant.codes(layer.to_output_first(weight)))
            )
            run = nn.functional.linear if layer.kind == "linear" else layer.operation._conv_forward
            error = run(torch.cat(inputs_by_layer[name]), weight - values, None)
            yield layer, (error if layer.kind == "linear" else error.flatten(2).mean(2)).mean(0)


def test_the_mean_rounding_error_of_each_layer_is_subtracted(model, data):
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    errors = list(means_of_errors(quantized, data))
    assert len(errors) == 5
    for layer, mean in errors:
        remaining = (layer.bias_shift - mean).square().mean() / mean.square().mean()
        assert remaining < (
            1e-6 if layer.kind == "linear" else 0.05
        )  # the correction assumes equal means at all positions


def test_corrected_outputs_are_closer_to_float(model, data):
    plain, corrected = (
        quantize(model, data[0], config, forward_loop=data, target=TARGET, progress=False) for config in (PLAIN, None)
    )
    assert distance(model, corrected, data) < 0.7 * distance(model, plain, data)
    assert all(layer.bias_shift is None for layer in layers_of(plain).values())


def test_calibrate_corrects_biases_unless_the_config_or_the_call_disables_it(model, data):
    result = transform(model, data[0], target=TARGET)

    def shifted(config, **options):
        quantized = insert_qdq(result.model, result.matches, config)
        calibrate(quantized, data, progress=False, **options)
        return [layer.bias_shift is not None for layer in layers_of(quantized).values()]

    assert all(shifted(None, freeze_weights=True))
    assert not any(shifted(PLAIN, freeze_weights=True))
    assert not any(shifted(None, freeze_weights=True, correct_bias=False))
    assert all(shifted(PLAIN, freeze_weights=True, correct_bias=True))
    assert not any(shifted(None))
    assert all(shifted(CORRECTED, freeze_weights=True))
    assert not any(shifted(CORRECTED, freeze_weights=True, correct_bias=False))
    assert all(shifted(None, freeze_weights=True, correct_bias=True))
    assert not any(shifted(CORRECTED))  # the rounding error of unfrozen weights can still change


def test_calibrating_again_with_correct_bias_false_removes_the_shift(model, data):
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    plainly = quantize(model, data[0], PLAIN, forward_loop=data, target=TARGET, progress=False)
    calibrate(quantized, data, freeze_weights=True, correct_bias=False, progress=False)
    assert [layer.bias_shift for layer in layers_of(quantized).values()] == [None] * 5
    with torch.no_grad():
        assert torch.equal(quantized(data[0]), plainly(data[0]))


def test_a_layer_without_bias_is_not_corrected_and_disabled_quantizers_give_the_float_model(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)).eval()
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    assert [layer.bias_shift is None for layer in layers_of(quantized).values()] == [False, True]
    switch_off(quantized)
    with torch.no_grad():
        torch.testing.assert_close(quantized(data[0]), model(data[0]), rtol=1e-5, atol=1e-6)


def test_calibrating_twice_gives_the_same_shift(model, data):
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    once = {name: layer.bias_shift.clone() for name, layer in layers_of(quantized).items()}
    calibrate(quantized, data, freeze_weights=True, progress=False)
    assert all(torch.equal(layer.bias_shift, once[name]) for name, layer in layers_of(quantized).items())


def test_images_of_different_sizes_are_supported(model, data):
    mixed = [*data, torch.rand(2, 3, 25, 25)]
    quantized = quantize(model, data[0], CORRECTED, forward_loop=mixed, target=TARGET, progress=False)
    assert all(torch.isfinite(layer.bias_shift).all() for layer in layers_of(quantized).values())


def test_the_shift_survives_save_and_load(model, data, tmp_path):
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    save(quantized, tmp_path / "m")
    loaded = load(tmp_path / "m", model, data[0], target=TARGET)
    with torch.no_grad():
        assert torch.equal(loaded(data[0]), quantized(data[0]))


def test_hooks_are_removed_also_when_the_data_raises(model, data):
    result = transform(model, data[0], target=TARGET)
    quantized = insert_qdq(result.model, result.matches, CORRECTED)

    def broken(_):
        raise KeyError("no more")

    with pytest.raises(KeyError):
        calibrate(quantized, broken, freeze_weights=True, progress=False)
    assert not any(layer._forward_pre_hooks for layer in layers_of(quantized).values())
    assert len(BiasCorrection(quantized).layers) == 5


def test_data_that_raises_leaves_earlier_shifts_unchanged(model, data):
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    before = {name: layer.bias_shift for name, layer in layers_of(quantized).items()}

    def broken(run):
        run(data[0])
        raise KeyError("no more")

    with pytest.raises(KeyError):
        calibrate(quantized, broken, freeze_weights=True, progress=False)
    assert all(torch.equal(layer.bias_shift, before[name]) for name, layer in layers_of(quantized).items())


@pytest.mark.filterwarnings("ignore::scalepoint.errors.ScalepointWarning")  # capture fixes the length of a vector
def test_inputs_can_be_vectors():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 8)).eval(), [torch.rand(16) for _ in range(4)]
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    (layer,) = layers_of(quantized).values()
    with torch.no_grad():
        values = layer.weight_quant.values(layer.get_deployed().codes)
        expected = nn.functional.linear(torch.stack(data).mean(0), layer.weight - values)
    torch.testing.assert_close(layer.bias_shift, expected, rtol=1e-4, atol=1e-6)


def test_correct_bias_without_frozen_weights_is_refused(model, data):
    quantized = quantize(model, data[0], forward_loop=data, target=TARGET, freeze_weights=False, progress=False)
    with pytest.raises(UsageError, match="freeze_weights=True"):
        calibrate(quantized, data, correct_bias=True, progress=False)


def test_prepare_qat_removes_the_shift_of_layers_with_batch_norm(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    quantized = quantize(model, data[0], CORRECTED, forward_loop=data, target=TARGET, progress=False)
    prepare_qat(quantized)
    normed, plain = layers_of(quantized).values()
    assert normed.bias_shift is None
    assert plain.bias_shift is not None  # the same in train and eval mode


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quantize_and_deploy_give_the_same_weights_for_the_same_config(model, data, tmp_path):
    config = QuantConfig(speed_first=False)
    target = onnxruntime_target("avx2")
    done = scalepoint.deploy(
        model, data[0], data, output=tmp_path, config=config, target=target, smoke=True, progress=False
    )
    quantized = quantize(model, data[0], config, forward_loop=data[:2], target=target, progress=False)
    deployed, alone = layers_of(done.model), layers_of(quantized)
    assert deployed.keys() == alone.keys()
    for name, layer in alone.items():
        codes, bias, _ = layer.get_deployed()
        assert torch.equal(codes, deployed[name].get_deployed()[0])
        assert torch.equal(bias, deployed[name].get_deployed()[1])
    with torch.no_grad():
        assert torch.equal(quantized(data[2]), done.model(data[2]))


def test_tuning_starts_without_the_correction_of_calibration(model, data):
    plain, corrected = (
        quantize(model, data[0], config, forward_loop=data, target=TARGET, progress=False) for config in (PLAIN, None)
    )
    reports = [tune(model, data, {"steps": ("intercept", "gptq")}, progress=False) for model in (plain, corrected)]
    for expected, row in zip(reports[0].layers, reports[1].layers, strict=True):
        assert (row.before, row.after) == (expected.before, expected.after)
    with torch.no_grad():
        assert torch.equal(plain(data[0]), corrected(data[0]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("config", "expected"),
    [(QuantConfig(speed_first=False), True), (QuantConfig(speed_first=False, correct_bias=False), False)],
    ids=["unsaid", "said"],
)
def test_deploy_corrects_biases_unless_the_config_disables_it(model, data, tmp_path, config, expected):
    done = scalepoint.deploy(model, data[0], data, output=tmp_path, config=config, smoke=True, progress=False)
    layers = layers_of(done.model).values()
    assert {layer.bias_shift is not None for layer in layers if layer.fold_norm()[1] is not None} == {expected}
    assert done.verification.holds
