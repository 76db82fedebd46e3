"""Runtimes in child processes: limits of time and memory, crashes, and processes that hang."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from scalepoint.errors import VerificationError
from scalepoint.formats import ExportRequest
from scalepoint.formats.onnx.float_baseline import write_baseline
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import (
    children_reused,
    count_low_precision,
    exchange_files,
    run_task,
    total_memory,
)
from scalepoint.runtimes.serving import RuntimeSession
from scalepoint.verification import RuntimeModel, verify
from tests.warm import warm

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
        if self.kind == "process":
            import os
            return [("y", np.asarray(os.getpid()))]
        if self.kind == "large":
            np.ones(300_000_000, np.uint8)
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
        modules = sorted(name for name in sys.modules if name.split(".")[0] in ("scalepoint", "torch"))
        return [{"name": name, "op": "import", "low": None, "why": ""} for name in modules]


def _tear(part):
    # Die in the middle of an answer: after some bytes of its length, or of the frame itself.
    import os, stat
    streams = [os.fstat(fd).st_ino for fd in (0, 1, 2)]
    for fd in range(3, 20):
        try:
            status = os.fstat(fd)
        except OSError:
            continue
        if stat.S_ISFIFO(status.st_mode) and status.st_ino not in streams:
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

folder, mode = Path(sys.argv[1]), sys.argv[2]
runtime, options = Runtime("toy", "numpy", folder / "child.py", ("onnx",)), {"fifo": str(folder / "fifo")}
x = np.zeros((2, 3), np.float32)
if mode == "session":
    RuntimeSession(runtime, folder / "alive", options=options)({"x": x})
with exchange_files({"x": x}) as files:
    run_task(runtime, {"task": "run", "path": str(folder / "alive"), "options": options, **files.paths})
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def runtime(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    return Runtime("toy", "numpy", tmp_path / "child.py", ("onnx",))


@pytest.fixture
def run(runtime, tmp_path):
    def run_kind(kind, **limits):
        (tmp_path / kind).write_text(kind)
        with exchange_files({"x": X}) as files:
            request = {"task": "run", "path": str(tmp_path / kind), "options": {}, "executed": True, **files.paths}
            answer = run_task(runtime, request, **limits)
            return answer, files.outputs(answer) if answer.status == Status.OK else {}

    return run_kind


def test_a_child_runs_the_file_and_does_not_import_scalepoint_or_torch(run):
    answer, outputs = run("plain")
    assert np.array_equal(outputs["y"], X * 2)
    assert answer.data["executed"] == []


def test_a_runtime_that_prints_to_stdout_does_not_change_the_answer(run):
    answer, outputs = run("printing")
    assert answer.status == Status.OK
    assert np.array_equal(outputs["y"], X * 2)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("hungry", Status.FAILED, "needs more memory than its limit of 1.00 GB"),
        ("crashing", Status.CRASHED, "SIGSEGV"),
        ("hanging", Status.TIMEOUT, "did not end within 3 s"),
        ("refusing", Status.FAILED, "no kernel for this"),
    ],
)
def test_a_failure_in_the_child_becomes_the_status_of_the_answer(run, kind, status, message):
    answer, _ = run(kind, memory=1_000_000_000, seconds=3 if kind == "hanging" else 60)
    assert answer.status == status
    assert message in answer.message


def process_of(run, **limits):
    return int(run("process", **limits)[1]["y"])


def test_tasks_share_one_child_until_it_fails(run):
    assert process_of(run) != process_of(run)
    with children_reused():
        first = process_of(run)
        with children_reused():
            assert process_of(run) == first
        assert process_of(run) == first
        with pytest.raises(ProcessLookupError), ThreadPoolExecutor(1) as pool:  # another thread has its own child
            os.kill(pool.submit(process_of, run).result(), 0)
        for kind, status in (("refusing", Status.FAILED), ("crashing", Status.CRASHED)):
            assert run(kind)[0].status == status
            assert process_of(run) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_child_that_died_between_two_tasks_is_replaced(run):
    with children_reused():
        first = process_of(run)
        os.kill(first, signal.SIGKILL)
        time.sleep(0.1)
        assert process_of(run) != first


def test_each_task_has_its_own_limits_and_errors(run):
    with children_reused():
        first = process_of(run)
        assert run("large", memory=100_000_000)[0].message.startswith("toy needs more memory than its limit of 0.10 GB")
        second = process_of(run, memory=200_000_000)
        assert run("large", memory=1_000_000_000)[0].status == Status.OK
        assert process_of(run) == second != first
        assert "did not end within 1 s" in run("hanging", seconds=1)[0].message
        assert run("printing")[0].status == Status.OK
        assert "SIGSEGV" in run("crashing")[0].message
        assert "hello" not in run("refusing")[0].message


def test_the_default_limit_is_the_memory_of_this_machine():
    assert 1e8 < total_memory() < 1e14


def test_a_missing_package_is_reported_with_the_command_that_installs_it(runtime, tmp_path):
    absent = Runtime("absent", "no_such_package_anywhere", tmp_path / "child.py", ("onnx",))
    answer = run_task(absent, {"task": "run"})
    assert answer.status == Status.UNAVAILABLE
    assert "pip install no_such_package_anywhere" in answer.message
    with pytest.raises(VerificationError, match="pip install"):
        RuntimeSession(absent, tmp_path / "child.py")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_real_runtime_over_its_memory_limit_fails(name, tmp_path):
    if not find_runtime(name).is_installed:
        pytest.skip(f"{name} is not installed")
    path, model, x = tmp_path / "m.onnx", nn.Linear(8, 4000).eval(), torch.randn(30_000, 8)
    write_baseline(model, path, ExportRequest(((x,), {})))
    result = verify(path, model, x, runtime=name, memory=300_000_000)
    assert result.status == Status.FAILED, result.message
    assert "needs more memory than its limit of 0.30 GB" in result.message
    assert not result.holds


def test_a_child_that_prints_much_costs_no_memory(run):
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


@pytest.mark.parametrize("mode", ["task", "session"])
def test_a_child_ends_with_a_parent_that_was_killed(runtime, tmp_path, mode):
    (tmp_path / "alive").write_text("alive")
    os.mkfifo(tmp_path / "fifo")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), mode])
    with open_when_running(tmp_path / "fifo", parent) as fifo:
        parent.kill()
        parent.wait()
        readable, _, _ = select.select([fifo], [], [], 30)  # it ends when the child does, which would sleep for 60 s
        assert readable


class TestRuntimeSession:
    def test_one_process_answers_several_calls(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session = RuntimeSession(runtime, tmp_path / "plain")
        for factor in (1, 2, 3):
            assert np.array_equal(session({"x": X * factor})[0], X * factor * 2)
        session.close()
        assert session._child.wait() == 0

    def test_a_language_model_generates_in_the_same_process(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session = RuntimeSession(runtime, tmp_path / "plain")
        assert np.array_equal(session({"count": X})[0], X * 2)  # an input with this name does not start a generation
        assert session.generate((7, 8), 3) == ([7, 8, 0, 1, 2], 0.5, 2.0)
        assert np.array_equal(session({"x": X})[0], X * 2)

    def test_the_process_ends_when_the_session_is_deleted(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session = RuntimeSession(runtime, tmp_path / "plain")
        child = session._child
        del session
        assert child.wait() == 0

    @pytest.mark.parametrize(
        ("kind", "why"),
        [("crashing", "crashed.*SIGSEGV"), ("hanging", "timeout"), ("hungry", "more memory")],
    )
    def test_a_failure_in_the_child_is_an_error_with_the_reason(self, runtime, tmp_path, kind, why):
        (tmp_path / kind).write_text(kind)
        session = RuntimeSession(runtime, tmp_path / kind, seconds=3 if kind == "hanging" else 60, memory=1_000_000_000)
        with pytest.raises(VerificationError, match=why):
            session({"x": X})
        session.close()

    def test_every_thread_gets_the_answer_to_its_own_request(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session, inputs = RuntimeSession(runtime, tmp_path / "plain"), [X + number for number in range(100)]
        with ThreadPoolExecutor(8) as pool:
            outputs = [result[0] for result in pool.map(session, [{"x": x} for x in inputs])]
        wrong = [number for number, x in enumerate(inputs) if not np.array_equal(outputs[number], 2 * x)]
        assert wrong == []

    @pytest.mark.parametrize("part", ["length", "frame"])
    def test_half_an_answer_of_a_dying_child_is_an_error(self, runtime, tmp_path, part):
        (tmp_path / "torn").write_text("torn")
        session = RuntimeSession(runtime, tmp_path / "torn", options={"part": part})
        with pytest.raises(VerificationError, match="exited with code 3"):
            session({"x": X})
        with pytest.raises(VerificationError, match="open it again"):
            session({"x": X})

    def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next_one(self, runtime, tmp_path):
        (tmp_path / "hanging").write_text("hanging")
        session = RuntimeSession(runtime, tmp_path / "hanging")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
        try:
            threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                session({"x": X})
        finally:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(VerificationError, match="open it again"):
            session({"x": X})

    def test_a_closed_session_is_refused(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session = RuntimeSession(runtime, tmp_path / "plain")
        session.close()
        with pytest.raises(VerificationError, match="closed"):
            session({"x": X})

    def test_a_session_in_a_forked_process_is_refused(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        session = RuntimeSession(runtime, tmp_path / "plain")
        session._owner += 1  # as after a fork
        with pytest.raises(VerificationError, match="another process"):
            session({"x": X})

    def test_a_child_that_prints_much_costs_no_memory(self, runtime, tmp_path):
        (tmp_path / "noisy").write_text("noisy")
        session = RuntimeSession(runtime, tmp_path / "noisy")
        tracemalloc.start()
        try:
            with pytest.raises(VerificationError, match="no kernel for this"):
                session({"x": X})
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()

    def test_an_input_may_have_any_name(self, runtime, tmp_path):
        (tmp_path / "plain").write_text("plain")
        assert np.array_equal(RuntimeSession(runtime, tmp_path / "plain")({"file": X})[0], X * 2)


def test_a_runtime_model_is_called_like_the_model(runtime, tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return {"y": x * 2}

    (tmp_path / "plain").write_text("plain")
    x = torch.from_numpy(X)
    with RuntimeModel(tmp_path / "plain", Pair(), ((x,), {}), runtime=runtime) as run:
        assert torch.equal(run(x=x)["y"], x * 2)
        assert run.eval() is run


def test_operations_are_counted_by_their_precision():
    rows = [
        {"name": "a", "op": "QLinearConv", "low": True, "why": ""},
        {"name": "b", "op": "Conv", "low": False, "why": "its weight is float"},
        {"name": "c", "op": "Relu", "low": None, "why": ""},
        {"name": "d", "op": "Convolution brgconv_f32", "low": False, "why": ""},
    ]
    assert count_low_precision(rows) == (1, ("b (Conv: its weight is float)", "d (Convolution brgconv_f32)"))


VERIFY = """
import sys, torch
from torch import nn
import scalepoint
model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
done = scalepoint.deploy(model, x, [x], target="openvino", output=sys.argv[1], progress=False)
assert done.verification.holds
print("openvino" in sys.modules)
"""


def test_verifying_a_file_does_not_import_its_runtime(tmp_path):
    if find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    command = [*warm(), "-c", VERIFY, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr[-2000:]
