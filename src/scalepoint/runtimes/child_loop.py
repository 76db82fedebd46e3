"""The other side of the process boundary, the same for all runtimes: python -I child_loop.py CHILD.py

A runtime can crash, hang or eat all memory; here it takes only itself down. CHILD.py is the program of one runtime,
with a class File(path, options) that has `inputs` (names), `run(feeds) -> [(name, array), ..]` and
`executed() -> [{"name", "op", "low", "why"}, ..]`; where the runtime tells the time of nodes, with the option "profile"
`profiled() -> [{"name", "op", "seconds"}, ..]`, medians of the runs but the first; where it runs language models
`generate(tokens, count) -> {"tokens", "prefill_seconds", "decode_seconds"}`. A class that evaluates a file
itself, because the runtime does not run on this machine, names in `gaps` the exceptions that it raises for what it
cannot evaluate.
Nothing of scalepoint is imported.

A request is a line of JSON on stdin, its answer a line of JSON on stdout; tensors travel in .npz files, or, where a
file is called again and again, as .npz frames in the same pipes. The parent keeps stdin open as long as it wants an
answer: when stdin ends, because the parent was killed too, this process exits.
"""

import io
import json
import os
import resource
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

OUT_OF_MEMORY = 70  # how this program ends then
NOT_EVALUATED = 71  # exit code for an operation that the stand-in for a runtime cannot evaluate
OUT_OF_MEMORY_PHRASES = ("bad_alloc", "allocate memory", "failed to allocate")  # how runtimes say so
MIN_RUNS = 5
EXIT_GRACE_SECONDS = 1.0  # seconds to exit by itself; the parent waits 5
TIME_OUTPUTS = ("prefill_seconds", "decode_seconds")
Arrays = dict[str, np.ndarray]


def main() -> None:
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a runtime prints is no answer
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    request = json.loads(sys.stdin.buffer.readline())
    if request.get("memory"):
        resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    gaps: tuple[type[Exception], ...] = ()
    try:
        kind = runpy.run_path(sys.argv[1])["File"]
        gaps = tuple(getattr(kind, "gaps", ()))
        TASKS[request["task"]](kind, request, pipe)
    except gaps as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_EVALUATED)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except Exception as error:
        if any(words in str(error).lower() for words in OUT_OF_MEMORY_PHRASES):
            sys.exit(OUT_OF_MEMORY)
        raise


def _exit_with_parent() -> None:
    """Exit soon after the parent closed stdin, also in the middle of a run.

    `poll` reports the end of a pipe without reading from it, so requests stay for the main thread.
    """
    stdin = select.poll()
    stdin.register(0, 0)
    stdin.poll()
    time.sleep(EXIT_GRACE_SECONDS)  # enough for a main thread that waits for the next request
    interrupt_main()  # temporary folders are removed on the way out
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(1)


def run(kind: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Outputs of a file, and the graph that really runs when asked for."""
    file = kind(request["path"], request["options"])
    outputs = file.run(_match_input_names(file.inputs, _read_arrays(request["inputs"])))
    with open(request["outputs"], "wb") as target:
        target.write(_to_npz(outputs))
    executed = file.executed() if request.get("executed") else []
    _send_json(pipe, {"names": [name for name, _ in outputs], "executed": executed})


def benchmark(kind: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Seconds a run of several files, interleaved: noise hits all alike. One thread: of the CPU, which others share."""
    clock = time.process_time if request["options"].get("threads") == 1 else time.perf_counter
    feeds = _read_arrays(request["inputs"])
    files = [kind(path, request["options"]) for path in request["paths"]]
    given = [_match_input_names(file.inputs, feeds) for file in files]
    taken: list[list[float]] = [[] for _ in files]
    for file, feed in zip(files, given, strict=True):
        file.run(feed)
        file.run(feed)
    deadline = time.monotonic() + request["seconds"]
    turn = list(zip(files, given, taken, strict=True))
    while len(taken[0]) < request["repeats"] and (len(taken[0]) < MIN_RUNS or time.monotonic() < deadline):
        for file, feed, times in turn:
            start = clock()
            file.run(feed)
            times.append(clock() - start)
        turn.reverse()  # what runs before a file decides what it finds in the caches: not always the same
    quarters = [statistics.quantiles(times, n=4) for times in taken]
    _send_json(pipe, {"quartiles": quarters, "repeats": len(taken[0])})


def profile(kind: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """Seconds of every node of several files, run in turns, by the runtime's own profiler."""
    feeds = _read_arrays(request["inputs"])
    files = [kind(path, {**request["options"], "profile": True}) for path in request["paths"]]
    given = [_match_input_names(file.inputs, feeds) for file in files]
    deadline, runs = time.monotonic() + request["seconds"], 0
    while runs <= request["fewest"] or (runs <= request["most"] and time.monotonic() < deadline):
        for file, feed in zip(files, given, strict=True):
            file.run(feed)
        runs += 1
    _send_json(pipe, {"nodes": [file.profiled() for file in files], "repeats": runs - 1})


def generate(kind: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """The tokens that language models go on with, the likeliest each, of several files in turns; median times."""
    files = [kind(path, request["options"]) for path in request["paths"]]
    found: list[list[dict[str, Any]]] = [[] for _ in files]
    for _ in range(request["repeats"]):
        for file, answers in zip(files, found, strict=True):
            answers.append(file.generate(request["tokens"], request["count"]))
    medians = [{name: statistics.median(each[name] for each in answers) for name in TIME_OUTPUTS} for answers in found]
    firsts = [answers[0]["tokens"] for answers in found]
    _send_json(pipe, {"files": [{"tokens": each, **own} for each, own in zip(firsts, medians, strict=True)]})


def serve(kind: Callable[..., Any], request: dict[str, Any], pipe: BinaryIO) -> None:
    """One file, called until nobody asks any more."""
    file = kind(request["path"], request["options"])
    _send_json(pipe, {"inputs": list(file.inputs)})
    while size := int.from_bytes(sys.stdin.buffer.read(8), "little"):
        frame = sys.stdin.buffer.read(size)
        if len(frame) < size:
            return  # the parent was killed while it wrote
        answer = _to_npz(_call_file(file, io.BytesIO(frame)))
        pipe.write(len(answer).to_bytes(8, "little") + answer)
        pipe.flush()


def _call_file(file: Any, frame: BinaryIO) -> list[tuple[str, np.ndarray]]:
    """What the file computes; where tokens are to follow, those and their seconds."""
    with np.load(frame, allow_pickle=False) as given:
        if "count" in given.files:  # an input would be called input.count
            found = file.generate(given["tokens"].tolist(), int(given["count"]))
            return [(name, np.asarray(found[name])) for name in ("tokens", *TIME_OUTPUTS)]
    frame.seek(0)
    return list(file.run(_match_input_names(file.inputs, _read_arrays(frame))))


def _read_arrays(source: str | BinaryIO) -> Arrays:
    with np.load(source, allow_pickle=False) as file:
        return {name.removeprefix("input."): file[name] for name in file.files}


def _match_input_names(names: list[str], feeds: Arrays) -> Arrays:
    """The arrays by the names of the file's inputs: by name where they agree, else by place."""
    values = list(feeds.values())
    if len(names) > len(values):
        raise SystemExit(f"the file takes {', '.join(names)}, {len(values)} inputs were given")
    return {name: feeds.get(name, values[index]) for index, name in enumerate(names)}


def _to_npz(outputs: list[tuple[str, np.ndarray]]) -> bytes:
    """Numbered, since names may be any."""
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
