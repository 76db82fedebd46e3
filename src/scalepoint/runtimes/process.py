"""Runs a task of a runtime in a child process with limits of time and memory.

    with exchange_files(feeds) as files:
        answer = run_task(runtime, {"task": "run", "path": path, "options": {}, **files.paths})
        outputs = files.outputs(answer)

A crash, a hang or a lack of memory in the child becomes the status of the answer.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import numpy as np

from scalepoint.runtimes.child_loop import NOT_EVALUATED, OUT_OF_MEMORY
from scalepoint.runtimes.runtime import Runtime
from scalepoint.support.cpu import check_threads, child_environment, signal_name
from scalepoint.support.files import TemporaryFolder, is_broken_pipe

TIMEOUT_SECONDS = 600
CHILD_LOOP = Path(__file__).with_name("child_loop.py")
TRACEBACK_HEADER = "Traceback (most recent call last)"
ASSUMED_MEMORY_BYTES = 8_000_000_000  # on systems that do not report their memory
STDERR_BYTES = 65_536  # of the end of stderr, which contains the error


class Status(StrEnum):
    """How a run in the runtime ended."""

    OK = "ok"
    NOT_VERIFIED = "not verified here"  # the file cannot be verified on this machine; it may be correct
    UNAVAILABLE = "unavailable"  # the runtime is not installed
    FAILED = "failed"  # the runtime raised an error
    CRASHED = "crashed"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class TaskResult:
    """Status and answer of a task."""

    status: Status
    message: str = ""  # why the status is not OK
    data: Mapping[str, Any] | None = None


def total_memory() -> int:
    """Return the bytes of memory of this machine, the default limit of a child."""
    if not hasattr(os, "sysconf"):  # Windows, where children run without a limit
        return ASSUMED_MEMORY_BYTES
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run_task(
    runtime: Runtime, request: Mapping[str, Any], *, seconds: float = TIMEOUT_SECONDS, memory: int | None = None
) -> TaskResult:
    """Run one task in a child process, in the same one as earlier tasks inside `children_reused`.

    Args:
        runtime: The runtime.
        request: The task and its arguments, see `child_loop.py`.
        seconds: Time limit.
        memory: Memory limit in bytes; the memory of the machine by default.
    """
    if not runtime.is_installed:
        return describe_missing(runtime)
    check_threads(request.get("options", {}).get("threads") or 0)
    with children_reused() as children:
        return children.run(runtime, {**request, "memory": memory or total_memory()}, seconds)


@contextmanager
def children_reused() -> Iterator["RuntimeChildren"]:
    """Inside this context, all tasks of a runtime run one after the other in the same child process.

    Inside another such context, the children of the outer one are used. Other threads and forked processes have their
    own children.
    """
    outer = _children.get()
    if outer is not None and outer.owner == os.getpid():
        yield outer
        return
    children = RuntimeChildren()
    token = _children.set(children)
    try:
        yield children
    finally:
        _children.reset(token)
        children.close()


class RuntimeChildren:
    """The idle child processes of `children_reused`, one per runtime.

    A child that fails, dies or exceeds its time limit is dropped, and the next task starts a fresh one.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._idle: dict[tuple[str, ...], Child] = {}

    def run(self, runtime: Runtime, request: Mapping[str, Any], seconds: float) -> TaskResult:
        """Send a request to the child of the runtime and wait for its answer.

        A child ends a request in one of four ways: it answers in time, it exceeds the time limit, it exits with a code
        that stands for an error, or it exits with code 0 without an answer.
        """
        key = tuple(child_command(runtime))
        child = self._take_idle(key) or Child(runtime)
        has_answered = False
        try:
            child.clear_errors()
            with child.within(seconds):
                child.send(json.dumps(request).encode() + b"\n")
                answer = child.output.readline()
                is_complete = answer.endswith(b"\n")
                exit_code = 0 if is_complete else child.wait()
            has_answered = is_complete and not child.is_late
            if has_answered:
                self._idle[key] = child
                return TaskResult(Status.OK, data=json.loads(answer))
            errors = child.errors()
        finally:
            if not has_answered:
                child.kill()
                child.close()
        if child.is_late:
            return TaskResult(Status.TIMEOUT, f"{runtime.name} did not end within {seconds:.0f} s")
        if exit_code:
            return describe_exit(runtime, exit_code, errors, request["memory"])
        reason = _error_message(errors) or "it printed no error"
        return TaskResult(Status.FAILED, f"{runtime.name} gave no answer: {reason}")

    def close(self) -> None:
        """End all children."""
        while self._idle:
            self._idle.popitem()[1].close()

    def _take_idle(self, key: tuple[str, ...]) -> "Child | None":
        child = self._idle.pop(key, None)
        if child is not None and not child.is_running:
            child.close()
            return None
        return child


_children: ContextVar[RuntimeChildren | None] = ContextVar("_children", default=None)


