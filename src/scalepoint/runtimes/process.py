"""A runtime in a child process, with limits: its crash or hang is a finding of ours, not our own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.processor import child_environment, signal_of

RUNTIMES = ("onnxruntime", "openvino")
SECONDS = 600
CHILD = Path(__file__).with_name("child.py")


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


def ask(request: Mapping[str, Any], *, seconds: float = SECONDS) -> Answer:
    """Run one task in a child process."""
    runtime = str(request["runtime"])
    if find_spec(runtime) is None:
        return Answer(Status.UNAVAILABLE, f"{runtime} is not installed: pip install {runtime}")
    try:
        done = subprocess.run(  # noqa: S603  # our own file, no shell
            [sys.executable, "-I", str(CHILD)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(Status.TIMEOUT, f"{runtime} did not end within {seconds:.0f} s")
    end = signal_of(done.returncode)
    if end is not None:
        return Answer(Status.CRASHED, f"{runtime} died of {end}{_last_line(done.stderr)}")
    if done.returncode:
        return Answer(Status.FAILED, _last_line(done.stderr).removeprefix(": "))
    try:
        return Answer(Status.OK, data=json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return Answer(Status.FAILED, f"{runtime} gave no answer{_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return f": {lines[-1].strip()[:500]}" if lines else ""


@contextmanager
def exchange(inputs: Mapping[str, np.ndarray]) -> Iterator[dict[str, str]]:
    """Files for the tensors that go there and come back; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
        paths = {name: str(Path(folder) / name) for name in ("inputs.npz", "outputs.npz", "compiled.onnx")}
        named: dict[str, Any] = {f"input.{name}": value for name, value in inputs.items()}  # `file` is numpy's own
        np.savez(paths["inputs.npz"], **named)
        yield {"inputs": paths["inputs.npz"], "outputs": paths["outputs.npz"], "compiled": paths["compiled.onnx"]}


def arrays(path: str, names: list[str]) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[str(index)] for index, name in enumerate(names)}
