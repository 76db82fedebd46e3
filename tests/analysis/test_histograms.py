"""histograms: exact counts, edges that hold every value, and the range of the codes."""

import json

import pytest
import torch

from scalepoint.analysis import histograms
from scalepoint.errors import CalibrationError, UsageError
from scalepoint.quantize import QuantStub
from tests.analysis.nets import batches, float_net, quantized_net, quantizers, same, snapshot


@pytest.fixture(scope="module")
def model():
    return quantized_net()


def counted(values, edges):
    edges = torch.tensor(edges, dtype=torch.float64)
    positions = torch.bucketize(values.flatten().double(), edges, right=True) - 1
    return torch.bincount(positions, minlength=len(edges) - 1).tolist()


@pytest.mark.parametrize("bins", [1, 7, 64, 200])
def test_counts_are_exact(model, bins):
    weight, activation = histograms(model, batches(), ["third"], bins)
    plain = float_net()
    with torch.no_grad():
        x = torch.cat(batches())
        pooled = plain.second(plain.bn(plain.first(x)).relu()).relu().mean((2, 3))
    assert (weight.role, activation.role) == ("weight", "input")
    assert list(weight.counts) == counted(plain.third.weight.detach(), weight.edges)
    assert sum(activation.counts) == pooled.numel()
    # float32 sums of the graph and of the net may differ in the last bit, at an edge
    wrong = sum(abs(a - b) for a, b in zip(activation.counts, counted(pooled, activation.edges), strict=True))
    assert wrong <= 2
    assert 1 <= len(weight.counts) <= bins


def test_low_and_high_are_the_range_of_the_codes(model):
    weight, activation = histograms(model, batches(), ["fifth"])
    stub = next(stub for stub in model.modules() if isinstance(stub, QuantStub) and "fifth" in stub.consumers)
    quantizer = next(quantizer for quantizer in quantizers(model) if quantizer.name == "fifth.weight")
    assert activation.low == pytest.approx(-128 * float(stub.scale))
    assert activation.high == pytest.approx(127 * float(stub.scale))
    assert weight.low == pytest.approx(-128 * float(quantizer.scale.max()))
    assert weight.high == pytest.approx(127 * float(quantizer.scale.max()))


def test_layers_are_in_the_requested_order_and_the_model_stays_unchanged(model):
    before = snapshot(model)
    results = histograms(model, iter(batches()), ["fifth", "first"])
    assert [result.name for result in results] == ["fifth", "fifth", "first", "first"]
    json.dumps([result.to_dict() for result in results])
    same(before, snapshot(model))


@pytest.mark.parametrize(
    ("names", "bins", "message"),
    [(["forth"], 64, "did you mean 'fourth'"), ("first", 64, "a list of layers"), (["first"], 0, "bins= must be")],
)
def test_bad_input(model, names, bins, message):
    with pytest.raises(UsageError, match=message):
        histograms(model, batches(), names, bins)


def test_no_data(model):
    with pytest.raises(CalibrationError, match="0 batches"):
        histograms(model, [], ["first"])
