"""Outlier channels are scaled before their quantizer, if held-out data shows a clear gain."""

import onnx
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq, load, quantize, save
from scalepoint.quantize.outlier_scaling import ChannelFactors, DataHalf, choose_factors, compute_factors
from scalepoint.quantize.record import record_of
from scalepoint.targets import onnxruntime_target, openvino_target

VNNI = openvino_target("vnni")
WITHOUT = QuantConfig(outliers=False)


class Block(nn.Module):
    """The output of the first norm has a channel 40 times larger. A residual reads it too, so it cannot be smoothed."""

    def __init__(self, largest=40.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight[3] = largest
            self.up.weight[:, 3] /= (
                largest  # as in trained networks: the large channel contributes no more than the others
            )

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def batches(rows=64, count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, rows, 32, generator=generator) for _ in range(count)]


def level(expected, actual):
    return float(10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()))


def make_quantized(model, data, config=None, target=VNNI):
    return quantize(model.eval(), data[0], config, forward_loop=data, target=target)


def factors_in(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, ChannelFactors)}


@torch.no_grad()
def test_an_outlier_channel_is_scaled_and_the_error_falls():
    torch.manual_seed(0)
    model, (held_out, *data) = Block().eval(), batches()
    expected = model(held_out) - model.norm(held_out)
    quantized, before = make_quantized(model, data), make_quantized(model, data, WITHOUT)
    scaled, unscaled = (net(held_out) - model.norm(held_out) for net in (quantized, before))
    assert level(expected, scaled) > level(expected, unscaled) + 6
    rows = record_of(quantized).migrated.done
    assert [(row.migration, row.name) for row in rows] == [("outliers", "norm_fused_quant")]
    assert rows[0].note.startswith("1 of 32 channels divided by up to ")


@torch.no_grad()
def test_the_float_model_is_the_same_bit_by_bit():
    torch.manual_seed(0)
    model, data = Block().eval(), batches()
    expected = model(data[0])
    quantized = make_quantized(model, data)
    assert any(bool((factors.weight != 1).any()) for factors in factors_in(quantized).values())
    scalepoint.quantize.disable_fake_quant(quantized)
    assert torch.equal(quantized(data[0]), expected)


@torch.no_grad()
def test_without_outliers_nothing_changes():
    torch.manual_seed(0)
    model, data = Block(largest=1.0).eval(), batches()
    assert torch.equal(make_quantized(model, data)(data[0]), make_quantized(model, data, WITHOUT)(data[0]))
    assert not record_of(make_quantized(model, data)).migrated.rows


def half(rows):
    data_half = DataHalf()
    data_half.add_rows(rows)
    return data_half


def test_factors_need_enough_rows():
    """With four rows per half, the maximum of one channel does not predict that of the next rows."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(256, generator=generator) * 1.5 + 0.5
    few = [half(torch.randn(4, 256, generator=generator) * spread) for _ in range(2)]
    many = [half(torch.randn(512, 256, generator=generator) * spread**4) for _ in range(2)]
    weight = torch.randn(64, 256, generator=generator)
    assert choose_factors(tuple(few), [weight]) is None
    choice = choose_factors(tuple(many), [weight / spread**4])
    assert choice is not None
    assert choice[1] < 0.7


def test_factors_are_powers_of_two_that_bring_channels_below_the_threshold():
    largest = torch.tensor([0.1, 1.0, 3.0, 16.0])
    assert compute_factors(largest, 0.0).tolist() == [1, 1, 1, 1]
    assert compute_factors(largest, 4.0).tolist() == [1, 1, 4, 16]


def test_an_iterator_causes_no_scaling():
    model, data = Block().eval(), batches()
    result = scalepoint.transform(model, data[0], target=VNNI)
    quantized = calibrate(insert_qdq(result.model, result.matches), iter(data))
    assert all(bool((factors.weight == 1).all()) for factors in factors_in(quantized).values())


@pytest.mark.parametrize(
    ("config", "target"),
    [(QuantConfig(migrate=["smooth"]), VNNI), (WITHOUT, VNNI), (None, onnxruntime_target("vnni"))],
    ids=["smoothed", "not asked for", "a target that pays for it"],
)
def test_factors_are_not_inserted(config, target):
    result = scalepoint.transform(Block().eval(), batches()[0], target=target)
    assert not factors_in(insert_qdq(result.model, result.matches, config))


def test_a_second_calibration_changes_no_weight():
    data = batches()
    quantized = make_quantized(Block(), data)
    weights = {name: value.clone() for name, value in quantized.named_parameters()}
    calibrate(quantized, data, freeze_weights=True)
    assert all(torch.equal(value, weights[name]) for name, value in quantized.named_parameters())


@torch.no_grad()
def test_a_saved_and_loaded_model_computes_the_same(tmp_path):
    torch.manual_seed(0)
    model, data = Block().eval(), batches()
    quantized = make_quantized(model, data)
    save(quantized, tmp_path / "m")
    loaded = load(tmp_path / "m", model, data[0], target=VNNI)
    assert torch.equal(loaded(data[0]), quantized(data[0]))
    assert record_of(loaded).migrated == record_of(quantized).migrated


def test_a_state_without_factors_can_be_loaded():
    quantized = make_quantized(Block(), batches())
    state = {name: value for name, value in quantized.state_dict().items() if "_factors." not in name}
    assert state.keys() != quantized.state_dict().keys()
    quantized.load_state_dict(state)


@pytest.mark.parametrize(("largest", "count"), [(40.0, 1), (1.0, 0)])
def test_exported_files_contain_only_factors_other_than_one(largest, count, tmp_path):
    torch.manual_seed(0)
    data = batches()
    path = scalepoint.export(make_quantized(Block(largest), data), tmp_path / "m.onnx", data[0])
    nodes = [node.name for node in onnx.load(path).graph.node if "_factors" in node.name]
    assert len(nodes) == count
