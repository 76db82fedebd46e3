"""benchmark: the speed of files in one process, in turns."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from scalepoint.errors import VerificationError
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import Answer, Exchange, ask, exchange
from scalepoint.verification.files import about_file, existing
from scalepoint.verification.result import Benchmark


def benchmark(
    float_path: str | Path,
    quantized_path: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str | Runtime = "onnxruntime",
    threads: int = 1,
    repeats: int = 50,
    seconds: float = 20,
    memory: int | None = None,
) -> Benchmark:
    """The speed of one file against another in one process, interleaved; without inputs, random ones of their shape."""
    found, limit = find_runtime(runtime), seconds * 10 + 300
    paths = [existing(float_path), existing(quantized_path)]
    feeds = dict(inputs) if inputs is not None else random_inputs(paths[0], found)
    with exchange(feeds) as files:
        request = {"task": "benchmark", "paths": [str(path) for path in paths], "options": {"threads": threads}}
        more = {**files.files, "repeats": repeats, "seconds": seconds}
        answer = ask(found, {**request, **more}, seconds=limit, memory=memory)
        answer = blamed(found, answer, files, paths[0], limit)
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{found.name} could not run the files: {answer.status.value}: {answer.message}")
    first, second = (quarters[1] for quarters in answer.data["quartiles"])
    return Benchmark(first / second, (first, second), threads, int(answer.data["repeats"]), found.name)


def blamed(runtime: Runtime, answer: Answer, files: Exchange, float_path: Path | None, seconds: float) -> Answer:
    """A crash, and whether the float file crashes too: then it is the runtime on this machine, not what we wrote."""
    if answer.status != Status.CRASHED or float_path is None:
        return answer
    request = {"task": "run", "path": str(float_path), "options": {"threads": 1}, **files.files}
    plain = ask(runtime, request, seconds=seconds)
    said = {
        Status.OK: "the float file runs",
        Status.CRASHED: f"the float file too ({plain.message}), so it is not the quantization",
    }
    return replace(answer, message=f"{answer.message}; {said.get(plain.status, f'the float file: {plain.message}')}")


def random_inputs(path: Path, runtime: Runtime) -> dict[str, np.ndarray]:
    """Inputs of the shapes that a file declares; free axes are 1, integers are small."""
    generator = np.random.default_rng(0)
    feeds = {}
    for each in about_file(path, runtime).inputs:
        shape = [size or 1 for size in each.shape]
        is_float = np.issubdtype(np.dtype(each.dtype), np.floating)
        feeds[each.name] = (generator.standard_normal(shape) if is_float else np.ones(shape)).astype(each.dtype)
    return feeds
