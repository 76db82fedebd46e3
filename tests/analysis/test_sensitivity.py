"""sensitivity: the layer that costs most comes first, by measurement and by the one-pass estimate."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.analysis import sensitivity
from scalepoint.errors import CalibrationError, UsageError
from scalepoint.quantize import Override, TensorQuantConfig, coverage, insert_qdq, quantize
from scalepoint.transformation import transform
from tests.analysis.nets import COARSE, batches, config, decibels, float_net, quantized_net, quantizers, same, snapshot
from tests.models import ResNet, VisionTransformer, with_norm_statistics
from tests.pace import fast

WAYS = ["proxy", "one_at_a_time"]
NAMES = ["first", "second", "third", "fourth", "fifth"]


@pytest.fixture(scope="module")
def model():
    return quantized_net()


@pytest.fixture(scope="module")
def coarse():
    return quantized_net(COARSE)


def scores(rows):
    return {row.name: row.score for row in rows}


def outputs(model, data):
    with torch.no_grad():
        return torch.cat([model(batch) for batch in data])


def ranks(values):
    return torch.tensor(values).argsort().argsort().double()


def both_ways(plain, target):
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    model = quantize(with_norm_statistics(plain), data[0], {"correct_bias": False}, forward_loop=data, target=target)
    return [scores(sensitivity(model, data, how=options)) for options in ("one_at_a_time", "proxy")]


class TestRanking:
    @pytest.mark.parametrize("how", WAYS)
    @pytest.mark.parametrize("name", NAMES)
    def test_the_layer_with_two_bits_comes_first(self, how, name):
        model = quantized_net(Override(name=name, weight=TensorQuantConfig(n_bits=2, per_channel=True)))
        rows = sensitivity(model, batches(), how=how)
        assert rows[0].name == name
        assert rows[0].score > 2 * rows[1].score
        assert sorted(row.name for row in rows) == sorted(NAMES)
        assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)

    @pytest.mark.parametrize("target", fast(["onnxruntime", "tensorrt"], "onnxruntime"))
    def test_the_proxy_ranks_like_the_measurement(self, target):
        measured, estimated = both_ways(ResNet((1, 1, 1, 1), 8, 5), target)
        assert measured.keys() == estimated.keys()
        pair = torch.stack(
            [ranks([scores_by_name[name] for name in measured]) for scores_by_name in (measured, estimated)]
        )
        assert float(torch.corrcoef(pair)[0, 1]) > 0.9
        assert all(1 / 4 < estimated[name] / measured[name] < 4 for name in measured)

    def test_the_proxy_is_approximate_if_one_token_is_read(self):
        measured, estimated = both_ways(VisionTransformer(48, 4, 2, 32, 8, 10), "onnxruntime")
        assert all(1 / 10 < estimated[name] / measured[name] < 10 for name in measured)
        assert max(estimated, key=estimated.get) in sorted(measured, key=measured.get)[-3:]

    def test_gain_per_cost_divides_by_the_larger_share(self, coarse):
        rows = sensitivity(coarse, batches())
        table = coverage(coarse).operations
        macs, parameters = sum(row.macs for row in table), sum(row.parameters for row in table)
        for row in rows:
            share = max(row.macs / macs, row.parameters / parameters)
            assert row.gain_per_cost == pytest.approx(row.score / share)
            assert (row.kind, row.macs) in [(entry.kind, entry.macs) for entry in table]


class TestOneAtATime:
    def test_the_score_is_the_noise_to_signal_of_the_output(self, coarse):
        result = scores(sensitivity(coarse, batches(), how="one_at_a_time"))
        float_outputs = outputs(float_net(), batches())
        other = quantized_net(COARSE)
        for name in NAMES:
            for quantizer in quantizers(other):
                quantizer.enabled = name in quantizer.consumers
            expected = 10 ** (-decibels(float_outputs, outputs(other, batches())) / 10)
            assert result[name] == pytest.approx(expected, rel=1e-3)

    def test_a_metric_is_measured_in_float_and_once_per_layer(self, coarse):
        expected = outputs(float_net(), batches())
        observed = []

        def metric(run):
            result = outputs(run, batches())
            observed.append(float(F.mse_loss(result, expected)))
            return -observed[-1]

        rows = sensitivity(coarse, batches(), metric, how="one_at_a_time")
        assert len(observed) == 6
        assert observed[0] < 1e-10
        assert rows[0].name == "third"
        assert rows[0].metric == -max(observed)
        assert rows[0].score == pytest.approx(max(observed) - observed[0])

    def test_limit_tries_only_the_first_layers_of_the_proxy(self, coarse):
        calls = []

        def metric(run):
            calls.append(run)
            return float(outputs(run, batches()).sum())

        rows = sensitivity(coarse, batches(), metric, how="one_at_a_time", limit=2)
        assert {row.name for row in rows} == {row.name for row in sensitivity(coarse, batches(), limit=2)}
        assert len(calls) == 3

    def test_an_iterator_is_enough_for_one_pass(self, model):
        from_batches = scores(sensitivity(model, batches(), how="one_at_a_time"))
        assert scores(sensitivity(model, iter(batches()), how="one_at_a_time")) == from_batches


class TestProxy:
    @pytest.mark.parametrize("name", NAMES)
    def test_the_proxy_is_exact_for_a_single_source_of_noise(self, name):
        """With one layer quantized nothing can cancel: the estimate is the output's noise to signal."""
        model = quantized_net()
        for quantizer in quantizers(model):
            quantizer.enabled = name in quantizer.consumers and "weight" in quantizer.name
        (row,) = sensitivity(model, batches())
        expected = 10 ** (-decibels(outputs(float_net(), batches()), outputs(model, batches())) / 10)
        assert row.score == pytest.approx(expected, rel=1e-3)

    def test_an_unused_branch_has_no_sensitivity(self):
        class Muted(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return self.a(x) + 1e-6 * self.b(x)

        x = torch.randn(16, 4)
        result = scores(sensitivity(quantize(Muted().eval(), x, config(), forward_loop=[x]), [x]))
        assert result["a"] > result["b"]

    def test_no_gradients_are_needed(self, model):
        with torch.inference_mode():
            inside = scores(sensitivity(model, batches()))
        assert inside == pytest.approx(scores(sensitivity(model, batches())))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_a_function_as_data(self, model):
        def loop(run):
            for batch in batches():
                run(batch)

        assert scores(sensitivity(model, loop)) == scores(sensitivity(model, batches()))

    def test_max_batches(self, model):
        assert scores(sensitivity(model, batches(3), max_batches=1)) == scores(sensitivity(model, batches(1)))


class TestFloatModel:
    @pytest.mark.parametrize("how", WAYS)
    def test_a_float_model_is_quantized_first_and_stays_unchanged(self, how):
        plain = float_net().train()
        before = snapshot(plain)
        rows = sensitivity(plain, batches(), how=how, target="tensorrt", config=None)
        same(before, snapshot(plain))
        expected = quantize(float_net(), batches()[0], forward_loop=batches(), target="tensorrt")
        assert scores(rows) == pytest.approx(scores(sensitivity(expected, batches(), how=how)), rel=1e-3)

    def test_inputs_by_name(self):
        rows = sensitivity(float_net(), [{"x": batch} for batch in batches()])
        assert sorted(row.name for row in rows) == sorted(NAMES)

    def test_a_function_as_data_is_refused_for_a_float_model(self):
        with pytest.raises(UsageError, match="first batch"):
            sensitivity(float_net(), lambda run: None)

    def test_an_iterator_is_refused_for_several_passes(self):
        with pytest.raises(UsageError, match="more than once"):
            sensitivity(float_net(), iter(batches()))


class TestRestoration:
    @pytest.mark.parametrize("how", WAYS)
    def test_the_model_stays_unchanged(self, how):
        model = quantized_net().train()
        quantizers(model)[0].enabled = False
        before = snapshot(model)
        sensitivity(model, batches(), how=how)
        same(before, snapshot(model))

    @pytest.mark.parametrize("how", WAYS)
    def test_the_model_stays_unchanged_if_the_data_raises(self, model, how):
        def broken():
            yield batches()[0]
            raise OSError("disk")

        before = snapshot(model)
        with pytest.raises(OSError, match="disk"):
            sensitivity(model, broken(), how=how)
        same(before, snapshot(model))

    def test_the_model_stays_unchanged_if_the_metric_raises(self, model):
        calls = []

        def metric(run):
            calls.append(run.train())
            if len(calls) == 3:
                raise ValueError("metric")
            return 0.0

        before = snapshot(model)
        with pytest.raises(ValueError, match="metric"):
            sensitivity(model, batches(), metric, how="one_at_a_time")
        same(before, snapshot(model))


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"how": "hessian"}, "'proxy' or 'one_at_a_time'"),
            ({"metric": len}, "metric.*one_at_a_time"),
            ({"limit": 0}, "got 0"),
            ({"limit": "2"}, "got '2'"),
            ({"metric": lambda run: None, "how": "one_at_a_time"}, "must return a number"),
        ],
        ids=["way", "metric", "limit", "text", "none"],
    )
    def test_options(self, model, options, message):
        with pytest.raises(UsageError, match=message):
            sensitivity(model, batches(), **options)

    @pytest.mark.parametrize("how", WAYS)
    def test_no_data(self, model, how):
        with pytest.raises(CalibrationError, match="0 batches"):
            sensitivity(model, [], how=how)
        with pytest.raises(CalibrationError, match="0 batches"):
            sensitivity(float_net(), [], how=how)

    def test_uncalibrated(self):
        result = transform(float_net(), batches()[0])
        with pytest.raises(UsageError, match="calibrate it first"):
            sensitivity(insert_qdq(result.model, result.matches, config()), batches())


def test_nan_comes_first_and_can_be_written_as_json(model):
    def metric(run):
        return (
            math.nan
            if any(quantizer.enabled for quantizer in quantizers(run) if "fourth" in quantizer.consumers)
            else 1.0
        )

    rows = sensitivity(model, batches(), metric, how="one_at_a_time")
    assert "fourth" in [row.name for row in rows if math.isnan(row.score)]
    assert math.isnan(rows[0].score)
    assert json.dumps([row.to_dict() for row in rows], allow_nan=False)