class Child:
    """The process of a runtime. It exits when its stdin is closed.

    A thread reads stderr and keeps only its last STDERR_BYTES, so a child that prints gigabytes costs no memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.is_late = False
        self._process = subprocess.Popen(  # noqa: S603  # our own file, no shell
            child_command(runtime),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        # RuntimeSession (serving.py), which threads may share, holds it from a request until its answer, and `close`
        # waits for it. RuntimeChildren belong to one thread and do not hold it.
        self.lock = threading.Lock()
        self._stderr_end = b""
        self._reader = threading.Thread(target=self._read_end_of_stderr, daemon=True)
        self._reader.start()

    @property
    def output(self) -> IO[bytes]:
        """Stdout of the process."""
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        return self._process.stdout

    def send(self, data: bytes) -> None:
        """Write to stdin. If the process has exited, nothing is raised: the caller then reads the end of stdout."""
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            if not is_broken_pipe(error):
                raise

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kill the process if the block takes longer. A read of stdout in the block then returns."""
        timer = threading.Timer(seconds, self._kill_late)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def wait(self) -> int:
        return self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def clear_errors(self) -> None:
        """Discard what earlier tasks printed to stderr."""
        self._stderr_end = b""

    def errors(self) -> str:
        """Return the end of stderr. The process must have exited."""
        self._reader.join(timeout=5)  # with a limit, because a process that the child started may hold the pipe open
        return self._stderr_end.decode(errors="replace")

    def close(self) -> None:
        """Close stdin, so that the process exits, and kill it if it does not exit within 5 s.

        A request of another thread may finish first, within 5 s, because this also runs when Python exits.
        """
        is_idle = self.lock.acquire(timeout=5)
        if not is_idle:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None  # noqa: S101
                pipe.close()
        if is_idle:
            self.lock.release()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        self._reader.join(timeout=5)
        if not self._reader.is_alive() and self._process.stderr is not None:
            self._process.stderr.close()

    def _kill_late(self) -> None:
        self.is_late = True
        self.kill()

    def _read_end_of_stderr(self) -> None:
        assert self._process.stderr is not None  # noqa: S101
        while chunk := os.read(self._process.stderr.fileno(), STDERR_BYTES):
            self._stderr_end = (self._stderr_end + chunk)[-STDERR_BYTES:]


def describe_missing(runtime: Runtime) -> TaskResult:
    """Return the result for a runtime that is not installed, with the command that installs it."""
    install = runtime.install or f"pip install {runtime.package}"
    return TaskResult(Status.UNAVAILABLE, f"{runtime.name} is not installed: {install}")


def child_command(runtime: Runtime) -> list[str]:
    """Return the command that starts the child, by which it is also found again.

    Python's -I ignores the current folder and PYTHON* variables.
    """
    return [sys.executable, "-I", str(CHILD_LOOP), str(Path(runtime.child).resolve())]


def describe_exit(runtime: Runtime, exit_code: int, errors: str, memory: int) -> TaskResult:
    """Return the result for a child that exited with an error. `errors` is the end of its stderr."""
    message = _error_message(errors)
    if exit_code == OUT_OF_MEMORY or "std::bad_alloc" in errors:
        return TaskResult(Status.FAILED, f"{runtime.name} needs more memory than its limit of {memory / 1e9:.2f} GB")
    if exit_code == NOT_EVALUATED:
        return TaskResult(Status.NOT_VERIFIED, message)
    signal = signal_name(exit_code)
    if signal is not None:
        return TaskResult(Status.CRASHED, f"{runtime.name} died of {signal}{f': {message}' if message else ''}")
    return TaskResult(Status.FAILED, message or f"{runtime.name} exited with code {exit_code} and printed no error")


def _error_message(stderr: str) -> str:
    """Return the last line of stderr, or all lines of the exception if stderr contains a traceback."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    message = lines[-1:]
    if TRACEBACK_HEADER in stderr:
        frame_lines = [index for index, line in enumerate(lines) if line.startswith("  ")]
        if frame_lines:
            message = lines[frame_lines[-1] + 1 :]
    return " ".join(map(str.strip, message))[:500]


class ExchangeFiles:
    """The .npz files of one request: inputs, and outputs after the run.

    Keys of inputs are "input.NAME". Keys of outputs are "0", "1", .. in the order of "names" in the answer.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, np.ndarray]) -> None:
        self.paths = {"inputs": str(folder / "inputs.npz"), "outputs": str(folder / "outputs.npz")}
        np.savez(self.paths["inputs"], **prefix_input_names(inputs))

    def outputs(self, answer: TaskResult) -> dict[str, np.ndarray]:
        """Read the outputs of an answer with status OK, by name."""
        with np.load(self.paths["outputs"], allow_pickle=False) as file:
            return {name: file[str(index)] for index, name in enumerate((answer.data or {})["names"])}


def prefix_input_names(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Prefix the names with "input.": np.savez has a parameter `file`, which an input must not be called."""
    return {f"input.{name}": value for name, value in inputs.items()}


@contextmanager
def exchange_files(inputs: Mapping[str, np.ndarray]) -> Iterator[ExchangeFiles]:
    """Temporary files for one request."""
    with TemporaryFolder() as folder:
        yield ExchangeFiles(folder, inputs)


def count_low_precision(executed: Sequence[Mapping[str, Any]]) -> tuple[int, tuple[str, ...]]:
    """Return the number of layers with weights in low precision, and the names of those in float with the reason.

    A node without weights is neither: its "low" is None (child_loop.py).
    """
    fallbacks = []
    for node in executed:
        if node["low"] is False:
            reason = f": {node['why']}" if node["why"] else ""
            fallbacks.append(f"{node['name']} ({node['op']}{reason})")
    return sum(node["low"] is True for node in executed), tuple(fallbacks)
