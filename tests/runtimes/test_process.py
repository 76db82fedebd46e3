"""Runtimes in processes of their own: limits, hunger, crashes and hangs are findings."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from scalepoint.errors import VerificationError
from scalepoint.formats import ExportRequest
from scalepoint.formats.onnx.float_baseline import write_baseline
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import count_low_precision, exchange_files, run_task, total_memory
from scalepoint.runtimes.serving import RuntimeSession
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
        if self.kind == "noisy":
            for _ in range(50):
                sys.stderr.write("x" * 1_000_000 + chr(10))
            raise ValueError("no kernel for this")
        if self.kind == "torn":
            _tear(self.options["part"])
        if self.kind == "alive":
            with open(self.options["fifo"], "wb", buffering=0) as fifo:
                fifo.write(b"x")
                time.sleep(60)
        return [("y", x * 2)]

    def generate(self, tokens, count):
        return {"tokens": [*tokens, *range(count)], "prefill_seconds": 0.5, "decode_seconds": 2}

    def executed(self):
        ours = sorted(name for name in sys.modules if name.split(".")[0] in ("scalepoint", "torch"))
        return [{"name": each, "op": "import", "low": None, "why": ""} for each in ours]


def _tear(part):
    # Die in the middle of an answer: after some bytes of its length, or of the frame itself.
    import os, stat
    streams = [os.fstat(fd).st_ino for fd in (0, 1, 2)]
    for fd in range(3, 20):
        try:
            found = os.fstat(fd)
        except OSError:
            continue
        if stat.S_ISFIFO(found.st_mode) and found.st_ino not in streams:
            os.write(fd, {"length": b"abc", "frame": (1000).to_bytes(8, "little") + b"half of it"}[part])
    os._exit(3)
"""
PARENT = """
import sys
from pathlib import Path
import numpy as np
from scalepoint.runtimes import Runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.runtimes.serving import RuntimeSession

folder, how = Path(sys.argv[1]), sys.argv[2]
runtime, options = Runtime("toy", "numpy", folder / "child.py", ("onnx",)), {"fifo": str(folder / "fifo")}
x = np.zeros((2, 3), np.float32)
if how == "served":
    RuntimeSession(runtime, folder / "alive", options=options)({"x": x})
with exchange_files({"x": x}) as files:
    run_task(runtime, {"task": "run", "path": str(folder / "alive"), "options": options, **files.files})
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
        with exchange_files({"x": X}) as files:
            request = {"task": "run", "path": str(tmp_path / kind), "options": {}, "executed": True, **files.files}
            answer = run_task(runtime, request, **limits)
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
    assert 1e8 < total_memory() < 1e14


def test_a_package_that_is_not_installed(runtime, tmp_path):
    absent = Runtime("absent", "no_such_package_anywhere", tmp_path / "child.py", ("onnx",))
    answer = run_task(absent, {"task": "run"})
    assert answer.status == Status.UNAVAILABLE
    assert "pip install no_such_package_anywhere" in answer.message
    with pytest.raises(VerificationError, match="pip install"):
        RuntimeSession(absent, tmp_path / "child.py")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_real_runtime_that_needs_more_than_it_may_have_is_a_finding(name, tmp_path):
    if not find_runtime(name).is_here:
        pytest.skip(f"{name} is not installed")
    path, model, x = tmp_path / "m.onnx", nn.Linear(8, 4000).eval(), torch.randn(30_000, 8)
    write_baseline(model, path, ExportRequest(((x,), {})))
    found = verify(path, model, x, runtime=name, memory=300_000_000)
    assert found.status == Status.FAILED, found.message
    assert "needs more memory than the 0.30 GB it may have" in found.message
    assert not found.holds


def test_a_child_that_prints_without_end_costs_no_memory(run):
    tracemalloc.start()
    try:
        answer, _ = run("noisy")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert answer.status == Status.FAILED
    assert "no kernel for this" in answer.message


def open_when_running(fifo, parent):
    """Open the FIFO and wait for the byte that the child writes in the middle of its run."""
    reader = os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
    while not select.select([reader], [], [], 0.1)[0] or not reader.read(1):
        assert parent.poll() is None, "the parent ended before its child ran"
        time.sleep(0.01)
    return reader


@pytest.mark.parametrize("how", ["asked", "served"])
def test_a_child_ends_with_a_parent_that_was_killed(runtime, tmp_path, how):
    (tmp_path / "alive").write_text("alive")
    os.mkfifo(tmp_path / "fifo")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), how])
    with open_when_running(tmp_path / "fifo", parent) as fifo:
        parent.kill()
        parent.wait()
        readable, _, _ = select.select([fifo], [], [], 30)  # it ends when the child does, which would sleep for 60 s
        assert readable


class TestServed:
    def test_a_file_is_called_again_and_again_in_one_process(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = RuntimeSession(runtime, tmp_path / "plain")
        for factor in (1, 2, 3):
            assert np.array_equal(served({"x": X * factor})[0], X * factor * 2)
        served.close()
        assert served._child.wait() == 0

    def test_a_language_model_goes_on_in_the_process_that_has_it(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = RuntimeSession(runtime, tmp_path / "plain")
        assert np.array_equal(served({"count": X})[0], X * 2)  # an input, whatever it is called
        assert served.generate((7, 8), 3) == ([7, 8, 0, 1, 2], 0.5, 2.0)
        assert np.array_equal(served({"x": X})[0], X * 2)

    def test_it_ends_with_the_object(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = RuntimeSession(runtime, tmp_path / "plain")
        child = served._child
        del served
        assert child.wait() == 0

    @pytest.mark.parametrize(
        ("kind", "why"),
        [("crashing", "crashed.*SIGSEGV"), ("hanging", "timeout"), ("hungry", "more memory")],
    )
    def test_what_goes_wrong_is_an_error_that_says_so(self, runtime, tmp_path, kind, why):
        (tmp_path / kind).write_text(kind)
        served = RuntimeSession(runtime, tmp_path / kind, seconds=3 if kind == "hanging" else 60, memory=1_000_000_000)
        with pytest.raises(VerificationError, match=why):
            served({"x": X})
        served.close()

    def test_every_thread_gets_the_answer_to_its_own_request(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served, inputs = RuntimeSession(runtime, tmp_path / "plain"), [X + number for number in range(100)]
        with ThreadPoolExecutor(8) as pool:
            outputs = [found[0] for found in pool.map(served, [{"x": x} for x in inputs])]
        wrong = [number for number, x in enumerate(inputs) if not np.array_equal(outputs[number], 2 * x)]
        assert wrong == []

    @pytest.mark.parametrize("part", ["length", "frame"])
    def test_half_an_answer_of_a_dying_child_is_an_error(self, runtime, tmp_path, part):
        (tmp_path / "torn").write_text("torn")
        served = RuntimeSession(runtime, tmp_path / "torn", options={"part": part})
        with pytest.raises(VerificationError, match="exited with code 3"):
            served({"x": X})
        with pytest.raises(VerificationError, match="open it again"):
            served({"x": X})

    def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next_one(self, runtime, tmp_path):
        (tmp_path / "hanging").write_text("hanging")
        served = RuntimeSession(runtime, tmp_path / "hanging")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
        try:
            threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                served({"x": X})
        finally:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(VerificationError, match="open it again"):
            served({"x": X})

    def test_a_closed_one_is_refused(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = RuntimeSession(runtime, tmp_path / "plain")
        served.close()
        with pytest.raises(VerificationError, match="closed"):
            served({"x": X})

    def test_another_process_that_was_forked_is_refused(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        served = RuntimeSession(runtime, tmp_path / "plain")
        served._owner += 1  # as after a fork
        with pytest.raises(VerificationError, match="another process"):
            served({"x": X})

    def test_a_child_that_prints_without_end_costs_no_memory(self, runtime, tmp_path):
        (tmp_path / "noisy").write_text("noisy")
        served = RuntimeSession(runtime, tmp_path / "noisy")
        tracemalloc.start()
        try:
            with pytest.raises(VerificationError, match="no kernel for this"):
                served({"x": X})
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()

    def test_an_input_may_have_any_name(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        assert np.array_equal(RuntimeSession(runtime, tmp_path / "plain")({"file": X})[0], X * 2)


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
    assert count_low_precision(rows) == (1, ("b (Conv: its weight is float)", "d (Convolution brgconv_f32)"))


def test_this_process_has_imported_no_runtime():
    assert "openvino" not in sys.modules
