"""profile: where the time of a file goes, node by node, beside the file that it is compared with.

The runtime's own profiler measures both files in one child process, in turns; nodes are brought together by the layer
that their name begins with, so that a layer in float and in low precision stand in one row.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx

from scalepoint.errors import VerificationError
from scalepoint.quantize.record import has_record, record_of
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.verification.benchmarking import make_random_inputs
from scalepoint.verification.file_formats import check_exists
from scalepoint.verification.layer_times import LayerTime

SECONDS = 3.0  # for all runs together
MIN_RUNS, MAX_RUNS = 3, 20  # runs
_TOKEN_SUFFIX = re.compile(r"_token_\d+$")  # by which a runtime numbers what it inserts


def profile(
    first: str | Path,
    second: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str | Runtime = "onnxruntime",
    threads: int = 1,
    seconds: float = SECONDS,
    memory: int | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[LayerTime, ...]:
    """Measure the time of every layer of two files in a runtime.

    Args:
        first: A file, usually the float one.
        second: Another one, usually the quantized one.
        inputs: Inputs by name; random ones by default.
        runtime: A runtime or its name.
        threads: Threads of the runtime.
        seconds: How long to measure.
        memory: Memory limit in bytes; that of the machine by default.
        names: Names to show for layers, by the part of a node name before the slash.

    Returns:
        Times per layer, the slowest of the second file first.
    """
    found = find_runtime(runtime)
    paths = [check_exists(first), check_exists(second)]
    if not found.profiles:
        raise VerificationError(f"{found.name} does not tell the time of its nodes")
    feeds = dict(inputs) if inputs is not None else make_random_inputs(paths[0], found)
    asked = {"options": {"threads": threads}, "seconds": seconds, "fewest": MIN_RUNS, "most": MAX_RUNS}
    with exchange_files(feeds) as files:
        request = {"task": "profile", "paths": [str(path) for path in paths], "inputs": files.files["inputs"], **asked}
        answer = run_task(found, request, seconds=seconds * 10 + 300, memory=memory)
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{found.name} could not profile the files: {answer.status.value}: {answer.message}")
    before, after = answer.data["nodes"]
    return group_by_layer(before, after, names or {})


Nodes = Iterable[Mapping[str, Any]]


def group_by_layer(first: Nodes, second: Nodes, names: Mapping[str, str]) -> tuple[LayerTime, ...]:
    """Nodes of two files as rows of layers."""
    rows: dict[str, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for place, nodes in enumerate((first, second)):
        for node in nodes:
            scope = read_scope(node["name"], node["op"])
            rows.setdefault(names.get(scope, scope), ([], []))[place].append(node)
    made = [
        LayerTime(name, _sum_seconds(own), _sum_seconds(other), _list_kernels(own), _list_kernels(other))
        for name, (other, own) in rows.items()
    ]
    return tuple(sorted(made, key=lambda row: -(row.seconds or 0.0)))


def read_scope(name: str, op: str) -> str:
    """What a node is called before the slash; a node that a runtime made without a name is called by its operator."""
    name = _TOKEN_SUFFIX.sub("", name).rstrip("/")
    scope = name.rpartition("/")[0] if name.startswith("/") else name.partition("/")[0] if "/" in name else ""
    return scope.strip("/") or (name if "/" not in name and name != op and name else op)


def _sum_seconds(nodes: Sequence[Mapping[str, Any]]) -> float | None:
    return sum(float(each["seconds"]) for each in nodes) if nodes else None


def _list_kernels(nodes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What ran, the slowest first."""
    ordered = sorted(nodes, key=lambda node: -float(node["seconds"]))
    return tuple(dict.fromkeys(str(each["op"]) for each in ordered))


def map_layer_names(model: Any) -> dict[str, str]:
    """The path of a group's module, which its nodes are named after -> the layer as people know it."""
    if not isinstance(model, fx.GraphModule) or not has_record(model):
        return {}
    known = record_of(model).names
    return {str(node.target): known[node.name] for node in model.graph.nodes if node.name in known}
