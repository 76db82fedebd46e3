"""What is said of a deployed file, and the speed of several in turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalepoint.verification.process import Status, ask, exchange


@dataclass(frozen=True)
class File:
    """One file of a network. Decibels; speed and size are ratios to the float file."""

    how: str
    int8: str
    against_float: float
    agreement: float | None
    speed: float
    size: float


def share(low: int, left: Sequence[str]) -> str:
    return f"{low} of {low + len(left)}"


def speeds(paths: Sequence[Path], feeds: Mapping[str, np.ndarray], runtime: str = "onnxruntime") -> list[float]:
    """How many times faster than the first file each one is: medians of interleaved runs in one process."""
    with exchange(feeds) as files:
        request = {"task": "benchmark", "runtime": runtime, "paths": [str(path) for path in paths], "threads": 1}
        answer = ask({**request, **files, "repeats": 60, "seconds": 60}, seconds=1200)
    if answer.status != Status.OK or answer.data is None:
        raise SystemExit(f"{runtime} could not run the files: {answer.message}")
    medians = answer.data["medians"]
    return [medians[0] / each for each in medians]
