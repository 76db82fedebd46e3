"""benchmark: compares the speed of a quantized file with a float file.

One child process runs the files in turns, so that a slow phase of the machine hits all of them.
"""

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

RATIO_PRECISION = 0.02  # of the speed ratio
# Shape arithmetic of free sizes takes tens of microseconds: in longer runs that is less than 5 %.
MAX_FIXED_SECONDS = 1e-3
# A process that measures for `seconds` may take longer: each file runs a minimum number of times, however slow it is.
OVERTIME_FACTOR = 10
START_SECONDS = 300  # to load, compile and warm up large files
MAX_BASELINE_BYTES = 1_000_000_000  # of weights: the second float export of a larger model takes too long


def benchmark(
    float_path: str | Path,
    quantized_path: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str | Runtime | None = None,
    threads: int = 1,
    repeats: int = 400,
    precision: float = RATIO_PRECISION,
    seconds: float = 20,
    memory: int | None = None,
    plain_path: str | Path | None = None,
    plain_inputs: Mapping[str, np.ndarray] | None = None,
    baseline: str | None = None,
) -> Benchmark:
    """Measure the speed of a quantized file relative to a float file, with interleaved runs in one process.

    Args:
        float_path: The float file.
        quantized_path: The quantized file.
        inputs: Arrays by input name; random arrays by default.
        runtime: A runtime or its name. Default: the first runtime that reads this kind of file.
        threads: Threads of the runtime.
        repeats: Maximum number of runs of each file. More than 50 are made only if they are short.
        precision: Fewer runs are made if the speed ratio is known to this share with 95 % confidence; 0 makes all.
        seconds: Time limit for all runs together. Each file runs at least 5 times.
        memory: Memory limit of the runtime in bytes; the memory of the machine by default.
        plain_path: A second float file, written by torch.onnx.export. The faster float file is the baseline.
        plain_inputs: Arrays of inputs that only `plain_path` has, by name.
        baseline: Use this float file as the baseline even if it is the slower one: "the float file" or
            "the plain export". A float file that does not run is left out, even if it is this one.

    Returns:
        The speed ratio, the median times and the conditions of the measurement.

    Raises:
        VerificationError: The runtime is not available or cannot run the files.

    Example:
        print(benchmark("float.onnx", "model.onnx", threads=4))
    """
    check_baseline(baseline)
    path, float_path = check_exists(quantized_path), check_exists(float_path)
    plain_path = None if plain_path is None else check_exists(plain_path)
    runtime = find_runtime_for(path) if runtime is None else find_runtime(runtime)
    if runtime.why_no_speed:
        raise VerificationError(f"the speed cannot be measured here: {runtime.why_no_speed}")
    feeds = dict(inputs) if inputs is not None else make_random_inputs(float_path, runtime)
    limits = {
        "options": {"threads": threads},
        "repeats": repeats,
        "precision": precision,
        "seconds": seconds,
        "fixed_below": MAX_FIXED_SECONDS,
    }
    candidates = {OWN_BASELINE: float_path}  # float files that may become the baseline
    if plain_path is not None and baseline != OWN_BASELINE:
        candidates[PLAIN_BASELINE] = plain_path
    with exchange_files({**feeds, **(plain_inputs or {})}) as files:
        answer = _run_benchmark(runtime, [*candidates.values(), path], files, limits, memory)
        if answer.status != Status.OK and len(candidates) > 1:  # one of the float files may not run
            for name in sorted(candidates, key=lambda name: name != baseline):  # the fixed baseline first
                retried = _run_benchmark(runtime, [candidates[name], path], files, limits, memory)
                if retried.status == Status.OK:
                    answer, candidates = retried, {name: candidates[name]}
                    break
        answer = explain_crash(runtime, answer, files, float_path, limit_process(seconds))
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{runtime.name} could not run the files: {answer.status.value}: {answer.message}")
    *float_quartiles, quantized_quartiles = answer.data["quartiles"]  # of the seconds per run
    *float_medians, quantized_seconds = answer.data["medians"]
    quartiles = dict(zip(candidates, float_quartiles, strict=True))
    float_seconds = dict(zip(candidates, float_medians, strict=True))
    fastest = min(float_seconds, key=float_seconds.__getitem__)
    chosen = baseline if baseline in float_seconds else fastest
    return Benchmark(
        ratio=float_seconds[chosen] / quantized_seconds,
        seconds=(float_seconds[chosen], quantized_seconds),
        threads=threads,
        repeats=int(answer.data["repeats"]),
        runtime=runtime.name,
        shapes={name: value.shape for name, value in feeds.items()},
        spread=(_relative_spread(quartiles[chosen]), _relative_spread(quantized_quartiles)),
        fixed_seconds=answer.data.get("fixed_seconds"),
        baseline=chosen,
        baseline_file=candidates[chosen].name,
        float_seconds=float_seconds,
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
        runtime: A runtime or its name. Default: the first runtime that reads this kind of file.
        **limits: Time and memory limits, as for `benchmark`.

    Returns:
        One benchmark per combination.
    """
    path = check_exists(float_path)
    runtime = find_runtime_for(check_exists(quantized_path)) if runtime is None else find_runtime(runtime)
    feeds = {batch: make_random_inputs(path, runtime, batch, length) for batch in batches}
    return tuple(
        benchmark(path, quantized_path, feeds[batch], runtime=runtime, threads=count, **limits)
        for count in threads
        for batch in batches
    )


def _run_benchmark(
    runtime: Runtime, paths: Sequence[Path], files: ExchangeFiles, limits: Mapping[str, Any], memory: int | None
) -> TaskResult:
    request = {"task": "benchmark", "paths": [str(path) for path in paths], **limits, **files.paths}
    return run_task(runtime, request, seconds=limit_process(limits["seconds"]), memory=memory)


def limit_process(seconds: float) -> float:
    """Return the time limit of a process that measures for `seconds`."""
    return seconds * OVERTIME_FACTOR + START_SECONDS


def check_baseline(baseline: str | None) -> None:
    """Refuse a baseline that is neither of the two names: `benchmark` would silently choose one itself."""
    if baseline not in (None, OWN_BASELINE, PLAIN_BASELINE):
        raise UsageError(
            f"baseline={short_repr(baseline)}: {did_you_mean(str(baseline), (OWN_BASELINE, PLAIN_BASELINE))}"
        )


def _relative_spread(quartiles: Sequence[float]) -> float:
    return (quartiles[2] - quartiles[0]) / quartiles[1]


@contextmanager
def baseline_file(model: nn.Module, file_format: FileFormat, request: ExportRequest) -> Iterator[Path | None]:
    """Temporary float file written by the usual exporter (torch.onnx.export); None if that exporter fails."""
    with TemporaryFolder() as folder:
        yield write_baseline_file(model, file_format, request, folder / f"plain{file_format.suffix}")


def write_baseline_file(model: nn.Module, file_format: FileFormat, request: ExportRequest, path: Path) -> Path | None:
    """Write the float model with the usual exporter (torch.onnx.export). Return None if that exporter fails."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if file_format.write_baseline is not None and size < MAX_BASELINE_BYTES:
        with suppress(Exception):  # exporters raise many types; without this file the other float file is the baseline
            file_format.write_baseline(model, path, request)
    return path if path.is_file() else None


def explain_crash(
    runtime: Runtime, answer: TaskResult, files: ExchangeFiles, float_path: Path | None, seconds: float
) -> TaskResult:
    """Add to a crash whether the float file crashes too. Then the runtime is the cause, not the quantization."""
    if answer.status != Status.CRASHED or float_path is None:
        return answer
    request = {"task": "run", "path": str(float_path), "options": {"threads": 1}, **files.paths}
    float_answer = run_task(runtime, request, seconds=seconds)
    if float_answer.status == Status.OK:
        explanation = "the float file runs"
    elif float_answer.status == Status.CRASHED:
        explanation = f"the float file crashes too ({float_answer.message}), so it is not the quantization"
    else:
        explanation = f"the float file: {float_answer.message}"
    return replace(answer, message=f"{answer.message}; {explanation}")


def make_random_inputs(path: Path, runtime: Runtime, batch: int = 1, length: int = 1) -> dict[str, np.ndarray]:
    """Make inputs of the shapes that a file declares: random floats, and ones for integers.

    A free first axis has the size `batch`, other free axes have the size `length`.
    """
    generator = np.random.default_rng(0)
    inputs = read_file_info(path, runtime).inputs
    fixed = next((info for info in inputs if info.shape and info.shape[0] is not None), None)
    # If one input has a free first axis, that axis is the batch, and the fixed first axes of other inputs are not.
    has_free_batch = any(info.shape and info.shape[0] is None for info in inputs)
    if fixed is not None and not has_free_batch and batch not in (1, fixed.shape[0]):
        raise UsageError(
            f"{path.name} takes {fixed.name} only in batches of {fixed.shape[0]}, got {batch}: export it with a "
            "free batch, dynamic=True"
        )
    feeds = {}
    for info in inputs:
        free_sizes = [batch] + [length] * (len(info.shape) - 1)
        shape = [size or free_size for size, free_size in zip(info.shape, free_sizes, strict=False)]
        is_float = np.issubdtype(np.dtype(info.dtype), np.floating)
        feeds[info.name] = (generator.standard_normal(shape) if is_float else np.ones(shape)).astype(info.dtype)
    return feeds
