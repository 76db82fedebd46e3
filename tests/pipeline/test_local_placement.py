"""Placement by times that are measured on this machine."""

import json
import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import onnx
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.pipeline import local_placement
from scalepoint.targets import measurement_cache
from scalepoint.targets.local_times import LocalTimes
from scalepoint.targets.measurement_cache import (
    MAX_AGE_DAYS,
    MAX_LAYERS,
    MAX_NETWORKS,
    MAX_SAMPLES,
    Measurements,
    add_measurements,
    load_measurements,
)
from scalepoint.verification import verify_file
from scalepoint.verification.layer_times import LayerTime
from scalepoint.verification.result import OWN_BASELINE, PLAIN_BASELINE, Benchmark

X = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)


adds_up = local_placement._adds_up


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SCALEPOINT_CACHE", str(folder))
    # Other programs on the machine of the tests must not decide what is stored.
    monkeypatch.setattr(local_placement, "_adds_up", lambda trial: True)
    monkeypatch.setattr(local_placement, "MAX_SPREAD", 1e6)
    monkeypatch.setattr(local_placement, "MAX_SPEED_LOSS", 0.9)
    return folder


def wide_net():
    """Layers that are faster in int8 on every CPU, and a small head that is not."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)).eval()


def tiny_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def deploy(model, x, folder, **options):
    options = {"placement": "measured", "progress": False, **options}
    return scalepoint.deploy(model, x, [x, x * 0.5], output=folder, **options)


@pytest.fixture
def times_as_told(monkeypatch):
    """Replace the measured times, so that the choice does not depend on the machine: every layer gets these seconds."""

    def use(float_seconds, int8_seconds, slow_layers=()):
        def measure(trial, keys):
            swapped = (int8_seconds, float_seconds)
            times = {
                key: swapped if name in slow_layers else (float_seconds, int8_seconds) for name, key in keys.items()
            }
            return LocalTimes(times, {"quantize": 1e-12, "dequantize": 1e-12})

        monkeypatch.setattr(local_placement, "_measure", measure)

    return use


@pytest.fixture
def speeds_as_told(monkeypatch):
    """Replace the measured speeds. Each file gets the next pair: times of the float files by baseline, and its own."""

    def use(*pairs, spread=0.0):
        iterator = iter(pairs)

        def measure(*args, **kwargs):
            (float_seconds, own_seconds), baseline = next(iterator), kwargs["baseline"]
            baseline = baseline or min(float_seconds, key=float_seconds.get)
            seconds = (float_seconds[baseline], own_seconds)
            return Benchmark(
                seconds[0] / own_seconds,
                seconds,
                1,
                50,
                "onnxruntime",
                baseline=baseline,
                float_seconds=float_seconds,
                spread=(spread, spread),
            )

        monkeypatch.setattr(verify_file, "benchmark", measure)

    return use


def float_layers(done):
    return {row.name for row in done.coverage.operations if row.is_for_speed}


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_the_profile_of_the_first_file_gives_times_of_all_its_layers(target, tmp_path, cache_folder):
    done = deploy(wide_net(), X, tmp_path / "out", target=target)
    assert done.verification.holds
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    assert target in path.name
    times = load_measurements(path).times()
    convolutions = [key for key in times.layers if key.startswith("conv")]
    assert len(convolutions) == 3
    assert all(float_seconds > 0 and int8_seconds > 0 for float_seconds, int8_seconds in map(times.get, convolutions))


def test_conversions_of_small_tensors_do_not_count_as_times_per_element(tmp_path, cache_folder):
    deploy(wide_net(), X, tmp_path / "wide")
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    before = load_measurements(path).times()
    assert 0 < before.conversions["quantize"] < 1e-8
    deploy(tiny_net(), torch.randn(1, 8), tmp_path / "tiny")
    after = load_measurements(path).times()
    assert after.conversions == before.conversions
    assert len(after.layers) > len(before.layers)


def test_layers_that_are_measured_as_slower_stay_float_in_the_next_file(tmp_path, times_as_told):
    times_as_told(1e-3, 1e-4, slow_layers=("0",))
    done = deploy(wide_net(), X, tmp_path / "out")
    changes = sorted([change.layer for change in trial.precision_changes] for trial in done.trials)
    assert changes == [[], ["0"]]  # all layers in int8; then the first layer float. The choice stays the same


def test_a_saved_model_loads_with_its_placement_on_a_machine_with_other_times(tmp_path, times_as_told):
    times_as_told(1e-4, 1e-3)
    done = deploy(tiny_net(), torch.randn(1, 8), tmp_path / "out")
    loaded = scalepoint.load(tmp_path / "out" / "quantized")
    assert scalepoint.coverage(loaded) == done.coverage
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), done.model(x))


def test_the_next_run_takes_the_times_of_the_cache_and_needs_one_file(tmp_path, times_as_told):
    times_as_told(1e-3, 1e-4)
    assert len(deploy(wide_net(), X, tmp_path / "first").trials) == 1
    again = deploy(wide_net(), X, tmp_path / "second")
    assert len(again.trials) == 1
    assert float_layers(again) == set()


def test_the_call_in_the_report_repeats_a_measured_placement_that_is_all_int8(tmp_path, times_as_told, monkeypatch):
    times_as_told(1e-3, 1e-4)
    done = deploy(wide_net(), X, tmp_path / "out", placement="measured")
    assert float_layers(done) == set()
    script = tmp_path / "again" / "again.py"
    script.parent.mkdir()
    monkeypatch.chdir(script.parent)
    script.write_text(done.report.reproduction.call)
    arguments = {"model": wide_net(), "example_inputs": X, "calibration_data": [X, X * 0.5]}
    again = runpy.run_path(str(script), init_globals=arguments)["done"]
    assert again.path.read_bytes() == done.path.read_bytes()


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_network_that_int8_makes_slower_stays_float(target, tmp_path, times_as_told, monkeypatch):
    times_as_told(1e-4, 1e-3)
    monkeypatch.setattr(local_placement, "_find_fastest", lambda trials: trials[-1])
    done = deploy(tiny_net(), torch.randn(1, 8), tmp_path / "out", target=target)
    assert float_layers(done) == {"0", "2"}
    assert all("measured on this machine" in row.reason for row in done.coverage.operations if row.is_for_speed)
    assert done.report.verdict().startswith("Nothing was quantized")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"smoke": True}, id="smoke measures nothing"),
        pytest.param({"placement": "predicted"}, id="predicted"),
        pytest.param({"placement": "int8"}, id="int8"),
        pytest.param({"target": "litert"}, id="another target"),
    ],
)
def test_only_measured_placement_makes_several_files_and_writes_the_cache(options, tmp_path, cache_folder):
    assert len(deploy(wide_net(), X, tmp_path / "out", **options).trials) == 1
    assert not cache_folder.exists()


def test_a_file_for_another_cpu_is_placed_by_the_shipped_tables(tmp_path, cache_folder, monkeypatch):
    monkeypatch.setattr(local_placement, "instruction_set", lambda: "another")
    assert len(deploy(wide_net(), X, tmp_path / "out").trials) == 1
    assert not cache_folder.exists()


def test_the_metric_is_called_for_the_float_model_and_the_chosen_file_only(tmp_path, times_as_told):
    times_as_told(1e-3, 1e-4, slow_layers=("0",))
    calls = []

    def evaluate(run):
        calls.append(run)
        return 1.0

    deploy(wide_net(), X, tmp_path / "out", evaluate=evaluate)
    assert len(calls) == 2


def test_a_resumed_run_plans_with_the_times_that_it_started_with(tmp_path, times_as_told, cache_folder, monkeypatch):
    times_as_told(1e-3, 1e-4, slow_layers=("0",))

    monkeypatch.setenv("INTERRUPTED", "yes")

    def evaluate(run):
        if "INTERRUPTED" in os.environ and not isinstance(run, nn.Module):
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        deploy(wide_net(), X, tmp_path / "out", evaluate=evaluate)
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    assert load_measurements(path).times().layers  # they would make the first file of a new run another one
    monkeypatch.delenv("INTERRUPTED")
    resumed = deploy(wide_net(), X, tmp_path / "out", evaluate=evaluate, resume=True)  # a warning would be an error
    assert len(resumed.trials) == 2


OTHER_FORMAT = json.dumps({"format": 99, "cpu": "", "measurements": {"layers": {}, "conversions": {}, "networks": {}}})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', OTHER_FORMAT, "[" * 100_000])
def test_a_damaged_file_of_times_is_ignored_and_written_again(text, tmp_path):
    path = tmp_path / "times.json"
    path.write_text(text)
    assert load_measurements(path) == Measurements()
    assert add_measurements(path, LocalTimes({"a": (1.0, 2.0)}, {"quantize": 1e-9}))
    assert load_measurements(path).times() == LocalTimes({"a": (1.0, 2.0)}, {"quantize": 1e-9})


def test_an_endless_file_of_times_is_not_read(tmp_path):
    path = tmp_path / "times.json"
    path.symlink_to("/dev/zero")
    assert load_measurements(path) == Measurements()


def test_a_layer_keeps_its_latest_samples_and_counts_with_their_median(tmp_path):
    path = tmp_path / "times.json"
    for int8_seconds in (9.0, 1.0, 1.0, 1.1, 1.0, 1.2):
        add_measurements(path, LocalTimes({"a": (2.0, int8_seconds)}))
    measurements = load_measurements(path)
    assert measurements.layers["a"] == ((2.0, 1.0), (2.0, 1.0), (2.0, 1.1), (2.0, 1.0), (2.0, 1.2))
    assert len(measurements.layers["a"]) == MAX_SAMPLES
    assert measurements.times().get("a") == (2.0, 1.0)


def test_a_layer_whose_samples_disagree_counts_as_unknown_until_most_agree():
    measurements = Measurements().with_times(LocalTimes({"a": (2e-3, 1e-3)}))
    assert measurements.are_known(["a"])
    assert not measurements.are_known(["a", "b"])
    disturbed = measurements.with_times(LocalTimes({"a": (2e-3, 9e-3)}))
    assert not disturbed.are_known(["a"])
    assert disturbed.with_times(LocalTimes({"a": (2e-3, 1.1e-3)})).are_known(["a"])


def test_the_file_of_times_has_a_largest_size():
    measurements = Measurements().with_times(LocalTimes({f"layer {i}": (1.0, 1.0) for i in range(MAX_LAYERS)}))
    measurements = measurements.with_times(LocalTimes({"new": (1.0, 1.0)}))
    assert len(measurements.layers) == MAX_LAYERS
    assert "layer 0" not in measurements.layers
    assert "new" in measurements.layers
    for i in range(MAX_NETWORKS + 1):
        measurements = measurements.with_network(f"network {i}", (), 1.0)
    assert list(measurements.networks) == [f"network {i}" for i in range(1, MAX_NETWORKS + 1)]


def test_processes_that_add_to_one_file_at_a_time_lose_nothing(tmp_path):
    path = tmp_path / "times.json"
    names = [f"layer {i}" for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda name: add_measurements(path, LocalTimes({name: (1.0, 1.0)})), names))
    assert all(results)
    assert sorted(load_measurements(path).layers) == sorted(names)


def test_what_was_measured_next_to_a_busy_program_is_not_stored(tmp_path, cache_folder, monkeypatch):
    monkeypatch.setattr(local_placement, "MAX_SPREAD", -1.0)
    deploy(wide_net(), X, tmp_path / "out")
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    assert load_measurements(path) == Measurements()


def test_times_that_do_not_add_up_to_the_speed_of_the_file_are_not_stored(tmp_path):
    (trial,) = deploy(wide_net(), X, tmp_path / "out", placement="int8").trials
    verification = trial.verification
    rows = (LayerTime("0", seconds=1e-3, float_seconds=1e-3 * verification.latency.ratio),)
    quiet = replace(trial, verification=replace(verification, times=rows))
    busy = replace(trial, verification=replace(verification, times=(replace(rows[0], seconds=2e-3),)))
    assert adds_up(quiet)
    assert not adds_up(busy)


def change_record(cache_folder, **changes):
    """Change the record of the only network in the only cache file."""
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    content = json.loads(path.read_text())
    (record,) = content["measurements"]["networks"].values()
    record.update(changes)
    path.write_text(json.dumps(content))
    return path


def test_the_next_run_takes_the_fastest_placement_also_if_the_times_say_otherwise(tmp_path, times_as_told, monkeypatch):
    times_as_told(1e-4, 1e-3)
    monkeypatch.setattr(local_placement, "_find_fastest", lambda trials: trials[0])
    first = deploy(wide_net(), X, tmp_path / "first")
    assert len(first.trials) == 2
    assert float_layers(first) == set()
    again = deploy(wide_net(), X, tmp_path / "second")
    assert len(again.trials) == 1
    assert float_layers(again) == set()


def test_a_file_that_is_slower_than_the_cache_says_is_measured_again(tmp_path, times_as_told, cache_folder):
    times_as_told(1e-3, 1e-4)
    deploy(wide_net(), X, tmp_path / "first")
    path = change_record(cache_folder, speeds=[1000.0], float_layers=[0, 1, 2, 3])
    assert len(deploy(wide_net(), X, tmp_path / "second").trials) == 2
    (record,) = load_measurements(path).networks.values()
    assert record.speed < 1000
    assert record.float_layers == ()


def test_a_network_is_measured_again_after_some_time(tmp_path, times_as_told, cache_folder):
    times_as_told(1e-4, 1e-3)
    deploy(wide_net(), X, tmp_path / "first")
    path = change_record(cache_folder, last_day=measurement_cache.today() - 1)
    assert len(deploy(wide_net(), X, tmp_path / "second").trials) == 2
    (record,) = load_measurements(path).networks.values()
    assert record.last_day == measurement_cache.today() + MAX_AGE_DAYS


def test_a_choice_by_a_disturbed_profile_is_measured_again_the_day_after(
    tmp_path, times_as_told, cache_folder, monkeypatch
):
    times_as_told(1e-4, 1e-3)
    monkeypatch.setattr(local_placement, "_adds_up", lambda trial: trial.number > 0)
    done = deploy(wide_net(), X, tmp_path / "first")
    assert len(done.trials) == 2
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    (record,) = load_measurements(path).networks.values()
    assert record.last_day == measurement_cache.today() + 1
    assert len(deploy(wide_net(), X, tmp_path / "same-day").trials) == 1
    change_record(cache_folder, last_day=measurement_cache.today() - 1)
    monkeypatch.setattr(local_placement, "_adds_up", lambda trial: True)
    assert len(deploy(wide_net(), X, tmp_path / "later").trials) == 2
    (record,) = load_measurements(path).networks.values()
    assert record.last_day == measurement_cache.today() + MAX_AGE_DAYS


def test_a_network_stays_float_if_every_file_with_an_int8_layer_is_slower(tmp_path, times_as_told, monkeypatch):
    times_as_told(1e-3, 1e-4)  # as coarse times of very short layers may say
    monkeypatch.setattr(local_placement, "MIN_SPEED", 1e6)
    done = deploy(wide_net(), X, tmp_path / "out")
    assert len(done.trials) == 2
    last_changes = max((trial.precision_changes for trial in done.trials), key=len)
    assert {change.to for change in last_changes} == {"float"}
    assert {change.layer for change in last_changes} >= {row.name for row in done.coverage.operations}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_of_an_onnx_file_stay_float_if_our_float_file_is_faster_than_int8(
    tmp_path, times_as_told, speeds_as_told
):
    times_as_told(1e-3, 1e-4)
    speeds_as_told(
        ({OWN_BASELINE: 1.0, PLAIN_BASELINE: 1.3}, 1.2),  # int8 is faster than the given file, but not than ours
        ({OWN_BASELINE: 1.0, PLAIN_BASELINE: 1.3}, 1.0),
    )
    path = tmp_path / "net.onnx"
    torch.onnx.export(wide_net(), (X,), path, dynamo=False)
    done = deploy(path, X, tmp_path / "out")
    assert done.verification.latency.baseline == PLAIN_BASELINE
    assert len(done.trials) == 2
    assert len(float_layers(done)) == 4
    assert done.verification.latency.ratio == pytest.approx(1.3)


@pytest.mark.parametrize(("spread", "trials"), [(0.05, 1), (0.5, 2)])
def test_a_file_that_is_faster_within_the_noise_only_is_compared_with_one_in_float(
    spread, trials, tmp_path, times_as_told, speeds_as_told
):
    times_as_told(1e-3, 1e-4)
    speeds_as_told(({OWN_BASELINE: 1.0}, 0.98), ({OWN_BASELINE: 1.0}, 1.0), spread=spread)
    assert len(deploy(wide_net(), X, tmp_path / "out").trials) == trials


def test_the_file_in_float_is_the_last_one_also_if_the_times_ask_for_another(tmp_path, monkeypatch, speeds_as_told):
    slow_layers = iter(("0", "2", "4", "8", "0"))

    def measure(trial, keys):
        slow = next(slow_layers)
        seconds = {key: (1e-4, 1e-3) if name == slow else (1e-3, 1e-4) for name, key in keys.items()}
        return LocalTimes(seconds, {"quantize": 1e-12, "dequantize": 1e-12})

    monkeypatch.setattr(local_placement, "_measure", measure)
    speeds_as_told(*[({OWN_BASELINE: 1.0}, 1.1)] * 3, *[({OWN_BASELINE: 1.0}, 1.0)] * 2)
    done = deploy(wide_net(), X, tmp_path / "out")
    assert len(done.trials) <= local_placement.MAX_TRIALS + 1
    assert len(float_layers(done)) == 4


def test_a_file_that_was_faster_than_float_once_and_is_slower_now_is_measured_again(
    tmp_path, times_as_told, speeds_as_told
):
    times_as_told(1e-3, 1e-4)
    speeds_as_told(({OWN_BASELINE: 1.0}, 0.95))
    assert len(deploy(wide_net(), X, tmp_path / "first").trials) == 1
    speeds_as_told(({OWN_BASELINE: 1.0}, 1.05), ({OWN_BASELINE: 1.0}, 1.0))
    done = deploy(wide_net(), X, tmp_path / "second")
    assert len(done.trials) == 2
    assert len(float_layers(done)) == 4


def test_the_given_onnx_file_is_timed_with_its_fixed_inputs(tmp_path):
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["a"]),
        onnx.helper.make_node("Mul", ["a", "gain"], ["y"]),
    ]
    inputs = [
        onnx.helper.make_tensor_value_info("gain", onnx.TensorProto.FLOAT, []),
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 64, 64]),
    ]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 64, 62, 62])]
    weight = onnx.numpy_helper.from_array(torch.randn(64, 3, 3, 3).numpy(), "w")
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "net", inputs, outputs, [weight]),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    done = deploy(path, X, tmp_path / "out", fixed_inputs={"gain": 2.0}, placement="int8")
    assert done.verification.latency.baseline == PLAIN_BASELINE
    assert done.verification.latency.float_seconds.keys() == {OWN_BASELINE, PLAIN_BASELINE}


def test_times_of_other_networks_do_not_leave_all_layers_float_without_a_trial_in_int8(
    tmp_path, times_as_told, cache_folder
):
    times_as_told(1e-4, 1e-3)
    deploy(wide_net(), X, tmp_path / "first")
    (path,) = (cache_folder / "kernel-times").glob("*.json")
    content = json.loads(path.read_text())
    content["measurements"]["networks"] = {}
    path.write_text(json.dumps(content))
    changes = [trial.precision_changes for trial in deploy(wide_net(), X, tmp_path / "second").trials]
    assert len(changes) == 2
    assert any(change.to == "int8" for trial in changes for change in trial)


def test_a_cache_folder_that_cannot_be_written_costs_only_the_times(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCALEPOINT_CACHE", str(tmp_path / "file"))
    done = deploy(wide_net(), X, tmp_path / "out", progress=True)
    assert done.verification.holds
    assert "are not kept" in capsys.readouterr().err
