"""Streams that norms read: a row that is a hundred times as large as the others counts as one row."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune
from scalepoint.tuning.collect import RowCollector
from scalepoint.tuning.piece_evaluation import PieceEvaluator
from scalepoint.tuning.pieces import cut_into_pieces
from scalepoint.tuning.residual_adds import find_normed_operand
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.walk import StreamWalk
from tests.tuning.test_collect import inputs_of, shape_of, use_of, walked

ALONE = QuantConfig(activation="float", weight=TensorQuantConfig(n_bits=3, per_channel=True))
WIDE = 16


class NormInOperations(nn.Module):
    """An RMS norm in single operations, as transformers implements it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Stream(nn.Module):
    """x + f(norm(x)), and what reads it."""

    def __init__(self, norm=lambda: nn.RMSNorm(WIDE), bias=False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDE, WIDE, bias=bias)
        self.norm, self.up, self.down = norm(), nn.Linear(WIDE, 32, bias=bias), nn.Linear(32, WIDE, bias=bias)
        self.last, self.head = norm(), nn.Linear(WIDE, 4, bias=bias)

    def forward(self, x):
        x = self.enter(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x))


def rows(count=6, large=300.0):
    results = [torch.randn(4, 10, WIDE, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    for result in results:
        result[:, 0] *= large
    return results


def stream(norm=lambda: nn.RMSNorm(WIDE), **options):
    torch.manual_seed(0)
    return Stream(norm, **options).eval()


NORMS = {"rms": lambda: nn.RMSNorm(WIDE), "layer": lambda: nn.LayerNorm(WIDE), "written": NormInOperations}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_rows_of_a_layer_that_writes_to_the_stream_are_weighted_by_their_size(norm):
    walk, collector = walked(stream(norm), rows(), "down", ALONE)
    use = use_of(collector, "down")
    other = find_normed_operand(walk, use)
    assert other is not None
    fit, judge = collector.collect_moments(use, shape_of(use))
    sums, total = 0.0, 0.0
    for index, (exact, noisy) in enumerate(inputs_of(walk, use)):
        everything = (walk.get_value(other, index, noisy=False) + use.layer.operation(exact)).detach()
        weights = 1 / (everything.square().mean(-1, keepdim=True) + 1e-5)
        sums, total = sums + (noisy * weights).sum((0, 1)), total + float(weights.sum())
    assert fit.mean.shape == judge.mean.shape
    shares = [float(collector_total(collector, use, is_holdout=is_holdout)) for is_holdout in (False, True)]
    mean = (fit.mean * shares[0] + judge.mean * shares[1]) / sum(shares)
    torch.testing.assert_close(mean.view(-1).float(), (sums / total).detach(), rtol=1e-3, atol=1e-4)
    assert find_normed_operand(walk, use_of(collector, "head")) is None


def collector_total(collector, use, *, is_holdout):
    """The sum of the row weights of the fitted or of the held-out rows."""
    shape = shape_of(use)
    weight = shape.weight().float()
    return sum(
        chunk.row_weights.sum()
        for chunk in collector._iterate_rows(use, shape, weight)
        if chunk.is_holdout == is_holdout
    )


def test_a_block_that_a_norm_reads_is_judged_row_by_row():
    data = rows()
    quantized = quantize(stream(), data[0], ALONE, forward_loop=data, progress=False)
    walk = StreamWalk(quantized, memory=10**8)
    walk.read_data(quantized, data, max_batches=None, skip_nan=False, progress=False)
    collector = RowCollector(walk, 10**6, 0.1, {})
    piece = cut_into_pieces(walk.graph, walk.same_nodes, {use.node for use in collector.uses}.__contains__, "block")[0]
    for node in piece.nodes:
        walk.advance(node)
    (exit_,) = [node for node in piece.exits if node not in walk.same_nodes]
    assert feeds_norm(walk, exit_)
    is_holdout = collector.is_held_out(torch.arange(24)).split(4)
    apart = []
    for index, mask in enumerate(is_holdout):
        exact, noisy = (walk.get_value(exit_, index, noisy=side)[mask] for side in (False, True))
        apart.append(((exact - noisy).square().mean(-1) * row_weights(exact)[..., 0]).flatten())
    assert PieceEvaluator(walk, collector).stored_error(piece) == pytest.approx(
        float(torch.cat(apart).mean()), rel=1e-3
    )


def test_huge_rows_do_not_dominate_the_others():
    """With a huge row in the data, the codes serve the ordinary rows about as well as without."""
    net, errors = stream(), {}
    for large in (1.0, 1000.0):
        data = rows(large=large)
        quantized = quantize(net, data[0], ALONE, forward_loop=data, progress=False)
        tune(quantized, data, TuneConfig(), progress=False)
        with torch.no_grad():
            fresh = torch.randn(64, 10, WIDE, generator=torch.Generator().manual_seed(99))
            errors[large] = float((quantized(fresh) - net(fresh)).square().mean())
    assert errors[1000.0] < 1.3 * errors[1.0]


@pytest.mark.parametrize("bias", [False, True], ids=["without", "with"])
def test_a_float_layer_without_a_bias_gets_none(bias):
    data = rows(large=1.0)
    data = [batch + 1.0 for batch in data]
    net = stream(bias=bias)
    quantized = quantize(net, data[0], ALONE, forward_loop=data, progress=False)
    report = tune(quantized, data, TuneConfig(), progress=False)
    shifts = [module.bias_shift for module in quantized.modules() if hasattr(module, "bias_shift")]
    assert any(item is not None for item in shifts) == bias
    assert all(row.after < row.before for row in report.layers)
