"""What is said of a deployed file, and the speed of several in turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.graph.capture import as_inputs
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import Answer, Status, ask, exchange, precision
from scalepoint.verification.simulation import feeds_of


@dataclass(frozen=True)
class File:
    """One file of a network. Decibels; speed and size are ratios to the float file."""

    how: str
    int8: str
    against_float: float
    agreement: float | None
    speed: float
    size: float
    left: int = 0  # operations that stay float for speed


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@torch.no_grad()
def run(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(**batch) if isinstance(batch, dict) else model(batch)
    return result


def arrays(model: Any, batch: Any) -> dict[str, np.ndarray]:
    """A batch as a runtime takes it."""
    return feeds_of(model, as_inputs(batch, None))


def share(low: int, left: Sequence[str]) -> str:
    return f"{low} of {low + len(left)}"


def answered(answer: Answer, runtime: str) -> Mapping[str, Any]:
    if answer.status != Status.OK or answer.data is None:
        raise SystemExit(f"{runtime}: {answer.status.value}: {answer.message}")
    return answer.data


def ran(path: Path, feeds: Mapping[str, np.ndarray], runtime: str) -> tuple[Tensor, str]:
    """The output of a file, and how many of its operations with weights ran in int8."""
    with exchange(feeds) as files:
        request = {"task": "run", "path": str(path), "options": {"threads": 1}, "executed": True, **files.files}
        answer = ask(find_runtime(runtime), request)
        executed = answered(answer, runtime)["executed"]
        output = next(iter(files.outputs(answer).values()))
    return torch.from_numpy(output), share(*precision(executed))


def speeds(paths: Sequence[Path], feeds: Mapping[str, np.ndarray], runtime: str, repeats: int = 60) -> list[float]:
    """How many times faster than the first file each one is: medians of interleaved runs in one process."""
    with exchange(feeds) as files:
        request = {"task": "benchmark", "paths": [str(path) for path in paths], "options": {"threads": 1}}
        answer = ask(find_runtime(runtime), {**request, **files.files, "repeats": repeats, "seconds": 60}, seconds=1200)
    medians = [each[1] for each in answered(answer, runtime)["quartiles"]]
    return [medians[0] / each for each in medians]


def size_of(path: Path) -> int:
    """With the weights beside it."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if weights.exists() else 0)
