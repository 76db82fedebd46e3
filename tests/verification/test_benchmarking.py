"""Speed of files in one process, with interleaved runs; the baseline is the faster float file."""

import statistics
import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from scalepoint import benchmark, export, verify
from scalepoint.errors import UsageError, VerificationError
from scalepoint.formats import ExportRequest, find_format
from scalepoint.quantize import quantize
from scalepoint.runtimes import Runtime, find_runtime
from scalepoint.runtimes.child_loop import CHECKED_ROUNDS, _is_precise
from scalepoint.verification import benchmarking
from scalepoint.verification.benchmarking import baseline_file, make_random_inputs, throughput
from scalepoint.verification.file_formats import find_runtime_for
from scalepoint.verification.result import Benchmark
from tests.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Scores(nn.Module):
    """Model with nested inputs and outputs and a number as input, which torch.onnx.export alone does not accept."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, inputs: dict, scale: float = 1.0, *, offset: Tensor) -> dict:
        return {"scores": self.b(torch.relu(self.a(inputs["x"]))) * scale + offset}


ARGS, KWARGS = ({"x": torch.randn(4, 32)},), {"scale": 2.0, "offset": torch.randn(4, 8)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("timed"), Scores().eval()
    quantized = quantize(
        model, ARGS, forward_loop=lambda run: run(*ARGS, **KWARGS), target="onnxruntime", kwargs=KWARGS
    )
    export(quantized, folder / "m.onnx", ARGS, kwargs=KWARGS, float_path=folder / "float.onnx")
    return model, quantized, folder


def test_a_measurement_states_batch_shapes_threads_and_spread(files):
    _, quantized, folder = files
    path = folder / "m.onnx"
    result = verify(path, quantized, ARGS, kwargs=KWARGS, float_path=folder / "float.onnx", threads=1).latency
    assert result.shapes == {"inputs_x": (4, 32), "offset": (4, 8)}
    assert result.batch == 4
    assert result.baseline == "the float file"
    assert all(spread > 0 for spread in result.spread)
    assert "onnxruntime, 1 thread, inputs_x 4x32, offset 4x8, medians of" in str(result)
    assert "interleaved runs, quartiles within" in str(result)


def test_an_input_without_a_batch_does_not_fix_the_batch_of_the_others(tmp_path):
    inputs = [helper.make_tensor_value_info("x", 1, ["batch", 3]), helper.make_tensor_value_info("anchors", 1, [3])]
    outputs = [helper.make_tensor_value_info("y", 1, ["batch", 3])]
    graph = helper.make_graph([helper.make_node("Add", ["x", "anchors"], ["y"])], "g", inputs, outputs)
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    feeds = make_random_inputs(tmp_path / "m.onnx", find_runtime("onnxruntime"), batch=8)
    assert {name: value.shape for name, value in feeds.items()} == {"x": (8, 3), "anchors": (3,)}


def test_throughput_is_measured_per_batch_size_and_needs_a_free_batch(files, tmp_path):
    _, quantized, folder = files
    first, second = throughput(folder / "float.onnx", folder / "m.onnx", batches=(2, 16), repeats=3)
    assert (first.batch, second.batch) == (2, 16)
    assert second.per_second == tuple(16 / seconds for seconds in second.seconds)
    export(quantized, tmp_path / "m.onnx", ARGS, kwargs=KWARGS, dynamic=False)
    with raises(UsageError, "batches of 4", "16", "free batch"):
        throughput(tmp_path / "m.onnx", tmp_path / "m.onnx", batches=(4, 16), repeats=3)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_file_with_free_sizes_is_measured_with_fixed_sizes_too(files, tmp_path, runtime, monkeypatch):
    _, quantized, folder = files
    free = folder / "float.onnx"
    assert benchmark(free, free, runtime=runtime, repeats=5).fixed_seconds > 0
    export(quantized, tmp_path / "m.onnx", ARGS, kwargs=KWARGS, float_path=tmp_path / "float.onnx", dynamic=False)
    fixed = tmp_path / "float.onnx"
    assert benchmark(fixed, fixed, runtime=runtime, repeats=5).fixed_seconds is None
    monkeypatch.setattr(benchmarking, "MAX_FIXED_SECONDS", 1e-9)
    assert benchmark(free, free, runtime=runtime, repeats=5).fixed_seconds is None


def test_the_cost_of_free_sizes_is_said_with_the_option_if_it_is_more_than_noise():
    latency = Benchmark(1.0, (1e-4, 1e-4), 1, 50, "onnxruntime", fixed_seconds=8e-5)
    assert "100 us, but 80 us" in latency.free_sizes_text
    assert "--fixed-sizes" in latency.free_sizes_text
    for other in ({"fixed_seconds": None}, {"fixed_seconds": 9.6e-5}, {"spread": (0.1, 0.6)}):
        assert not replace(latency, **other).free_sizes_text


def test_the_plain_file_has_the_free_axes_of_the_float_file(files):
    model, _, folder = files
    file_format = find_format("onnx")
    free_axes = file_format.about(folder / "float.onnx").free_axes
    assert free_axes == {"inputs_x": (0,), "offset": (0,)}
    request = ExportRequest((ARGS, KWARGS), names=("inputs_x", "offset"), free_axes=free_axes)
    with baseline_file(model, file_format, request) as path:
        assert file_format.about(path).free_axes == free_axes


def test_the_plain_exporter_accepts_the_inputs_of_deploy(files):
    model, *_ = files
    with baseline_file(model, find_format("onnx"), ExportRequest((ARGS, KWARGS), names=("inputs_x", "offset"))) as path:
        assert [info.name for info in find_format("onnx").about(path).inputs] == ["inputs_x", "offset"]
    assert not path.exists()


def test_a_model_that_the_plain_exporter_refuses_has_no_plain_file(capfd):
    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    with baseline_file(Bessel(), find_format("onnx"), ExportRequest(((torch.randn(2),), {}))) as path:
        assert path is None
    assert capfd.readouterr().out == ""


CHILD = """
import time


