"""Runtimes in processes of their own: limits, hunger, crashes and hangs are findings."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from scalepoint.errors import VerificationError
from scalepoint.formats import Writing
from scalepoint.formats.onnx.plain import write_plain
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import all_memory, ask, exchange, precision
from scalepoint.runtimes.serving import Served
from scalepoint.verification import RuntimeModel, verify

CHILD = """
import sys, time
import numpy as np


class File:
    def __init__(self, path, options):
        self.kind, self.options = open(path).read(), options
        self.inputs = ["x"]

    def run(self, feeds):
        x = feeds["x"]
        if self.kind == "hungry":
            np.ones(1 << 31, np.uint8)
        if self.kind == "hanging":
            time.sleep(60)
        if self.kind == "crashing":
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.kind == "printing":
            print("hello from the runtime")
        if self.kind == "refusing":
            raise ValueError("no kernel for this")
        return [("y", x * 2)]

    def generate(self, tokens, count):
        return {"tokens": [*tokens, *range(count)], "prefill_seconds": 0.5, "decode_seconds": 2}

    def executed(self):
        ours = sorted(name for name in sys.modules if name.split(".")[0] in ("scalepoint", "torch"))
        return [{"name": each, "op": "import", "low": None, "why": ""} for each in ours]
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def runtime(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    return Runtime("toy", "numpy", tmp_path / "child.py", ("onnx",))


@pytest.fixture
def run(runtime, tmp_path):
    def asked(kind, **limits):
        (tmp_path / kind).write_text(kind)
        with exchange({"x": X}) as files:
            request = {"task": "run", "path": str(tmp_path / kind), "options": {}, "executed": True, **files.files}
            answer = ask(runtime, request, **limits)
            return answer, files.outputs(answer) if answer.status == Status.OK else {}

    return asked


def test_a_child_runs_the_file_and_imports_nothing_of_ours(run):
    answer, outputs = run("plain")
    assert np.array_equal(outputs["y"], X * 2)
    assert answer.data["executed"] == []


def test_what_a_runtime_prints_is_no_answer(run):
    answer, outputs = run("printing")
    assert answer.status == Status.OK
    assert np.array_equal(outputs["y"], X * 2)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("hungry", Status.FAILED, "needs more memory than the 1.00 GB it may have"),
        ("crashing", Status.CRASHED, "SIGSEGV"),
        ("hanging", Status.TIMEOUT, "did not end within 3 s"),
        ("refusing", Status.FAILED, "no kernel for this"),
    ],
)
def test_what_goes_wrong_there_is_a_finding(run, kind, status, message):
    answer, _ = run(kind, memory=1_000_000_000, seconds=3 if kind == "hanging" else 60)
    assert answer.status == status
    assert message in answer.message


def test_the_limit_is_the_memory_of_this_machine_unless_told():
    assert 1e8 < all_memory() < 1e14


def test_a_package_that_is_not_installed(runtime, tmp_path):
    absent = Runtime("absent", "no_such_package_anywhere", tmp_path / "child.py", ("onnx",))
    answer = ask(absent, {"task": "run"})
    assert answer.status == Status.UNAVAILABLE
    assert "pip install no_such_package_anywhere" in answer.message
    with pytest.raises(VerificationError, match="pip install"):
        Served(absent, tmp_path / "child.py")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_real_runtime_that_needs_more_than_it_may_have_is_a_finding(name, tmp_path):
    if not find_runtime(name).is_here:
        pytest.skip(f"{name} is not installed")
    path, model, x = tmp_path / "m.onnx", nn.Linear(8, 4000).eval(), torch.randn(30_000, 8)
    write_plain(model, path, Writing(((x,), {})))
    found = verify(path, model, x, runtime=name, memory=300_000_000)
    assert found.status == Status.FAILED, found.message
    assert "needs more memory than the 0.30 GB it may have" in found.message
    assert not found.holds


class TestServed:
    def test_a_file_is_called_again_and_again_in_one_process(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = Served(runtime, tmp_path / "plain")
        for factor in (1, 2, 3):
            assert np.array_equal(served({"x": X * factor})[0], X * factor * 2)
        child = served._child
        served.close()
        assert child.poll() == 0

    def test_a_language_model_goes_on_in_the_process_that_has_it(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = Served(runtime, tmp_path / "plain")
        assert np.array_equal(served({"count": X})[0], X * 2)  # an input, whatever it is called
        assert served.generate((7, 8), 3) == ([7, 8, 0, 1, 2], 0.5, 2.0)
        assert np.array_equal(served({"x": X})[0], X * 2)

    def test_it_ends_with_the_object(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = Served(runtime, tmp_path / "plain")
        child = served._child
        del served
        assert child.poll() == 0

    @pytest.mark.parametrize(
        ("kind", "why"),
        [("crashing", "crashed: toy died of SIGSEGV"), ("hanging", "timeout"), ("hungry", "more memory")],
    )
    def test_what_goes_wrong_is_an_error_that_says_so(self, runtime, tmp_path, kind, why):
        (tmp_path / kind).write_text(kind)
        served = Served(runtime, tmp_path / kind, seconds=3 if kind == "hanging" else 60, memory=1_000_000_000)
        with pytest.raises(VerificationError, match=why):
            served({"x": X})
        served.close()

    def test_an_input_may_have_any_name(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        assert np.array_equal(Served(runtime, tmp_path / "plain")({"file": X})[0], X * 2)


def test_a_runtime_model_is_called_as_the_model_is(runtime, tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return {"y": x * 2}

    (tmp_path / "plain").write_text("plain")
    x = torch.from_numpy(X)
    with RuntimeModel(tmp_path / "plain", Pair(), ((x,), {}), runtime=runtime) as run:
        assert torch.equal(run(x=x)["y"], x * 2)
        assert run.eval() is run


def test_operations_are_counted_by_what_the_child_says():
    rows = [
        {"name": "a", "op": "QLinearConv", "low": True, "why": ""},
        {"name": "b", "op": "Conv", "low": False, "why": "its weight is float"},
        {"name": "c", "op": "Relu", "low": None, "why": ""},
        {"name": "d", "op": "Convolution brgconv_f32", "low": False, "why": ""},
    ]
    assert precision(rows) == (1, ("b (Conv: its weight is float)", "d (Convolution brgconv_f32)"))


def test_this_process_has_imported_no_runtime():
    assert "openvino" not in sys.modules
