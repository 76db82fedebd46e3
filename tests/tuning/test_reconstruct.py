"""Steps over blocks and the whole model: results are kept only if held-out samples improve, and are reproducible."""

import pytest
import torch
from torch import nn

from scalepoint.analysis import compare
from scalepoint.quantize import QuantConfig, TensorQuantConfig, disable_fake_quant, quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.tuning import TuneConfig, register, tune
from scalepoint.tuning.solve import LayerSolver
from tests.models import with_norm_statistics
from tests.tuning.test_tune import Net, codes, pictures

CLOSED = TuneConfig().steps
THREE = QuantConfig(
    activation=TensorQuantConfig(n_bits=4, symmetric=False), weight=TensorQuantConfig(n_bits=3, per_channel=True)
)


TWO = QuantConfig(activation="float", weight=TensorQuantConfig(n_bits=2, per_channel=True))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return with_norm_statistics(Net())


@pytest.fixture(scope="module")
def data():
    return list(pictures(64, 1).split(16))


def tuned(net, data, steps, config=THREE, **options):
    model = quantize(net, data[0], config, forward_loop=data, progress=False)
    report = tune(model, data, TuneConfig(**{"steps": steps, "iterations": 20, **options}), progress=False)
    return model, report


def near(net, model):
    return compare(net, model, [pictures(64, 2)], progress=False).outputs[0].sqnr_db


@pytest.mark.parametrize("step", ["sign_round", "clip", "end_to_end"])
def test_no_piece_ends_worse_and_the_float_net_is_untouched(net, data, step):
    with torch.no_grad():
        expected = net(data[0])
    model, report = tuned(net, data, (*CLOSED, step))
    assert all(piece.after <= piece.before for piece in report.pieces)
    assert any(step in piece.notes for piece in report.pieces)
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            assert layer.weight_quant.chosen is None or not layer.weight_quant.chosen.is_floating_point()
            assert layer.bias_shift is None or not layer.bias_shift.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    with torch.no_grad():
        assert torch.equal(net(data[0]), expected)
    disable_fake_quant(model)
    with torch.no_grad():
        torch.testing.assert_close(model(data[0]), expected, rtol=1e-4, atol=1e-5)


def test_rounding_by_blocks_repairs_nearest_codes(net, data):
    plain, before = tuned(net, data, ("intercept",), TWO, unit="model")
    better, after = tuned(net, data, ("intercept", "sign_round"), TWO, unit="model", iterations=60)
    assert any(not torch.equal(a, b) for a, b in zip(codes(plain), codes(better), strict=True))
    assert after.pieces[0].after < 0.95 * before.pieces[0].after


def test_learned_scales_help_new_data(net, data):
    plain, _ = tuned(net, data, ("intercept",), TWO)
    better, _ = tuned(net, data, ("intercept", "clip"), TWO)
    assert near(net, better) > near(net, plain)


@pytest.mark.slow
def test_tuning_is_deterministic(net, data):
    results = [tuned(net, data, (*CLOSED, "sign_round", "clip", "end_to_end"))[0] for _ in range(2)]
    one, other = (result.state_dict() for result in results)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_four_bit_ranges_shrink_if_that_costs_less(net, data):
    plain, _ = tuned(net, data, CLOSED)
    result, _ = tuned(net, data, ("ranges", *CLOSED))
    stubs = [[stub for stub in model.modules() if isinstance(stub, QuantStub)] for model in (plain, result)]
    assert any(float(b.scale) < float(a.scale) for a, b in zip(*stubs, strict=True))
    assert near(net, result) > near(net, plain)


def test_eight_bit_ranges_change_only_for_a_clear_gain(net, data):
    eight = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(per_channel=True))
    plain, _ = tuned(net, data, CLOSED, eight)
    result, report = tuned(net, data, ("ranges", *CLOSED), eight)
    stubs = [[stub for stub in model.modules() if isinstance(stub, QuantStub)] for model in (plain, result)]
    changed = [not torch.equal(a.scale, b.scale) for a, b in zip(*stubs, strict=True)]
    assert sum(changed) == sum(piece.notes.count("range of") for piece in report.pieces)
    assert near(net, result) > near(net, plain) - 0.3


