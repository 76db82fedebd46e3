"""palette_spec: specs whose scales are tables."""

from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import SpecError, TargetError
from scalepoint.quantize import QuantConfig, calibrate, load, prepare_qat, save
from scalepoint.quantize.quantize_model import quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.record import coverage
from scalepoint.spec import QuantizationComponentFactory, palette_spec
from scalepoint.spec.extended import spec_from_dict
from tests.errors import raises


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_a_group_has_at_most_2_to_the_bits_values_and_more_bits_are_closer(bits: int) -> None:
    spec = palette_spec(bits, group_size=4)
    assert spec_from_dict(spec.to_dict()) == spec
    weight = torch.randn(8, 300)
    spec = spec.replace(granularity=spec.granularity.resolve(nn.Linear))
    palettized = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")(weight)
    assert all(len(group.unique()) <= 2**bits for group in palettized.split(4))
    assert len(palettized[:4].unique()) > 2 ** (bits - 1)
    assert float((palettized - weight).square().mean()) < 2.8 * 4.0**-bits


def test_unsupported_widths_and_components_are_errors() -> None:
    with raises(SpecError, "n_bits=5", "1, 2, 3, 4, 6, 8"):
        palette_spec(5)
    wrong = palette_spec(4).replace(qparam_calculator_cls="static")
    with pytest.raises(SpecError, match="fake_quantize_cls='palette'"):
        QuantizationComponentFactory.create_fake_quantizer(wrong, "weight")
    with pytest.raises(TargetError, match="granularity per_grouped_channel"):
        quantize(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8), QuantConfig.palettes(4), target="onnxruntime")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 12)).eval()


def test_a_palettized_model_is_saved_and_loaded_bit_by_bit_and_appears_in_the_coverage(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    quantized = quantize(net(), x, QuantConfig.palettes(4, group_size=4), target="coreml", freeze_weights=True).eval()
    assert [row.precision for row in coverage(quantized).operations if row.precision] == ["w palette4", "w palette4"]
    save(quantized, tmp_path / "m")
    loaded = load(tmp_path / "m", net(), x).eval()
    with torch.no_grad():
        assert torch.equal(quantized(x), loaded(x))
        assert not torch.equal(quantized(x), net()(x))
    tables = [layer.weight_quant.scale for layer in quantized.modules() if isinstance(layer, QuantizedLayer)]
    assert [tuple(layer.shape) for layer in tables] == [(2, 16), (3, 16)]
    assert all(torch.equal(layer, layer.half().float()) for layer in tables)


def test_a_layer_stays_float_with_a_reason_if_groups_do_not_divide_its_channels() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match="blocks of 5"):
        quantized = quantize(net(), x, QuantConfig.palettes(4, group_size=5), target="coreml", freeze_weights=True)
    with torch.no_grad():
        assert torch.allclose(quantized.eval()(x), net()(x), atol=1e-5)


def test_training_uses_the_current_weight() -> None:
    x = torch.randn(4, 3, 8, 8)
    quantized = quantize(net(), x, QuantConfig.palettes(2), target="coreml")
    prepare_qat(quantized)
    loss = quantized(x).square().mean()
    loss.backward()
    assert all(layer.weight.grad is not None for layer in quantized.modules() if isinstance(layer, nn.Linear))


def test_tuning_does_not_change_tables() -> None:
    x = torch.randn(16, 3, 8, 8)
    quantized = quantize(net(), x, QuantConfig.palettes(2), target="coreml")
    calibrate(quantized, [x], freeze_weights=True, progress=False)
    before = [layer.weight_quant.scale.clone() for layer in quantized.modules() if isinstance(layer, QuantizedLayer)]
    scalepoint.tune(quantized, [x], progress=False)
    after = [layer.weight_quant.scale for layer in quantized.modules() if isinstance(layer, QuantizedLayer)]
    assert all(map(torch.equal, before, after))
    assert all(layer.weight_quant.chosen is None for layer in quantized.modules() if isinstance(layer, QuantizedLayer))
