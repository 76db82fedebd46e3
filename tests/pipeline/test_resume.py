"""An interrupted run continues after its last finished stage; stages whose inputs changed are named and run again."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointWarning, StoreError, UsageError
from scalepoint.pipeline import cache as caches
from scalepoint.pipeline import context, stages
from scalepoint.quantize import QuantConfig
from scalepoint.support.files import folder_locked
from scalepoint.targets import find_target

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MINMAX = find_target("onnxruntime").activation.replace(qparam_calculator_cls="global_minmax")
STAGES = ("capture_for_plan", "calibrate", "export", "verify", "score")


class Stop(KeyboardInterrupt):
    """An interrupt as from Ctrl-C."""


class Tiny(nn.Sequential):
    """Two convolutions: the tests are about the pipeline, not about the network."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.fixture(scope="module")
def model():
    return Tiny().eval()


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]


class Counter:
    """How often each step really ran; one that is named in `stop` is interrupted: that it is begun is then known."""

    def __init__(self, patch):
        self.counts: dict[str, int] = {}
        self.stop: list[str] = []
        for name in STAGES[:-1]:
            module = context if name == "capture_for_plan" else stages
            patch.setattr(module, name, self.counting(name, getattr(module, name)))

    def counting(self, name, function):
        def run(*args, **kwargs):
            self.reached(name)
            return function(*args, **kwargs)

        return run

    def reached(self, name):
        if name in self.stop:
            raise Stop
        self.counts[name] = self.counts.get(name, 0) + 1


def make_runner(model, data, counter, output):
    def evaluate(run):
        counter.reached("score")
        return float(run(data[0]).mean())

    def deploy(**changes):
        counter.counts.clear()
        arguments = {"model": model, "example_inputs": data[0][:1], "calibration_data": data, "output": output}
        return scalepoint.deploy(**{**arguments, "evaluate": evaluate, **changes})

    return deploy


@pytest.fixture
def counter(monkeypatch):
    return Counter(monkeypatch)


@pytest.fixture
def run(model, data, tmp_path, counter):
    return make_runner(model, data, counter, tmp_path / "out")


@pytest.fixture(scope="module")
def saved(model, data, tmp_path_factory):
    """A run that ended when all stages were done but the report, and the file of one that did not."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        run = make_runner(model, data, Counter(patch), folder / "out")
        uninterrupted = run(output=folder / "whole")
        patch.setattr(stages, "publish", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            run()
    assert [path.name for path in (folder / "out").iterdir()] == [".scalepoint"]
    return folder / "out", uninterrupted.path


@pytest.fixture
def unfinished(saved, tmp_path):
    """A copy of that run to go on with."""
    return Path(shutil.copytree(saved[0], tmp_path / "out"))


def run_and_list_warnings(run, **changes):
    """The deployment, and all that it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ScalepointWarning)
        done = run(resume=True, **changes)
    return done, [str(warning.message) for warning in caught if isinstance(warning.message, ScalepointWarning)]


@pytest.mark.parametrize(
    "stage_index",
    [
        pytest.param(stage_index, id=STAGES[stage_index], marks=() if stage_index == 2 else pytest.mark.slow)
        for stage_index in (1, 2, 3)
    ],
)
def test_an_interrupted_stage_is_the_first_that_runs(run, counter, stage_index, tmp_path):
    counter.stop.append(STAGES[stage_index])
    with pytest.raises(Stop):
        run()
    work = tmp_path / "out" / ".scalepoint"
    assert not list(work.rglob(".tmp-*"))
    counter.stop.clear()
    done = run(resume=True)
    assert set(counter.counts) - {"capture_for_plan"} == set(STAGES[stage_index:])
    assert done.verification.holds
    assert not work.exists()


def test_a_run_can_be_resumed_after_its_metric_was_corrected(run, counter, data):
    """The metric runs on the float model, then on the file: all earlier stages are reused when the run is resumed."""
    scores = []

    def evaluate(run):
        if len(scores) == 1 and isinstance(scores[0], float):
            scores.append(None)
            raise ZeroDivisionError
        scores.append(1.0)
        return 1.0

    with pytest.raises(ZeroDivisionError):
        run(evaluate=evaluate)
    done = run(evaluate=evaluate, resume=True)
    assert (done.score, counter.counts) == (1.0, {})


