"""A runtime in a child process, with limits: its crash, hang or hunger is a finding of ours, not our own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import numpy as np

from scalepoint.runtimes.child_loop import NOT_EVALUATED, OUT_OF_MEMORY
from scalepoint.runtimes.runtime import Runtime
from scalepoint.support.cpu import check_threads, child_environment, signal_name
from scalepoint.support.files import TemporaryFolder

TIMEOUT_SECONDS = 600
CHILD_LOOP = Path(__file__).with_name("child_loop.py")
TRACEBACK_HEADER = "Traceback (most recent call last)"
STDERR_BYTES = 65_536  # that are kept of what a child prints: the end of it, where the error stands


class Status(StrEnum):
    """How a run in the runtime ended."""

    OK = "ok"
    NOT_VERIFIED = "not verified here"  # a limit of the check itself: no fault of the file, never an error
    UNAVAILABLE = "unavailable"  # not installed
    FAILED = "failed"  # the runtime refused the file, or the run
    CRASHED = "crashed"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class TaskResult:
    """What came back."""

    status: Status
    message: str = ""
    data: Mapping[str, Any] | None = None


def total_memory() -> int:
    """What a child may have unless told: the memory of this machine, so that it fails before the machine does."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run_task(
    runtime: Runtime, request: Mapping[str, Any], *, seconds: float = TIMEOUT_SECONDS, memory: int | None = None
) -> TaskResult:
    """Run one task in a child process that has `memory` bytes at most."""
    if not runtime.is_here:
        return describe_missing(runtime)
    check_threads(request.get("options", {}).get("threads") or 0)
    limit = memory or total_memory()
    with Child(runtime) as child:
        with child.within(seconds):
            child.send(json.dumps({**request, "memory": limit}).encode() + b"\n")
            output = child.output.read().decode(errors="replace")  # until it ends
            code = child.wait()
        errors = child.errors()
    if child.is_late:
        return TaskResult(Status.TIMEOUT, f"{runtime.name} did not end within {seconds:.0f} s")
    if code:
        return describe_exit(runtime, code, errors, limit)
    try:
        return TaskResult(Status.OK, data=json.loads(output.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return TaskResult(Status.FAILED, f"{runtime.name} gave no answer{_last_line(errors)}")


class Child:
    """The process of a runtime. Its stdin stays open as long as the parent wants it: at the end of stdin it exits.

    A thread reads its stderr and keeps the last STDERR_BYTES of it. A child that prints gigabytes costs no memory.
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
        self.lock = threading.Lock()  # held from a request until its answer
        self._kept = b""
        self._reader = threading.Thread(target=self._read_end_of_stderr, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        return self._process.stdout

    def send(self, data: bytes) -> None:
        """Write to its stdin. Nothing is raised where it has exited: then its stdout has ended too."""
        assert self._process.stdin is not None  # noqa: S101
        with suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kill the child after this time, which ends a read of its stdout."""
        timer = threading.Timer(seconds, self._kill_late)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def errors(self) -> str:
        """The end of its stderr, once it has exited."""
        self._reader.join(timeout=5)  # not for ever: a process that it started may hold the pipe open
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Close its stdin, which asks it to exit; kill it if it does not within 5 s.

        A request of another thread is waited for, but not for ever: this also runs when Python exits.
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
            self._kept = (self._kept + chunk)[-STDERR_BYTES:]


def describe_missing(runtime: Runtime) -> TaskResult:
    way_out = runtime.install or f"pip install {runtime.package}"
    return TaskResult(Status.UNAVAILABLE, f"{runtime.name} is not installed: {way_out}")


def child_command(runtime: Runtime) -> list[str]:
    return [sys.executable, "-I", str(CHILD_LOOP), str(Path(runtime.child).resolve())]


def describe_exit(runtime: Runtime, code: int, errors: str, memory: int) -> TaskResult:
    """Why a child ended that should not have."""
    if code == OUT_OF_MEMORY or "std::bad_alloc" in errors:
        return TaskResult(Status.FAILED, f"{runtime.name} needs more memory than the {memory / 1e9:.2f} GB it may have")
    if code == NOT_EVALUATED:
        return TaskResult(Status.NOT_VERIFIED, _last_line(errors).removeprefix(": "))
    end = signal_name(code)
    if end is not None:
        return TaskResult(Status.CRASHED, f"{runtime.name} died of {end}{_last_line(errors)}")
    said = _last_line(errors).removeprefix(": ")
    return TaskResult(Status.FAILED, said or f"{runtime.name} exited with code {code} and printed no error")


def _last_line(text: str) -> str:
    """Of a traceback all that the error says, which may be several lines."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    frames = [at for at, line in enumerate(lines) if line.startswith("  ")] if TRACEBACK_HEADER in text else []
    said = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return f": {' '.join(map(str.strip, said))[:500]}" if said else ""


class ExchangeFiles:
    """The files of one request: tensors go there and come back."""

    def __init__(self, folder: Path, inputs: Mapping[str, np.ndarray]) -> None:
        self.files = {"inputs": str(folder / "inputs.npz"), "outputs": str(folder / "outputs.npz")}
        np.savez(self.files["inputs"], **prefix_input_names(inputs))

    def outputs(self, answer: TaskResult) -> dict[str, np.ndarray]:
        with np.load(self.files["outputs"], allow_pickle=False) as file:
            return {name: file[str(index)] for index, name in enumerate((answer.data or {})["names"])}


def prefix_input_names(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """As np.savez takes them, which has a parameter called `file`."""
    return {f"input.{name}": value for name, value in inputs.items()}


@contextmanager
def exchange_files(inputs: Mapping[str, np.ndarray]) -> Iterator[ExchangeFiles]:
    """Files that are gone afterwards."""
    with TemporaryFolder() as folder:
        yield ExchangeFiles(folder, inputs)


def count_low_precision(executed: Sequence[Mapping[str, Any]]) -> tuple[int, tuple[str, ...]]:
    """How many operations with weights run in low precision, and which do not."""
    left = [each for each in executed if each["low"] is False]
    why = (f"{each['name']} ({each['op']}{': ' + each['why'] if each['why'] else ''})" for each in left)
    return sum(each["low"] is True for each in executed), tuple(why)
