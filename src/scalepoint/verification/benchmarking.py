"""benchmark: the speed of files in one process, in turns."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from scalepoint.errors import UsageError, VerificationError, did_you_mean, short_repr
from scalepoint.formats import ExportRequest, FileFormat
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import ExchangeFiles, TaskResult, exchange_files, run_task
from scalepoint.support.files import TemporaryFolder
from scalepoint.verification.file_formats import check_exists, find_runtime_for, read_file_info
from scalepoint.verification.result import OWN_BASELINE, PLAIN_BASELINE, Benchmark

MAX_BASELINE_BYTES = 1_000_000_000  # bytes of weights: beyond, another export costs more than it tells


def benchmark(
    float_path: str | Path,
    quantized_path: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str | Runtime | None = None,
    threads: int = 1,
    repeats: int = 50,
    seconds: float = 20,
    memory: int | None = None,
    plain_path: str | Path | None = None,
    baseline: str | None = None,
) -> Benchmark:
    """The speed of one file against another in one process, interleaved.

    Args:
        float_path: The file to compare with.
        quantized_path: The file that should be faster.
        inputs: Arrays by the names of the inputs; random ones of their shape unless given.
        runtime: The first that reads files of this kind unless given.
        threads: Of the runtime.
        repeats: Runs of each file at most.
        seconds: For all runs together; each file runs at least 5 times.
        memory: Bytes that the runtime may have; all of this machine's unless given.
        plain_path: Another float file, of torch.onnx.export: the faster of the two is the baseline.
        baseline: Which of the two is the baseline, "the float file" or "the plain export", whichever is faster now.
    """
    check_baseline(baseline)
    paths = [check_exists(float_path), check_exists(quantized_path)]
    found = find_runtime_for(paths[1]) if runtime is None else find_runtime(runtime)
    if found.why_not_run:
        raise VerificationError(f"no speed to measure here: {found.why_not_run}")
    feeds = dict(inputs) if inputs is not None else make_random_inputs(paths[0], found)
    asked = {"options": {"threads": threads}, "repeats": repeats, "seconds": seconds}
    with exchange_files(feeds) as files:
        answer = None
        if plain_path is not None:
            answer = _run_benchmark(found, [*paths, check_exists(plain_path)], files, asked, memory)
        if answer is None or answer.status != Status.OK:  # what the plain exporter wrote may not run
            answer = _run_benchmark(found, paths, files, asked, memory)
        answer = explain_crash(found, answer, files, paths[0], seconds * 10 + 300)
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{found.name} could not run the files: {answer.status.value}: {answer.message}")
    own, quantized, *plain = answer.data["quartiles"]
    floats = {OWN_BASELINE: own} | dict(zip((PLAIN_BASELINE,), plain, strict=False))
    named = baseline if baseline in floats else min(floats, key=lambda name: floats[name][1])
    faster = floats[named]
    return Benchmark(
        ratio=faster[1] / quantized[1],
        seconds=(faster[1], quantized[1]),
        threads=threads,
        repeats=int(answer.data["repeats"]),
        runtime=found.name,
        shapes={name: value.shape for name, value in feeds.items()},
        spread=(_relative_spread(faster), _relative_spread(quantized)),
        baseline=named,
        baseline_file=paths[0].name if named == OWN_BASELINE or plain_path is None else Path(plain_path).name,
    )


def throughput(
    float_path: str | Path,
    quantized_path: str | Path,
    *,
    batches: Sequence[int] = (1, 8, 32),
    threads: Sequence[int] = (1,),
    length: int = 1,
    runtime: str | Runtime | None = None,
    **limits: Any,
) -> tuple[Benchmark, ...]:
    """Run `benchmark` for several batch sizes and numbers of threads, with random inputs.

    Args:
        float_path: The float file.
        quantized_path: The quantized file.
        batches: Batch sizes.
        threads: Numbers of threads.
        length: Size of all other free axes.
        runtime: A runtime or its name; guessed from the files by default.
        **limits: Time and memory limits, as for `benchmark`.

    Returns:
        One benchmark per combination.
    """
    path = check_exists(float_path)
    found = find_runtime_for(check_exists(quantized_path)) if runtime is None else find_runtime(runtime)
    feeds = {batch: make_random_inputs(path, found, batch, length) for batch in batches}
    return tuple(
        benchmark(path, quantized_path, feeds[batch], runtime=found, threads=each, **limits)
        for each in threads
        for batch in batches
    )


def _run_benchmark(
    runtime: Runtime, paths: Sequence[Path], files: ExchangeFiles, asked: Mapping[str, Any], memory: int | None
) -> TaskResult:
    request = {"task": "benchmark", "paths": [str(path) for path in paths], **asked, **files.files}
    return run_task(runtime, request, seconds=asked["seconds"] * 10 + 300, memory=memory)


def check_baseline(baseline: str | None) -> None:
    """Refuse a baseline that is neither of the two: a misspelt one would be left out silently."""
    if baseline not in (None, OWN_BASELINE, PLAIN_BASELINE):
        raise UsageError(
            f"baseline={short_repr(baseline)}: {did_you_mean(str(baseline), (OWN_BASELINE, PLAIN_BASELINE))}"
        )


def _relative_spread(quarters: Sequence[float]) -> float:
    return (quarters[2] - quarters[0]) / quarters[1]


@contextmanager
def baseline_file(model: nn.Module, form: FileFormat, request: ExportRequest) -> Iterator[Path | None]:
    """The float model as the exporter that people use writes it, for a while; None where that cannot."""
    with TemporaryFolder() as folder:
        yield write_baseline_file(model, form, request, folder / f"plain{form.suffix}")


def write_baseline_file(model: nn.Module, form: FileFormat, request: ExportRequest, path: Path) -> Path | None:
    """Write the float model as the exporter that people use writes it. None where that cannot."""
    size = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    if form.write_baseline is not None and size < MAX_BASELINE_BYTES:
        with suppress(Exception):  # an exporter raises what it likes, and then there is no such file to beat
            form.write_baseline(model, path, request)
    return path if path.is_file() else None


def explain_crash(
    runtime: Runtime, answer: TaskResult, files: ExchangeFiles, float_path: Path | None, seconds: float
) -> TaskResult:
    """A crash, and whether the float file crashes too: then it is the runtime on this machine, not what we wrote."""
    if answer.status != Status.CRASHED or float_path is None:
        return answer
    request = {"task": "run", "path": str(float_path), "options": {"threads": 1}, **files.files}
    plain = run_task(runtime, request, seconds=seconds)
    said = {
        Status.OK: "the float file runs",
        Status.CRASHED: f"the float file too ({plain.message}), so it is not the quantization",
    }
    return replace(answer, message=f"{answer.message}; {said.get(plain.status, f'the float file: {plain.message}')}")


def make_random_inputs(path: Path, runtime: Runtime, batch: int = 1, length: int = 1) -> dict[str, np.ndarray]:
    """Inputs of the shapes that a file declares; free axes are `batch` where they come first, else `length`; integers
    are small."""
    generator = np.random.default_rng(0)
    declared = read_file_info(path, runtime).inputs
    fixed = next((each for each in declared if each.shape and each.shape[0] is not None), None)
    is_free = any(each.shape and each.shape[0] is None for each in declared)  # then what is fixed is no batch
    if fixed is not None and not is_free and batch not in (1, fixed.shape[0]):
        raise UsageError(
            f"{path.name} takes {fixed.name} in batches of {fixed.shape[0]} alone, not of {batch}: export it with a "
            "free batch, dynamic=True"
        )
    feeds = {}
    for each in declared:
        shape = [size or (length if axis else batch) for axis, size in enumerate(each.shape)]
        is_float = np.issubdtype(np.dtype(each.dtype), np.floating)
        feeds[each.name] = (generator.standard_normal(shape) if is_float else np.ones(shape)).astype(each.dtype)
    return feeds
