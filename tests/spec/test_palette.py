"""palette_spec: a spec like others, whose scales are tables."""

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
def test_a_weight_has_so_many_values_in_each_group_and_more_bits_are_nearer(bits: int) -> None:
    spec = palette_spec(bits, group_size=4)
    assert spec_from_dict(spec.to_dict()) == spec
    weight = torch.randn(8, 300)
    spec = spec.replace(granularity=spec.granularity.resolve(nn.Linear))
    made = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")(weight)
    assert all(len(group.unique()) <= 2**bits for group in made.split(4))
    assert len(made[:4].unique()) > 2 ** (bits - 1)
    assert float((made - weight).square().mean()) < 2.8 * 4.0**-bits


def test_widths_and_components_that_no_palette_has_are_refused() -> None:
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


def test_a_palettized_model_is_saved_and_loaded_bit_by_bit_and_shown_in_the_coverage(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    made = quantize(net(), x, QuantConfig.palettes(4, group_size=4), target="coreml", freeze_weights=True).eval()
    assert [row.precision for row in coverage(made).operations if row.precision] == ["w palette4", "w palette4"]
    save(made, tmp_path / "m")
    again = load(tmp_path / "m", net(), x).eval()
    with torch.no_grad():
        assert torch.equal(made(x), again(x))
        assert not torch.equal(made(x), net()(x))
    tables = [each.weight_quant.scale for each in made.modules() if isinstance(each, QuantizedLayer)]
    assert [tuple(each.shape) for each in tables] == [(2, 16), (3, 16)]
    assert all(torch.equal(each, each.half().float()) for each in tables)


def test_groups_that_do_not_divide_the_channels_leave_the_layer_float_and_say_so() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match="blocks of 5"):
        made = quantize(net(), x, QuantConfig.palettes(4, group_size=5), target="coreml", freeze_weights=True)
    with torch.no_grad():
        assert torch.allclose(made.eval()(x), net()(x), atol=1e-5)


def test_training_follows_the_live_weight() -> None:
    x = torch.randn(4, 3, 8, 8)
    made = quantize(net(), x, QuantConfig.palettes(2), target="coreml")
    prepare_qat(made)
    loss = made(x).square().mean()
    loss.backward()
    assert all(each.weight.grad is not None for each in made.modules() if isinstance(each, nn.Linear))


def test_tuning_leaves_tables_alone() -> None:
    x = torch.randn(16, 3, 8, 8)
    made = quantize(net(), x, QuantConfig.palettes(2), target="coreml")
    calibrate(made, [x], freeze_weights=True, progress=False)
    before = [each.weight_quant.scale.clone() for each in made.modules() if isinstance(each, QuantizedLayer)]
    scalepoint.tune(made, [x], progress=False)
    after = [each.weight_quant.scale for each in made.modules() if isinstance(each, QuantizedLayer)]
    assert all(map(torch.equal, before, after))
    assert all(each.weight_quant.chosen is None for each in made.modules() if isinstance(each, QuantizedLayer))