class File:
    def __init__(self, path, options):
        *self.disturbed, self.seconds = map(float, open(path).read().split())  # the first runs after the warm-up
        self.inputs, self.runs = ["x"], 0

    def run(self, feeds):
        self.runs += 1
        is_disturbed = 2 < self.runs <= 2 + len(self.disturbed)
        end = time.process_time() + (self.disturbed[self.runs - 3] if is_disturbed else self.seconds)
        while time.process_time() < end:
            pass
        return []
"""


@pytest.fixture
def timed(tmp_path):
    """Function that compares files of a runtime in which a file contains the seconds that its run takes."""
    (tmp_path / "child.py").write_text(CHILD)
    runtime = Runtime("clock", "numpy", tmp_path / "child.py", ("onnx",))
    for name, seconds in (("slow", 0.02), ("fast", 0.01), ("quantized", 0.005)):
        (tmp_path / f"{name}.onnx").write_text(str(seconds))
    (tmp_path / "broken.onnx").write_text("not a number")

    def run(first, second, plain=None, baseline=None, **limits):
        names = (tmp_path / f"{name}.onnx" for name in (first, second))
        feeds = {"x": torch.zeros(3, 2).numpy()}
        plain_path = None if plain is None else tmp_path / f"{plain}.onnx"
        limits = {"repeats": 5, "seconds": 1, **limits}
        return benchmark(*names, feeds, runtime=runtime, plain_path=plain_path, baseline=baseline, **limits)

    return run


@pytest.mark.parametrize(
    ("float_file", "plain", "baseline", "fastest", "ratio"),
    [
        ("slow", "fast", "the plain export", "fast.onnx", 2),
        ("fast", "slow", "the float file", "fast.onnx", 2),
        ("slow", None, "the float file", "slow.onnx", 4),
        ("slow", "broken", "the float file", "slow.onnx", 4),
    ],
    ids=["plain is faster", "float file is faster", "no plain file", "plain does not run"],
)
def test_the_baseline_is_the_faster_float_file_that_runs(timed, float_file, plain, baseline, fastest, ratio):
    result = timed(float_file, "quantized", plain)
    assert result.baseline == baseline
    assert result.baseline_file == fastest
    assert fastest in result.baseline_text
    assert result.ratio == pytest.approx(ratio, rel=0.4)
    assert f"of {baseline}'s speed" in str(result)


@pytest.mark.parametrize("baseline", [None, "the plain export"])
def test_if_the_float_file_does_not_run_the_plain_export_is_the_baseline(timed, baseline):
    result = timed("broken", "quantized", "fast", baseline=baseline)
    assert (result.baseline, result.baseline_file) == ("the plain export", "fast.onnx")
    assert list(result.float_seconds) == ["the plain export"]
    assert result.ratio == pytest.approx(2, rel=0.4)


def test_if_the_fixed_baseline_does_not_run_the_float_file_is_the_baseline(timed):
    result = timed("slow", "quantized", "broken", baseline="the plain export")
    assert (result.baseline, result.baseline_file) == ("the float file", "slow.onnx")


def test_inputs_are_matched_by_name_before_the_others_are_matched_in_order(files, tmp_path):
    _, _, folder = files
    inputs = [
        helper.make_tensor_value_info("X", 1, [4, 32]),
        helper.make_tensor_value_info("sr", 7, []),  # only this file has it
        helper.make_tensor_value_info("State", 1, [4, 8]),
    ]
    nodes = [
        helper.make_node("Cast", ["sr"], ["rate"], to=1),
        helper.make_node("Mul", ["X", "rate"], ["y"]),
        helper.make_node("Identity", ["State"], ["z"]),
    ]
    outputs = [helper.make_tensor_value_info("y", 1, [4, 32]), helper.make_tensor_value_info("z", 1, [4, 8])]
    opsets, graph = [helper.make_opsetid("", 17)], helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "plain.onnx")
    result = benchmark(
        folder / "float.onnx",
        folder / "m.onnx",
        {"inputs_x": torch.randn(4, 32).numpy(), "offset": torch.randn(4, 8).numpy()},
        plain_path=tmp_path / "plain.onnx",
        plain_inputs={"sr": np.array(16000)},
        repeats=5,
    )
    assert "the plain export" in result.float_seconds


def test_the_baseline_can_be_fixed_for_a_series_of_measurements(timed):
    result = timed("slow", "quantized", "fast", baseline="the float file")
    assert (result.baseline, result.baseline_file) == ("the float file", "slow.onnx")
    assert result.ratio == pytest.approx(4, rel=0.4)


def test_with_a_fixed_baseline_the_ratio_to_a_faster_float_file_is_known_too(timed):
    result = timed("fast", "quantized", "slow", baseline="the plain export")
    assert result.ratio == pytest.approx(4, rel=0.4)
    assert result.ratio_to_fastest == pytest.approx(2, rel=0.4)


def test_rounds_next_to_a_busy_program_do_not_change_the_ratio(timed, tmp_path):
    """Six of eleven runs of one file and five of the other are slower: their medians differ by a factor of 3."""
    (tmp_path / "busy.onnx").write_text(" ".join(["0.06"] * 6 + ["0.02"]))
    (tmp_path / "calm.onnx").write_text(" ".join(["0.06"] * 5 + ["0.02"]))
    assert timed("busy", "calm", repeats=11, seconds=60).ratio == pytest.approx(1, rel=0.4)


def test_a_benchmark_stops_when_the_ratio_is_known(timed):
    rough, exact = (timed("slow", "quantized", repeats=18, seconds=60, precision=share) for share in (0.5, 0))
    assert rough.repeats < exact.repeats == 18
    assert rough.ratio == pytest.approx(4, rel=0.4)


def test_the_interval_of_a_ratio_contains_its_median_at_every_look():
    generator = np.random.default_rng(0)

    def measure(level):
        """Rounds and ratio of one measurement with heavy-tailed noise; the true ratio is 1."""
        times = [[], []]
        while len(times[0]) < 50:
            for file_times in times:
                file_times.append(1 + generator.exponential(level) + (generator.random() < 0.05))
            if len(times[0]) in CHECKED_ROUNDS and _is_precise(times, 0.02):
                break
        return len(times[0]), statistics.median(times[0]) / statistics.median(times[1])

    quiet, noisy = ([measure(level) for _ in range(300)] for level in (0.01, 0.1))
    assert statistics.mean(rounds for rounds, _ in quiet) < 30
    assert statistics.mean(rounds for rounds, _ in noisy) == 50
    wrong = [ratio for rounds, ratio in quiet if rounds < 50 and abs(ratio - 1) > 0.02]
    assert len(wrong) <= 0.05 * len(quiet)


def test_an_unknown_baseline_is_refused(timed):
    with pytest.raises(UsageError, match="did you mean 'the plain export'"):
        timed("slow", "quantized", "fast", baseline="plain export")


def test_a_file_that_does_not_run_is_an_error(timed):
    start = time.monotonic()
    with raises(VerificationError, "clock", "failed"):
        timed("slow", "broken")
    assert time.monotonic() - start < 60


def test_the_runtime_follows_from_the_suffix_of_the_file():
    expected = {"a.onnx": "onnxruntime", "a.pte": "executorch", "a.tflite": "litert"}
    assert {name: find_runtime_for(name).name for name in expected} == expected
    with raises(UsageError, "a.bin", ".onnx, .pte"):
        find_runtime_for("a.bin")