@pytest.mark.parametrize("what", ["codes", "shift"])
def test_solutions_that_make_a_block_worse_are_undone(net, data, what, monkeypatch):
    original = LayerSolver.solve

    def harmful(self, use, name):
        row = original(self, use, name)
        if what == "codes":
            use.layer.set_codes(use.layer.get_deployed().codes.flip(0))
        use.layer.set_bias_shift(torch.full((use.layer.out_channels,), 5.0))
        return row

    monkeypatch.setattr(LayerSolver, "solve", harmful)
    model, report = tuned(net, data, CLOSED)
    assert ("nearest" if what == "codes" else "without bias shifts") in {piece.how for piece in report.pieces}
    assert "as solved" not in {piece.how for piece in report.pieces}
    assert all(piece.after <= piece.before for piece in report.pieces)
    assert all(layer.bias_shift is None for layer in model.modules() if isinstance(layer, QuantizedLayer))
    if what == "codes":
        first = quantize(net, data[0], THREE, forward_loop=data, progress=False)
        assert all(torch.equal(a, b) for a, b in zip(codes(model), codes(first), strict=True))
        assert all(row.step == "" and row.after == row.before for row in report.layers)


def test_a_registered_step_over_pieces_gets_their_layers(net, data):
    calls = []

    @register("look", over="piece")
    def look(task):
        calls.append([grouped.layer.weight_quant.name for grouped in task.layers()])

    tuned(net, data, (*CLOSED, "look"))
    assert sum(map(len, calls)) == 4


class Again(nn.Module):
    """One quantizer is used twice, with layers between the two uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


def test_a_quantizer_that_another_piece_uses_too_is_not_changed():
    torch.manual_seed(0)
    data = [torch.randn(16, 8) for _ in range(4)]
    model = quantize(Again().eval(), data[0], THREE, forward_loop=data, progress=False)
    first, *_, last = (node for node in model.graph.nodes if isinstance(_module(model, node), QuantStub))
    last.target = first.target  # one quantizer at two nodes, in two pieces
    model.recompile()
    before = _module(model, first).scale.clone()
    calls = []

    @register("stubs", over="piece")
    def stubs(task):
        calls.extend(task.stubs())

    tune(
        model, data, TuneConfig(steps=(*CLOSED, "ranges", "clip", "stubs"), unit="layer", iterations=3), progress=False
    )
    assert calls
    assert torch.equal(_module(model, first).scale, before)


def _module(model, node):
    return model.get_submodule(node.target) if node.op == "call_module" else None


class TwoReaders(nn.Module):
    """A convolution multiplies axis 1 of the tensor, and a linear layer its last axis."""

    def __init__(self, linear_first):
        super().__init__()
        self.conv, self.fc, self.linear_first = nn.Conv1d(8, 8, 1), nn.Linear(8, 8), linear_first
        with torch.no_grad():
            self.conv.weight *= 1e-3
            self.fc.weight[:, 1:] *= 1e-3

    def forward(self, x):
        x = torch.relu(x)
        if self.linear_first:
            product = self.fc(x)
            return self.conv(x), product
        return self.conv(x), self.fc(x)


def test_readers_along_different_axes_are_weighted_along_their_own_axis():
    config = QuantConfig(activation=TensorQuantConfig(n_bits=4), weight=TensorQuantConfig())
    torch.manual_seed(0)
    data = [torch.rand(8, 8, 8) for _ in range(4)]
    for batch in data:
        batch[:, :, 1:] *= 9  # what counts is the first column alone, and its values are small
    scales = []
    for linear_first in (False, True):
        torch.manual_seed(1)
        model = quantize(TwoReaders(linear_first).eval(), data[0], config, forward_loop=data, progress=False)
        tune(model, data, {"steps": ("ranges",)}, progress=False)
        stubs = [stub for stub in model.modules() if isinstance(stub, QuantStub) and "conv" in stub.consumers]
        scales.append([float(stub.scale) for stub in stubs])
    assert len(scales[0]) == 1
    assert scales[0] == scales[1]
    assert scales[0][0] < 0.5 * 9 / 7.5