def test_an_interrupt_before_the_first_stage_leaves_no_files(run, counter, tmp_path):
    counter.stop.append("capture_for_plan")
    with pytest.raises(Stop):
        run(evaluate=None)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(Stop):
        run(evaluate=None, force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_no_stage_runs_twice_and_the_file_is_the_same(run, counter, unfinished, saved):
    done = run(resume=True)
    assert counter.counts == {}
    assert done.path.read_bytes() == saved[1].read_bytes()
    assert done.score is not None
    assert not (unfinished / ".scalepoint").exists()


def test_without_resume_every_stage_runs_again(run, counter, unfinished):
    counter.stop.append("calibrate")
    with pytest.raises(Stop):
        run(force=True)


def other_model(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        next(changed.parameters()).mul_(1.01)
    return changed


DATA_CHANGED = "the calibration data changed"


@pytest.mark.parametrize(
    ("change", "expected_text", "again"),
    [
        pytest.param(*case, id=name, marks=() if name in ("model", "config", "metric") else pytest.mark.slow)
        for name, case in {
            "model": (lambda model, data: {"model": other_model(model)}, "the model changed", "calibrate"),
            "data": (lambda model, data: {"calibration_data": data[:1]}, DATA_CHANGED, "calibrate"),
            "iterator": (lambda model, data: {"calibration_data": iter(data)}, DATA_CHANGED, "calibrate"),
            "config": (
                lambda model, data: {"config": QuantConfig(activation=MINMAX)},
                "the config changed",
                "calibrate",
            ),
            "batches": (lambda model, data: {"max_batches": 1}, "max_batches changed", "calibrate"),
            "example": (lambda model, data: {"example_inputs": data[0][:2]}, "the example inputs changed", "verify"),
            "threads": (lambda model, data: {"threads": 2}, "verified: threads changed", "verify"),
            "metric": (lambda model, data: {"evaluate": lambda run: 3.0}, "the metric changed", None),
        }.items()
    ],
)
def test_stages_with_changed_inputs_are_named_and_run_again(
    run, counter, unfinished, model, data, change, expected_text, again
):
    done, messages = run_and_list_warnings(run, **change(model, data))
    assert any(expected_text in message for message in messages)
    assert all(expected_text.split(": ")[-1] in message for message in messages)  # nothing else is named
    assert counter.counts.get(again, 0) == (again is not None)
    assert done.verification is not None


def test_another_version_of_scalepoint_is_named(run, counter, unfinished, monkeypatch):
    monkeypatch.setitem(stages.PACKAGE_VERSIONS, "torch", "9.9")
    _, messages = run_and_list_warnings(run)
    assert any("quantized: torch changed" in message for message in messages)
    assert counter.counts["calibrate"] == 1


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("trial-0/quantized/scalepoint.json", {"capture_for_plan", "calibrate"}),
        ("trial-0/quantized/tensors-*", {"capture_for_plan", "calibrate"}),
        ("trial-0/model.onnx", {"export"}),
        ("float.onnx", {"export"}),
    ],
)
@pytest.mark.parametrize("damage", ["cut", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_damaged_stage_is_reported_and_runs_again(run, counter, unfinished, name, again, damage):
    path = next((unfinished / ".scalepoint").glob(name))
    path.write_bytes(path.read_bytes()[:-10]) if damage == "cut" else path.unlink()
    done, messages = run_and_list_warnings(run)
    assert len(messages) == 1
    assert "runs again" in messages[0]
    assert set(counter.counts) == again
    assert done.verification.holds


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "stages": {}}', '{"stages": {"a": 1}}', "\0"])
def test_a_damaged_cache_is_reported_and_every_stage_runs_again(run, counter, unfinished, text):
    (unfinished / ".scalepoint" / caches.JOURNAL_FILE).write_text(text)
    counter.stop.append("calibrate")
    with pytest.warns(ScalepointWarning, match="from the beginning"), pytest.raises(Stop):
        run(resume=True)


def test_an_invalid_saved_verification_is_reported_and_runs_again(run, counter, unfinished):
    path = unfinished / ".scalepoint" / caches.JOURNAL_FILE
    pages = json.loads(path.read_text())
    pages["stages"]["trial-0 verified"]["result"] = {"path": 3}
    path.write_text(json.dumps(pages))
    with pytest.warns(ScalepointWarning, match="verified: .*cannot be used"):
        run(resume=True)
    assert counter.counts == {"verify": 1}


def test_resuming_without_an_unfinished_run_is_reported(run, counter):
    counter.stop.append("calibrate")
    with pytest.warns(ScalepointWarning, match="no unfinished run to resume"), pytest.raises(Stop):
        run(resume=True)


def test_two_runs_into_one_folder_are_refused(run, tmp_path):
    with folder_locked(tmp_path / "out" / ".scalepoint"), pytest.raises(StoreError, match="another process"):
        run()


@pytest.mark.slow
def test_trials_are_resumed_too(run, counter, model, data, tmp_path):
    """The second trial is interrupted: the first, and what to try, are as they were."""
    truth = model(data[0]).detach()

    def fidelity(run):
        return -float((run(data[0]) - truth).square().mean())

    options = {"target": "reference", "evaluate": fidelity, "max_drop": 0.0, "max_trials": 3}
    exports = []
    with pytest.MonkeyPatch.context() as patch:
        original = stages.export

        def export(*args, **kwargs):
            exports.append(1)
            if len(exports) == 2:
                raise Stop
            return original(*args, **kwargs)

        patch.setattr(stages, "export", export)
        with pytest.raises(Stop):
            run(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        done = run(**options, resume=True)
    assert len(done.trials) == 3
    assert (counter.counts["calibrate"], counter.counts["export"]) == (1, 2)
    fresh = run(**options, output=tmp_path / "fresh")
    assert [trial.score for trial in fresh.trials] == [trial.score for trial in done.trials]


def test_a_smoke_run_runs_all_stages(run, counter, data):
    runs = []

    def batches():
        for batch in data * 4:
            runs.append(1)
            yield batch

    class Data:
        __iter__ = staticmethod(batches)

    done = run(calibration_data=Data(), smoke=True, max_drop=0.0)
    assert len(runs) <= 3
    assert len(done.trials) == 1
    assert done.verification.latency is None
    assert done.verification.float_size is None
    assert done.verification.size > 0
    assert any("smoke" in warning for warning in done.report.warnings)
    assert set(counter.counts) == set(STAGES)


def test_files_of_the_metric_are_not_deleted_if_the_first_stage_fails(run, tmp_path):
    def evaluate(run):
        (tmp_path / "out" / "mine.txt").write_text("precious")
        raise ValueError("the metric failed")

    with pytest.raises(ValueError, match="the metric failed"):
        run(evaluate=evaluate)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_new_folder_is_deleted_if_the_first_stage_fails(run, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(evaluate=lambda model: 1 / 0)
    assert not (tmp_path / "out").exists()


def test_other_example_inputs_give_another_file(run, counter, model, data, unfinished):
    larger = torch.randn(1, 3, 12, 12)
    _, messages = run_and_list_warnings(run, example_inputs=larger, evaluate=lambda model: 1.0)
    assert any("exported: the example inputs changed" in message for message in messages)
    assert counter.counts["export"] == 1


def test_a_folder_that_is_not_empty_is_refused_without_force(run, counter, tmp_path):
    run()
    before = (tmp_path / "out" / "model.onnx").read_bytes()
    with pytest.raises(UsageError, match=r"not empty.*force=True"):
        run()
    assert (tmp_path / "out" / "model.onnx").read_bytes() == before
    run(force=True)
    assert counter.counts["export"] == 1


def test_an_unfinished_run_is_refused_unless_resumed(run, unfinished):
    with pytest.raises(UsageError, match="resume=True"):
        run()


KILLED = """
import os, signal, sys, torch, scalepoint
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(8, 8), "relu"

    def forward(self, x):
        return torch.relu(self.layer(x)) if self.kind in {"relu", "gelu", "silu", "tanh"} else self.layer(x)

def stop(event):
    if "kill" in sys.argv and event.kind == "metric":
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(1)
x = torch.randn(4, 8)
options = {"target": "onnxruntime", "config": {"speed_first": False}, "smoke": True, "resume": "resume" in sys.argv}
scalepoint.deploy(Net().eval(), x, [x], output=sys.argv[1], progress=True, callback=stop, **options)
"""


@pytest.mark.slow
def test_another_process_with_another_hash_seed_resumes_a_killed_run(tmp_path):
    texts = []
    for seed, *arguments in (("1", "out", "kill"), ("2", "out", "resume"), ("3", "whole")):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", KILLED, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if "kill" in arguments else 0), done.stderr
        texts.append(done.stderr)
    stages = ("quantizing", "exporting", "verifying in the runtime")
    assert [all(f"{stage}: from the cache" in text for stage in stages) for text in texts] == [False, True, False]
    assert "changed" not in texts[1]
    resumed, complete = tmp_path / "out", tmp_path / "whole"
    files = [path.relative_to(complete) for path in complete.rglob("*") if path.suffix in (".onnx", ".safetensors")]
    assert len(files) >= 2
    assert all((resumed / file).read_bytes() == (complete / file).read_bytes() for file in files)
