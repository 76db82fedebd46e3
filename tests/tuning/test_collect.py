"""Moments of a layer: with the other operand of an add, shared by readers, summed over uses of a weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.errors import NonFiniteError
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning.collect import RowCollector
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.residual_adds import find_changed_operand
from scalepoint.tuning.rows import get_geometry
from scalepoint.tuning.solve import can_shift_bias
from scalepoint.tuning.walk import StreamWalk
from tests.tuning.test_pieces import Encoder, Residual

FOUR = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True))


def walked(model, batches, to, config=None, **options):
    """A walk that has advanced to the layer with this name."""
    quantized = quantize(model.eval(), batches[0], config, forward_loop=batches, progress=False, **options)
    walk = StreamWalk(quantized, memory=10**8)
    walk.read_data(quantized, batches, max_batches=None, skip_nan=False, progress=False)
    collector = RowCollector(walk, 10**6, 0.1, {})
    for node in walk.graph.nodes:
        if walk.get_layer(node) is not None and to in walk.get_layer(node).path:
            break
        walk.advance(node)
    return walk, collector


def inputs_of(walk, use):
    """The inputs of a layer in both streams, batch by batch."""
    for index in range(walk.batch_count):
        yield [walk.capture_input(use.node, use.path, index, noisy=noisy) for noisy in (False, True)]


def use_of(collector, name):
    return next(use for use in collector.uses if name in use.path)


def shape_of(use):
    return GroupedLayer(use.layer, get_geometry(use.layer))


def batches(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, 10, 10, generator=generator) for _ in range(count)]


def test_targets_include_what_the_other_operand_of_the_add_lacks():
    for target in (None, "onnxruntime"):
        walk, collector = walked(Residual(), batches(), "two.second", target=target)
        use = use_of(collector, "two.second")
        other = find_changed_operand(walk, use)
        assert other is not None
        shape = shape_of(use)
        fit, judge = collector.collect_moments(use, shape)
        total = fit.count + judge.count
        mean = (fit.count * fit.mean_target + judge.count * judge.mean_target) / total
        expected = []
        for index, (exact, _) in enumerate(inputs_of(walk, use)):
            drift = walk.get_value(other, index, noisy=False) - walk.get_value(other, index, noisy=True)
            weight, _ = use.layer.fold_norm()
            expected.append(F.conv2d(exact, weight, padding=1) + drift)
        expected = torch.cat(expected).detach()
        torch.testing.assert_close(mean.reshape(-1).float(), expected.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_layer_that_feeds_no_add_has_no_changed_operand():
    walk, collector = walked(Residual(), batches(), "two.first", target="onnxruntime")
    assert find_changed_operand(walk, use_of(collector, "two.first")) is None


class Gated(nn.Module):
    """y = D(silu(G x) * U x): the product is in the group of one of the two layers that read x."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated():
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(16, 16, generator=generator) for _ in range(4)]
    weights = QuantConfig(activation="float", weight=TensorQuantConfig(n_bits=4, block_size=16))
    return walked(Gated(), data, "gate", config=weights)


def test_a_layer_with_a_product_in_its_group_shares_the_pass_over_the_rows(monkeypatch):
    walk, collector = gated()
    uses = collector.uses[:2]
    assert max(len(use.node.all_input_nodes) for use in uses) == 2
    passes = []
    original = RowCollector._iterate_rows
    monkeypatch.setattr(RowCollector, "_iterate_rows", lambda *args: passes.append(1) or original(*args))
    for use in uses:
        fit, judge = collector.collect_moments(use, shape_of(use))
        mean = (fit.count * fit.mean_target + judge.count * judge.mean_target) / (fit.count + judge.count)
        exact = torch.cat([exact for exact, _ in inputs_of(walk, use)]) @ use.layer.weight.T
        torch.testing.assert_close(mean[0].float(), exact.mean(0).detach(), rtol=1e-4, atol=1e-5)
    assert len(passes) == 1


def test_a_float_layer_with_a_product_in_its_group_gets_no_bias():
    walk, collector = gated()
    assert [can_shift_bias(walk, use) for use in collector.uses] == [False] * 3


def test_readers_of_one_value_share_one_pass_over_the_rows(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 5, 16, generator=generator), torch.ones(8, 5)) for _ in range(2)]
    walk, collector = walked(Encoder(), data, "two.q", target="onnxruntime")
    use = use_of(collector, "two.q")
    passes = []
    original = RowCollector._iterate_rows
    monkeypatch.setattr(RowCollector, "_iterate_rows", lambda *args: passes.append(1) or original(*args))
    results = {}
    for reader in collector.uses[collector.uses.index(use) : collector.uses.index(use) + 3]:
        results[reader.path] = collector.collect_moments(reader, shape_of(reader))
    assert len(passes) == 1
    fresh = RowCollector(walk, 10**6, 0.1, {})
    monkeypatch.setattr(RowCollector, "_find_readers", lambda self, use, shape: [(use, shape)])
    for reader in fresh.uses[fresh.uses.index(use) : fresh.uses.index(use) + 3]:
        alone = fresh.collect_moments(reader, shape_of(reader))
        for one, other in zip(results[reader.path], alone, strict=True):
            torch.testing.assert_close(one.cross, other.cross, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(one.target_variance, other.target_variance, rtol=1e-4, atol=1e-6)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)

    def forward(self, x):
        return self.shared(F.relu(self.shared(x)))


def test_the_rows_of_all_uses_of_a_weight_are_summed():
    data = [torch.randn(16, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = quantize(Twice().eval(), data[0], FOUR, forward_loop=data, progress=False)
    fresh, counts = StreamWalk(model, memory=10**8), []
    fresh.read_data(model, data, max_batches=None, skip_nan=False, progress=False)
    collector = RowCollector(fresh, 10**6, 0.1, {})
    for node in fresh.graph.nodes:
        for use in collector.uses:
            if use.node is node:
                fit, judge = collector.collect_moments(use, shape_of(use))
                counts.append(fit.count + judge.count)
        fresh.advance(node)
    assert counts == [48, 96]


@pytest.mark.parametrize(("groups", "rows"), [(1, 32_768), (3, 4096)])
def test_a_grouped_layer_uses_fewer_rows(groups, rows):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=groups))
    _, collector = walked(model, [torch.randn(16, 3, 32, 32) for _ in range(2)], "0", FOUR)
    use = next(iter(collector.uses))
    fit, judge = collector.collect_moments(use, shape_of(use))
    assert 0.9 * rows < fit.count + judge.count < 1.1 * rows


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_with_nan_or_infinity_are_refused(bad):
    model = nn.Sequential(nn.Linear(4, 4))
    _, collector = walked(model, [torch.randn(16, 4)], "0", FOUR)
    fine = torch.full((2, 1, 4), 3e38)  # whose sum is not
    collector.check_finite("0", (fine, fine))
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        collector.check_finite("0", (fine, torch.tensor([[[1.0, bad]]])))
