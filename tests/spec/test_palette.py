"""palette_spec: specs whose scales are tables."""

from itertools import pairwise
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
    with raises(SpecError, "a pruned palette has no vectors", "cluster_dim=1"):
        quantize(net(), torch.randn(2, 3, 8, 8), QuantConfig.palettes(4, cluster_dim=2, sparsity=0.5), target="coreai")
    with raises(TargetError, "'coreml'", "palettes of pruned weights"):
        quantize(net(), torch.randn(2, 3, 8, 8), QuantConfig.palettes(4, sparsity=0.5), target="coreml")
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


def test_the_tables_of_a_pruned_palette_are_those_of_the_kept_weights() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = quantize(net(), x, QuantConfig.palettes(2, sparsity=0.5), target="coreai", freeze_weights=True).eval()
    for layer in quantized_weights(model):
        quant, weight = layer.weight_quant, layer.to_output_first(layer.fold_norm()[0])
        weight = weight.detach()
        unpruned = weight[quant.mask]
        deployed = quant.values(layer.get_deployed().codes)
        assert quant.mask.float().mean() == pytest.approx(0.5, abs=0.01)
        assert not deployed[~quant.mask].any()
        assert deployed[quant.mask].abs().min() > 0.1 * unpruned.abs().mean()
        assert len(deployed.unique()) == 5
        assert float((deployed[quant.mask] - unpruned).square().mean()) < 0.05 * float(unpruned.square().mean())
        assert torch.equal(quant(weight), deployed)


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


def quantized_weights(model: nn.Module) -> list[QuantizedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]


def build(**fields: object) -> tuple[nn.Module, list[torch.Tensor]]:
    """A calibrated model whose weights are palettes, and its data."""
    torch.manual_seed(1)
    data = list((torch.randn(256, 3, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)).split(64))
    quantized = quantize(net(), data[0], QuantConfig.palettes(**fields), target="reference")  # type: ignore[arg-type]
    calibrate(quantized, data[:3], freeze_weights=True, progress=False)
    return quantized, data


PALETTES = [
    {"n_bits": 2},
    {"n_bits": 3, "group_size": 4},
    {"n_bits": 4, "cluster_dim": 2},
    {"n_bits": 3, "table_dtype": "int8"},
    {"n_bits": 3, "table_dtype": "float8_e4m3fn"},
]


@pytest.mark.parametrize("fields", PALETTES, ids=str)
def test_tuning_chooses_tables_and_indices_that_are_closer_on_new_data(
    fields: dict[str, object], tmp_path: Path
) -> None:
    quantized, data = build(**fields)
    with torch.no_grad():
        expected = net()(data[3])
        before = (quantized.eval()(data[3]) - expected).square().mean()
        report = scalepoint.tune(quantized, data[:3], progress=False)
        after = (quantized.eval()(data[3]) - expected).square().mean()
    assert after < 0.5 * before
    assert {row.step for row in report.layers} <= {"gptq", "descend"}
    entries = 2 ** int(str(fields["n_bits"]))
    for layer in quantized_weights(quantized):
        quant = layer.weight_quant
        assert quant.chosen is not None
        groups = quant.values(quant.chosen).split(int(str(fields.get("group_size", len(quant.chosen)))))
        dim = int(str(fields.get("cluster_dim", 1)))
        for group in groups:
            vectors = group.unflatten(0, (-1, dim)).flatten(2).mT.reshape(-1, dim)
            assert len(vectors.unique(dim=0)) <= entries
        if "table_dtype" in fields:  # one scale per table: max|entry| / largest code
            high = 127 if fields["table_dtype"] == "int8" else 448
            scale = quant.scale.abs().amax(1, keepdim=True) / high
            codes = quant.scale / scale
            stored = codes.round() if high == 127 else codes.to(torch.float8_e4m3fn).float()
            assert torch.equal(stored * scale, quant.scale)
    save(quantized, tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "m", net(), data[0]).eval()(data[3]), quantized(data[3]))


def test_in_training_the_tables_follow_the_weight_step_by_step() -> None:
    quantized, data = build(n_bits=2)
    prepare_qat(quantized)
    quantized.train()
    layer = quantized_weights(quantized)[1]
    x, goal = data[0], torch.randn(64, 12)
    optimizer = torch.optim.Adam(quantized.parameters(), lr=3e-3)
    losses, tables = [], []
    for _ in range(12):
        loss = (quantized(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        tables.append(layer.weight_quant.scale.clone())
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(old, new) for old, new in pairwise(tables[:4]))


def test_a_vector_of_weights_shares_an_index() -> None:
    spec = palette_spec(2, cluster_dim=2)
    spec = spec.replace(granularity=spec.granularity.resolve(nn.Linear))
    quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-2.0, 0.0], [0.5, 3.0]])
    weight = corners[torch.randint(0, 4, (60,))].T.contiguous()  # two channels
    weight[:, :4] = corners.T
    torch.testing.assert_close(quantizer(weight), weight)
    codes = quantizer.quantize(weight, *quantizer.calculate_qparams())
    assert torch.equal(codes[0], codes[1])
    assert quantizer.qparams_calculator.scale.shape == (1, 4, 2)


def test_channels_that_vectors_do_not_divide_stay_float() -> None:
    with pytest.warns(UserWarning, match="blocks of 5"):
        quantize(
            net(),
            torch.randn(2, 3, 8, 8),
            QuantConfig.palettes(2, cluster_dim=5),
            target="reference",
            freeze_weights=True,
        )
