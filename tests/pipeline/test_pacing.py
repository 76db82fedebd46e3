"""min_speed: layers that lose time in the runtime go to float, and the files are judged by their measured speed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import UsageError
from scalepoint.pipeline.result import Limits, Trial, best_trial
from scalepoint.pipeline.search import next_for_speed
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.report import write
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import Benchmark, Status, Verification
from scalepoint.verification.layer_times import LayerTime

ALL = QuantConfig(speed_first=False)


class Net(nn.Module):
    """A wide depthwise stem, in which int8 is slow on any CPU, and a body in which it is fast."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 5, padding=2, groups=3)
        self.body = nn.Conv2d(48, 64, 3, 2)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))).mean((2, 3)))


@pytest.fixture(scope="module")
def quantized_model():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 24, 24)
    return quantize(Net().eval(), x, ALL, forward_loop=[x], target=onnxruntime_target("vnni"), freeze_weights=True)


def row(name, before, after, kernel="QLinearConv"):
    return LayerTime(name, after * 1e-6, None if before is None else before * 1e-6, (kernel,))


def trial(model, times=(), speed=1.0, config=ALL):
    latency = Benchmark(speed, (speed * 1e-3, 1e-3), threads=1, repeats=1, runtime="onnxruntime")
    verification = Verification(path="file", runtime="onnxruntime", status=Status.OK, latency=latency, times=times)
    return Trial(config, model, Path("file"), Path("float"), verification, None)


def moved(step):
    return [override.name for override in step.config.overrides]


def test_layers_that_are_slower_in_int8_become_float(quantized_model):
    times = (row("stem", 10, 30), row("body", 90, 40), row("head", 2, 3), row("input_quant", None, 4, "QuantizeLinear"))
    step = next_for_speed([trial(quantized_model, times)])
    assert moved(step) == ["stem"]  # what the head loses is noise
    assert [(change.layer, change.to) for change in step.precision_changes] == [("stem", "float")]
    assert step.start == 0


def test_without_slower_layers_those_become_float_that_gain_less_than_conversions_cost(quantized_model):
    times = (row("stem", 12, 10), row("body", 90, 40), row("convert", None, 9, "DequantizeLinear"))
    assert moved(next_for_speed([trial(quantized_model, times)])) == ["stem"]


def test_no_other_file_is_tried_if_all_layers_gain(quantized_model):
    assert next_for_speed([trial(quantized_model, (row("stem", 20, 10), row("body", 90, 40)))]) is None
    assert next_for_speed([trial(quantized_model)]) is None  # nothing was profiled


def test_float_layers_are_not_changed_again(quantized_model):
    times = (row("stem", 10, 30), row("body", 90, 40))
    step = next_for_speed([trial(quantized_model, times)])
    assert next_for_speed([trial(quantized_model, times, config=step.config)]) is None


def test_the_largest_weight_stays_quantized(quantized_model):
    times = (row("stem", 10, 30), row("body", 40, 90), row("head", 10, 20))
    assert set(moved(next_for_speed([trial(quantized_model, times)]))) == {"stem", "head"}


def test_a_file_that_is_as_fast_as_float_within_the_noise_reaches_1():
    same, slower = trial(None, speed=0.98), trial(None, speed=0.9)
    assert best_trial([slower, same], Limits(None, None, min_speed=1.0)) is same
    assert Limits(None, None, min_speed=1.0).allows_speed(same.verification)
    assert not Limits(None, None, min_speed=1.0).allows_speed(slower.verification)
    assert not Limits(None, None, min_speed=1.01).allows_speed(same.verification)


def test_the_best_file_is_the_first_that_is_fast_enough_or_the_fastest():
    trials = [trial(None, speed=speed) for speed in (0.8, 1.3, 1.2)]
    assert best_trial(trials, Limits(None, None, min_speed=1.1)) is trials[1]
    assert best_trial(trials, Limits(None, None, min_speed=2.0)) is trials[1]
    assert best_trial(trials[::2], Limits(None, None, min_speed=1.0)) is trials[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"min_speed": 0.0}, "more than 0", id="nothing"),
        pytest.param({"min_speed": 1.0, "budget": "bits=4"}, "Pass one of them", id="with a budget"),
        pytest.param({"min_speed": 1.0, "smoke": True}, "smoke=True: a smoke run measures no time", id="smoke"),
        pytest.param({"min_speed": 1.0, "target": "tensorrt"}, "tensorrt.*no runtime", id="no runtime"),
    ],
)
def test_min_speed_without_a_profiler_is_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        scalepoint.deploy(Net(), torch.randn(1, 3, 24, 24), [], output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_iterator_is_refused(tmp_path):
    with pytest.raises(UsageError, match="reads the data several times"):
        scalepoint.deploy(Net(), torch.randn(1, 3, 24, 24), iter([]), output=tmp_path, min_speed=1.0)


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 96, 96)
    folder = tmp_path_factory.mktemp("paced")
    unreachable = 1000.0
    return scalepoint.deploy(
        Net().eval(), x, [x], config=ALL, output=folder, min_speed=unreachable, max_trials=2, progress=False
    )


def test_layers_that_the_profiler_measures_as_slow_become_float(paced):
    first, second = paced.trials
    assert second.float_layers  # which, the profiler says: it depends on the machine
    fastest = max(paced.trials, key=lambda trial: trial.speed)
    assert paced.verification.latency.ratio == fastest.speed
    assert [trial.speed for trial in paced.report.trials] == [first.speed, second.speed]


def test_the_report_says_whether_it_is_fast_enough(paced, tmp_path):
    assert "less than the required 1000.00x" in str(paced)
    write(paced.report, tmp_path)
    assert "less than the required 1000.00x: 2 files tried" in (tmp_path / "report.html").read_text()
    assert "at least the required 0.01x" in str(replace(paced.report, min_speed=0.01))


def test_a_net_without_quantized_layers_has_no_further_trial(tmp_path):
    """All of it stays float for speed: no other file can be faster."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval(), torch.randn(4, 3, 12, 12)
    done = scalepoint.deploy(
        model, x, [x], output=tmp_path / "out", min_speed=100, max_trials=2, placement="predicted", progress=False
    )
    assert not any(row.precision != "float" for row in done.coverage.operations)
    assert len(done.report.trials) == 1
