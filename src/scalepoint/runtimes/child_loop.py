"""The program of every runtime's child process: python -I child_loop.py CHILD.py. It imports nothing of scalepoint.

CHILD.py belongs to one runtime. It defines a class File(path, options) with

    inputs                     names of the inputs
    run(feeds)                 [(name, array), ..]
    executed()                 [{"name", "op", "low", "why"}, ..]: nodes that really run; "low" is None without weights
    profiled()                 [{"name", "op", "seconds"}, ..]: medians without the first run, with option "profile"
    generate(tokens, count)    {"tokens", "prefill_seconds", "decode_seconds"}; only for language models
    note                       what is special about the run, for the user; only if there is something
    gaps                       exceptions for operations that it cannot evaluate; only if it replaces a runtime

A request is a line of JSON on stdin, and its answer a line of JSON on stdout. Tensors are in .npz files. The next
request may follow the answer. A task that fails ends the process: its exit code and stderr describe the error. The task
"serve" runs one file until stdin ends; there the tensors are .npz frames in the pipes. This process exits when stdin
ends, so it also exits if the parent is killed.
"""

import gc
import io
import json
import math
import os
import runpy
import select
import statistics
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

OUT_OF_MEMORY = 70  # exit code
NOT_EVALUATED = 71  # exit code if File raised one of its `gaps`
OUT_OF_MEMORY_PHRASES = ("bad_alloc", "allocate memory", "failed to allocate")  # in error messages of runtimes
MIN_RUNS = 5
CHECKED_ROUNDS = (10, 16, 24, 32, 40, 80, 160, 320)  # numbers of rounds after which a benchmark may stop
# More rounds are made only while they are cheap: files that run for a millisecond need them on a busy machine.
LONG_ROUNDS, MAX_CHEAP_SECONDS = 50, 1.5  # of CPU time
BRIEF_SECONDS = 0.02  # a shorter round is over before the caches hold a file again: each file runs once untimed before
CALM_SHARE = 0.5  # of the rounds of a benchmark, those in which other programs disturbed least
ERROR_PROBABILITY = 0.05  # that a benchmark stops although a ratio is not known to the requested precision
EXIT_GRACE_SECONDS = 1.0  # time for the main thread to exit by itself; the parent waits 5 s
TIME_OUTPUTS = ("prefill_seconds", "decode_seconds")
Arrays = dict[str, np.ndarray]


def main() -> None:
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # some runtimes print to stdout, which would mix with the answers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    file_class: Any = None
    gaps: tuple[type[Exception], ...] = ()
    try:
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            _limit_memory(request.get("memory"))  # before the import of the runtime, which counts
            if file_class is None:
                file_class = runpy.run_path(sys.argv[1])["File"]
                gaps = tuple(getattr(file_class, "gaps", ()))
            TASKS[request["task"]](file_class, request, pipe)
            gc.collect()  # the files of this task, before the next one counts its memory
    except gaps as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_EVALUATED)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except Exception as error:
        if any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY_PHRASES):
            sys.exit(OUT_OF_MEMORY)
        raise


def _limit_memory(size: int | None) -> None:
    """Set the limit of one task. Only the soft limit, so that the next task can have a higher one."""
    if resource is None:
        return
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if size is None or (hard_limit != resource.RLIM_INFINITY and size > hard_limit):
        size = hard_limit
    resource.setrlimit(resource.RLIMIT_DATA, (size, hard_limit))


def _exit_with_parent() -> None:
    """Exit soon after the parent closed stdin, even in the middle of a run.

    `poll` reports the end of a pipe without reading from it, so requests stay in the pipe for the main thread. Windows
    has no `poll`: there this process exits at the end of its run.
    """
    if not hasattr(select, "poll"):
        return
    stdin = select.poll()
    stdin.register(0, 0)
    stdin.poll()
    time.sleep(EXIT_GRACE_SECONDS)  # a main thread that waits for a request exits by itself
    interrupt_main()  # KeyboardInterrupt, so that temporary folders are removed
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(1)


