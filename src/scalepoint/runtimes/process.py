"""A runtime in a child process, with limits: its crash, hang or hunger is a finding of ours, not our own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.files import TemporaryFolder
from scalepoint.processor import child_environment, signal_of
from scalepoint.runtimes.loop import OUT_OF_MEMORY
from scalepoint.runtimes.runtime import Runtime

SECONDS = 600
LOOP = Path(__file__).with_name("loop.py")
TRACEBACK = "Traceback (most recent call last)"


class Status(StrEnum):
    """How a run in the runtime ended."""

    OK = "ok"
    UNAVAILABLE = "unavailable"  # not installed
    FAILED = "failed"  # the runtime refused the file, or the run
    CRASHED = "crashed"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: Status
    message: str = ""
    data: Mapping[str, Any] | None = None


def all_memory() -> int:
    """What a child may have unless told: the memory of this machine, so that it fails before the machine does."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ask(runtime: Runtime, request: Mapping[str, Any], *, seconds: float = SECONDS, memory: int | None = None) -> Answer:
    """Run one task in a child process that has `memory` bytes at most."""
    if not runtime.is_here:
        return missing(runtime)
    limit = memory or all_memory()
    try:
        done = subprocess.run(  # noqa: S603  # our own file, no shell
            command(runtime),
            input=json.dumps({**request, "memory": limit}),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(Status.TIMEOUT, f"{runtime.name} did not end within {seconds:.0f} s")
    if done.returncode:
        return ended(runtime, done.returncode, done.stderr, limit)
    try:
        return Answer(Status.OK, data=json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return Answer(Status.FAILED, f"{runtime.name} gave no answer{_last_line(done.stderr)}")


def missing(runtime: Runtime) -> Answer:
    way_out = runtime.install or f"pip install {runtime.package}"
    return Answer(Status.UNAVAILABLE, f"{runtime.name} is not installed: {way_out}")


def command(runtime: Runtime) -> list[str]:
    return [sys.executable, "-I", str(LOOP), str(Path(runtime.child).resolve())]


def ended(runtime: Runtime, code: int, errors: str, memory: int) -> Answer:
    """Why a child ended that should not have."""
    if code == OUT_OF_MEMORY or "std::bad_alloc" in errors:
        return Answer(Status.FAILED, f"{runtime.name} needs more memory than the {memory / 1e9:.2f} GB it may have")
    end = signal_of(code)
    if end is not None:
        return Answer(Status.CRASHED, f"{runtime.name} died of {end}{_last_line(errors)}")
    return Answer(Status.FAILED, _last_line(errors).removeprefix(": "))


def _last_line(text: str) -> str:
    """Of a traceback all that the error says, which may be several lines."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    frames = [at for at, line in enumerate(lines) if line.startswith("  ")] if TRACEBACK in text else []
    said = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return f": {' '.join(map(str.strip, said))[:500]}" if said else ""


class Exchange:
    """The files of one request: tensors go there and come back."""

    def __init__(self, folder: Path, inputs: Mapping[str, np.ndarray]) -> None:
        self.files = {"inputs": str(folder / "inputs.npz"), "outputs": str(folder / "outputs.npz")}
        np.savez(self.files["inputs"], **named(inputs))

    def outputs(self, answer: Answer) -> dict[str, np.ndarray]:
        with np.load(self.files["outputs"], allow_pickle=False) as file:
            return {name: file[str(index)] for index, name in enumerate((answer.data or {})["names"])}


def named(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """As np.savez takes them, which has a parameter called `file`."""
    return {f"input.{name}": value for name, value in inputs.items()}


@contextmanager
def exchange(inputs: Mapping[str, np.ndarray]) -> Iterator[Exchange]:
    """Files that are gone afterwards."""
    with TemporaryFolder() as folder:
        yield Exchange(folder, inputs)


def precision(executed: Sequence[Mapping[str, Any]]) -> tuple[int, tuple[str, ...]]:
    """How many operations with weights run in low precision, and which do not."""
    left = [each for each in executed if each["low"] is False]
    why = (f"{each['name']} ({each['op']}{': ' + each['why'] if each['why'] else ''})" for each in left)
    return sum(each["low"] is True for each in executed), tuple(why)
