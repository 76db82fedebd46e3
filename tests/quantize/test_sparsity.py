"""Sparse weights: configured, masked, then quantized; tuning, training, saving and export keep the mask."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ConfigError
from scalepoint.quantize import QATSchedule, QuantConfig, TensorQuantConfig, load, prepare_qat, save
from scalepoint.quantize.quantize_model import quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.record import coverage
from scalepoint.spec import Sparsity
from scalepoint.tuning import TuneConfig
from tests.errors import raises


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 12),
    ).eval()  # fmt: skip


def pruned(sparsity, data=None, *, freeze=True) -> torch.fx.GraphModule:
    data = [torch.randn(8, 3, 12, 12)] if data is None else data
    config = QuantConfig(weight=TensorQuantConfig(per_channel=True, sparsity=sparsity), correct_bias=False)
    return quantize(
        net(), data[0], config, forward_loop=data, target="onnxruntime", freeze_weights=freeze, progress=False
    ).eval()


def layers(model) -> list[QuantizedLayer]:
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def codes(layer: QuantizedLayer) -> torch.Tensor:
    return layer.get_deployed().codes


def is_two_of_four(weight: torch.Tensor) -> bool:
    groups = weight.movedim(1, -1).reshape(-1, 4)
    return bool(((groups != 0).sum(-1) <= 2).all())


def test_a_sparsity_setting_round_trips_in_every_notation() -> None:
    for setting, text in (("2:4", "2:4"), (0.5, "50% zero"), ({"share": 0.25, "block": 4}, "25% zero in blocks of 4")):
        config = QuantConfig(weight=TensorQuantConfig(sparsity=setting))
        assert QuantConfig.from_yaml(config.to_yaml()) == config
        spec = config.weight.weight_spec()
        assert str(spec.sparsity) == text
        assert type(spec).from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("two of four", "0.5, or '2:4'"),
        ("4:4", "less than 4"),
        (1.0, "less than 1"),
        ({"share": 0.5, "keep": 2, "of": 4}, "keep and of"),
        ({"shar": 0.5}, "did you mean 'share'"),
    ],
    ids=str,
)
def test_invalid_sparsity_is_refused(wrong, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Sparsity.build(wrong)


def test_activations_are_not_pruned() -> None:
    with pytest.raises(ConfigError, match="activations are not pruned"):
        TensorQuantConfig(sparsity=0.5).activation_spec()


def test_two_of_four_codes_are_zero_or_the_coverage_says_why_not() -> None:
    model = pruned("2:4")
    stem, conv, head = layers(model)
    assert not is_two_of_four(codes(stem)[:, :1].expand(-1, 4, -1, -1))
    assert is_two_of_four(codes(conv))
    assert is_two_of_four(codes(head))
    rows = [row for row in coverage(model).operations if row.precision.startswith("w ")]
    assert [("2:4" in row.precision) for row in rows] == [False, True, True]
    assert rows[0].reason == "not pruned to 2:4: groups of 4 do not divide its 3 input channels"


def test_disabled_quantizers_give_the_float_model() -> None:
    x = torch.randn(8, 3, 12, 12)
    model = pruned(0.5, [x])
    with torch.no_grad():
        assert not torch.allclose(model(x), net()(x), atol=1e-2)
        scalepoint.quantize.disable_fake_quant(model)
        assert torch.allclose(model(x), net()(x), atol=1e-5)


def test_a_mask_survives_save_and_load(tmp_path: Path) -> None:
    x = torch.randn(8, 3, 12, 12)
    model = pruned({"share": 0.5, "block": 4}, [x])
    save(model, tmp_path / "m")
    again = load(tmp_path / "m", net(), x).eval()
    with torch.no_grad():
        assert torch.equal(model(x), again(x))
    for one, other in zip(layers(model), layers(again), strict=True):
        assert torch.equal(codes(one), codes(other))
        assert bool((codes(one).reshape(codes(one).shape[0] // 4, 4, -1) == 0).all(1).any())


STEPS = [("scale", "gptq", "descend"), ("intercept", "target", "scale", "descend"), ("clip", "gptq")]


@pytest.mark.parametrize(
    "steps",
    [pytest.param(steps, id="-".join(steps), marks=pytest.mark.slow if "clip" in steps else ()) for steps in STEPS],
)
def test_tuning_keeps_the_mask_and_lowers_the_error(steps: tuple[str, ...]) -> None:
    data = [torch.randn(64, 3, 12, 12) for _ in range(4)]
    model, float_model = pruned("2:4", data), net()
    with torch.no_grad():
        expected = float_model(data[0])
        before = float((model(data[0]) - expected).square().mean())
        masks = [layer.weight_quant.mask for layer in layers(model)]
        scalepoint.tune(model, data, TuneConfig(steps=steps), progress=False)
        after = float((model(data[0]) - expected).square().mean())
    assert after < 0.8 * before
    for layer, mask in zip(layers(model), masks, strict=True):
        if mask is not None:
            assert layer.weight_quant.chosen is not None
            assert not bool(codes(layer)[~mask].any())


def test_gradient_tuning_keeps_the_mask() -> None:
    data = [torch.randn(32, 3, 12, 12) for _ in range(2)]
    model = pruned("2:4", data)
    config = TuneConfig(steps=("intercept", "scale", "gptq", "sign_round"), unit="block")
    scalepoint.tune(model, data, config, progress=False)
    assert all(is_two_of_four(codes(layer)) for layer in layers(model)[1:])


def test_training_prunes_by_its_schedule_up_to_the_requested_share() -> None:
    x = torch.randn(8, 3, 12, 12)
    model = pruned(0.8, [x], freeze=False)
    prepare_qat(model)
    schedule, shares = QATSchedule(prune_from=1, prune_until=5), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(7):
        schedule.step(model)
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        optimizer.step()
        shares.append(float((~layers(model)[1].weight_quant.mask).float().mean()))
    assert shares[:2] == [0, 0]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.8 * (1 - 0.75**3), abs=0.01)
    assert shares[-1] == pytest.approx(0.8, abs=0.01)
    model.eval()
    assert float((codes(layers(model)[1]) == 0).float().mean()) >= 0.79


def test_a_schedule_that_ends_before_it_begins_is_refused() -> None:
    with raises(ConfigError, "prune_until", "prune_from=5, got 3"):
        QATSchedule(prune_from=5, prune_until=3)


def test_pruned_weights_have_no_gradient() -> None:
    x = torch.randn(8, 3, 12, 12)
    model = pruned(0.5, [x], freeze=False)
    prepare_qat(model)
    model.train()(x).square().mean().backward()
    layer = layers(model)[1]
    assert not bool(layer.weight.grad[~layer.weight_quant.mask].any())
    assert bool(layer.weight.grad[layer.weight_quant.mask].any())


def test_the_exported_file_contains_the_zeros(tmp_path: Path) -> None:
    x = torch.randn(8, 3, 12, 12)
    path = scalepoint.export(pruned("2:4", [x]), tmp_path / "m.onnx", x)
    weights = {
        initializer.name: onnx.numpy_helper.to_array(initializer) for initializer in onnx.load(path).graph.initializer
    }
    stored = next(torch.from_numpy(weight.copy()) for weight in weights.values() if weight.shape == (16, 16, 3, 3))
    assert is_two_of_four(stored)