def run(file_class: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Run a file once and write its outputs. Answer with their names and, on request, the nodes that really run."""
    file = file_class(request["path"], request["options"])
    outputs = file.run(_match_input_names(file.inputs, _read_arrays(request["inputs"])))
    with open(request["outputs"], "wb") as target:
        target.write(_to_npz(outputs))
    executed = file.executed() if request.get("executed") else []
    note = getattr(file, "note", "")
    _send_json(pipe, {"names": [name for name, _ in outputs], "executed": executed, "note": note})


def benchmark(file_class: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Measure the seconds of a run of several files. Runs are interleaved, so that noise affects all files equally.

    "quartiles" are those of all rounds. "medians" are those of the calmer half of the rounds: next to busy programs the
    times of a file have two clusters, and the median of all rounds is in either of them by chance.

    With "precision", rounds stop when the times relative to the last file are known to that share.
    If a run of the last file takes less than `fixed_below` seconds, that file with fixed sizes is measured too.
    """
    # With one thread CPU time is measured, because other processes share the CPU.
    clock = time.process_time if request["options"].get("threads") == 1 else time.perf_counter
    arrays = _read_arrays(request["inputs"])
    files = [file_class(path, request["options"]) for path in request["paths"]]
    feeds = [_match_input_names(file.inputs, arrays) for file in files]
    times: list[list[float]] = [[] for _ in files]
    for file, feed in zip(files, feeds, strict=True):  # warm up
        file.run(feed)
    start = clock()
    for file, feed in zip(files, feeds, strict=True):
        file.run(feed)
    is_brief = clock() - start < BRIEF_SECONDS
    fixed_file = _fix_sizes(files[-1], feeds[-1], clock, request.get("fixed_below", 0.0))
    if fixed_file is not None:
        files, feeds, times = [*files, fixed_file], [*feeds, feeds[-1]], [*times, []]
    deadline, cpu_start = time.monotonic() + request["seconds"], time.process_time()
    sequence = list(zip(files, feeds, times, strict=True))
    while len(times[0]) < request["repeats"] and (len(times[0]) < MIN_RUNS or time.monotonic() < deadline):
        cpu_seconds = time.process_time() - cpu_start
        if request.get("precision") and len(times[0]) >= LONG_ROUNDS and cpu_seconds > MAX_CHEAP_SECONDS:
            break
        for file, feed, file_times in sequence:
            if is_brief:
                file.run(feed)
            start = clock()
            file.run(feed)
            file_times.append(clock() - start)
        sequence.reverse()  # the CPU caches depend on the file that ran before: alternate the order
        if len(times[0]) in CHECKED_ROUNDS and _is_precise(
            times[: len(request["paths"])], request.get("precision", 0.0)
        ):
            break
    quartiles = [statistics.quantiles(file_times, n=4) for file_times in times]
    calm_rounds = _find_calm_rounds(times[: len(request["paths"])])
    medians = [statistics.median(file_times[i] for i in calm_rounds) for file_times in times]
    fixed_seconds = None if fixed_file is None else medians.pop()
    answer = {"quartiles": quartiles[: len(medians)], "medians": medians, "repeats": len(times[0])}
    _send_json(pipe, {**answer, "fixed_seconds": fixed_seconds})


def _find_calm_rounds(times: list[list[float]]) -> list[int]:
    """Return the rounds in which all files together took the shortest time. Each file has the same weight."""
    medians = [statistics.median(file_times) for file_times in times]
    totals = [
        sum(seconds / (middle or 1.0) for seconds, middle in zip(round_times, medians, strict=True))
        for round_times in zip(*times, strict=True)
    ]
    count = max(MIN_RUNS, math.ceil(CALM_SHARE * len(totals)))
    return sorted(range(len(totals)), key=totals.__getitem__)[:count]


def _fix_sizes(file: Any, feeds: Arrays, clock: Callable[[], float], below: float) -> Any:
    """Return the file with the sizes of these inputs, warmed up; None if it has no free size or takes too long.

    Free sizes add a few operations that compute shapes. Only in a short run is their time noticeable.
    """
    if not below or not hasattr(file, "with_fixed_sizes"):
        return None
    durations = []
    for _ in range(3):
        start = clock()
        file.run(feeds)
        durations.append(clock() - start)
    fixed_file = file.with_fixed_sizes(feeds) if min(durations) < below else None
    if fixed_file is not None:
        fixed_file.run(feeds)
        fixed_file.run(feeds)
    return fixed_file


def _is_precise(times: list[list[float]], precision: float) -> bool:
    """Whether the median of the ratio to the last file is known to `precision` for all other files.

    The interval of a median is between two order statistics (the sign test): it assumes nothing about the noise except
    that rounds are independent. Each interval of each check gets an equal share of ERROR_PROBABILITY, so the
    probability that any of them misses its median is at most ERROR_PROBABILITY.
    """
    *compared, last_times = times
    error_probability = ERROR_PROBABILITY / (len(CHECKED_ROUNDS) * len(compared))
    for file_times in compared:
        ratios = sorted(seconds / last for seconds, last in zip(file_times, last_times, strict=True))
        tail = _count_tail(len(ratios), error_probability)
        if tail == 0 or ratios[-tail] - ratios[tail - 1] > 2 * precision * statistics.median(ratios):
            return False
    return True


def _count_tail(count: int, error_probability: float) -> int:
    """Return the largest k for which the interval from the k-th smallest to the k-th largest value is safe.

    That is: the probability that it misses the median is at most `error_probability`. 0 if there are too few values.
    """
    tail, probability = 0, 2 * 0.5**count  # that all values are on one side of the median
    while probability <= error_probability:
        tail += 1
        probability += 2 * math.comb(count, tail) * 0.5**count
    return tail


def profile(file_class: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Measure the seconds of every node of several files with the profiler of the runtime, with interleaved runs."""
    arrays = _read_arrays(request["inputs"])
    files = [file_class(path, {**request["options"], "profile": True}) for path in request["paths"]]
    feeds = [_match_input_names(file.inputs, arrays) for file in files]
    deadline, runs = time.monotonic() + request["seconds"], 0
    while runs <= request["min_runs"] or (runs <= request["max_runs"] and time.monotonic() < deadline):
        for file, feed in zip(files, feeds, strict=True):
            file.run(feed)
        runs += 1
    _send_json(pipe, {"nodes": [file.profiled() for file in files], "repeats": runs - 1})


def generate(file_class: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Generate tokens greedily with several language models, with interleaved runs. Times are medians."""
    files = [file_class(path, request["options"]) for path in request["paths"]]
    runs: list[list[dict[str, Any]]] = [[] for _ in files]
    for _ in range(request["repeats"]):
        for file, file_runs in zip(files, runs, strict=True):
            file_runs.append(file.generate(request["tokens"], request["count"]))
    answers = []
    for file_runs in runs:
        medians = {name: statistics.median(result[name] for result in file_runs) for name in TIME_OUTPUTS}
        answers.append({"tokens": file_runs[0]["tokens"], **medians})
    _send_json(pipe, {"files": answers})


def serve(file_class: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Load a file and answer requests until stdin ends. A frame is 8 bytes of size, then an .npz file."""
    file = file_class(request["path"], request["options"])
    _send_json(pipe, {"inputs": list(file.inputs)})
    while size := int.from_bytes(sys.stdin.buffer.read(8), "little"):
        frame = sys.stdin.buffer.read(size)
        if len(frame) < size:
            return  # the parent was killed while writing
        answer = _to_npz(_call_file(file, io.BytesIO(frame)))
        pipe.write(len(answer).to_bytes(8, "little") + answer)
        pipe.flush()


def _call_file(file: Any, frame: BinaryIO) -> list[tuple[str, np.ndarray]]:
    """Run the file, or generate tokens if the frame contains a count."""
    with np.load(frame, allow_pickle=False) as arrays:
        if "count" in arrays.files:  # an input with this name would be called input.count
            result = file.generate(arrays["tokens"].tolist(), int(arrays["count"]))
            return [(name, np.asarray(result[name])) for name in ("tokens", *TIME_OUTPUTS)]
    frame.seek(0)
    return list(file.run(_match_input_names(file.inputs, _read_arrays(frame))))


def _read_arrays(source: str | BinaryIO) -> Arrays:
    with np.load(source, allow_pickle=False) as file:
        return {name.removeprefix("input."): file[name] for name in file.files}


def _match_input_names(names: list[str], feeds: Arrays) -> Arrays:
    """Return the arrays by the names of the file's inputs.

    The inputs whose names no array has get the arrays whose names no input has, in order.
    """
    if len(names) > len(feeds):
        raise SystemExit(f"the file takes {len(names)} inputs ({', '.join(names)}), got {len(feeds)}")
    unmatched = iter([value for name, value in feeds.items() if name not in names])
    return {name: feeds[name] if name in feeds else next(unmatched) for name in names}


def _to_npz(outputs: list[tuple[str, np.ndarray]]) -> bytes:
    """Pack the arrays under their numbers: np.savez does not accept every name of an output."""
    buffer = io.BytesIO()
    numbered: dict[str, Any] = {str(index): value for index, (_, value) in enumerate(outputs)}
    np.savez(buffer, **numbered)
    return buffer.getvalue()


def _send_json(pipe: BinaryIO, answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer).encode() + b"\n")
    pipe.flush()


TASKS: dict[str, Callable[[Callable[..., Any], dict[str, Any], BinaryIO], None]] = {
    "run": run,
    "benchmark": benchmark,
    "profile": profile,
    "serve": serve,
    "generate": generate,
}


if __name__ == "__main__":
    main()
