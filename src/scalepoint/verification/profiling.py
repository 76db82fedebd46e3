"""profile: measures the time of every layer of two files.

The profiler of the runtime measures both files in one child process, in turns. Nodes are grouped by the layer that
their name begins with, so that one row has the time of a layer in float and in low precision.
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
from scalepoint.verification.benchmarking import limit_process, make_random_inputs
from scalepoint.verification.file_formats import check_exists
from scalepoint.verification.layer_times import LayerTime

MAX_SECONDS = 3.0  # for all runs together
MIN_RUNS, MAX_RUNS = 3, 7  # of each file: more do not change the order of the layers
_TOKEN_SUFFIX = re.compile(r"_token_\d+$")  # suffix of the nodes that ONNX Runtime inserts


def profile(
    first: str | Path,
    second: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str | Runtime = "onnxruntime",
    threads: int = 1,
    seconds: float = MAX_SECONDS,
    memory: int | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[LayerTime, ...]:
    """Measure the time of every layer of two files in a runtime.

    Args:
        first: A file, usually the float file.
        second: Another file, usually the quantized file.
        inputs: Arrays by input name; random arrays by default.
        runtime: A runtime or its name.
        threads: Threads of the runtime.
        seconds: Time limit for all runs together.
        memory: Memory limit in bytes; the memory of the machine by default.
        names: Names to show for layers, by the part of a node name before the slash.

    Returns:
        Times per layer, the slowest of the second file first.

    Raises:
        VerificationError: The runtime has no profiler or cannot run the files.
    """
    runtime = find_runtime(runtime)
    paths = [check_exists(first), check_exists(second)]
    if not runtime.profiles:
        raise VerificationError(f"{runtime.name} cannot measure the time of its nodes: use onnxruntime or openvino")
    feeds = dict(inputs) if inputs is not None else make_random_inputs(paths[0], runtime)
    limits = {"options": {"threads": threads}, "seconds": seconds, "min_runs": MIN_RUNS, "max_runs": MAX_RUNS}
    with exchange_files(feeds) as files:
        request = {"task": "profile", "paths": [str(path) for path in paths], "inputs": files.paths["inputs"], **limits}
        answer = run_task(runtime, request, seconds=limit_process(seconds), memory=memory)
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{runtime.name} could not profile the files: {answer.status.value}: {answer.message}")
    first_nodes, second_nodes = answer.data["nodes"]
    return group_by_layer(first_nodes, second_nodes, names or {})


Nodes = Iterable[Mapping[str, Any]]  # "name", "op" and "seconds" of each node


def group_by_layer(float_nodes: Nodes, nodes: Nodes, names: Mapping[str, str]) -> tuple[LayerTime, ...]:
    """Add up the nodes of a float file and of another file by layer, the slowest layer of the other file first."""
    float_layers, layers = _collect_layers(float_nodes, names), _collect_layers(nodes, names)
    rows = [
        LayerTime(
            name,
            seconds=_sum_seconds(layers.get(name, [])),
            float_seconds=_sum_seconds(float_layers.get(name, [])),
            kernels=_list_kernels(layers.get(name, [])),
            float_kernels=_list_kernels(float_layers.get(name, [])),
        )
        for name in float_layers | layers
    ]
    return tuple(sorted(rows, key=lambda row: -(row.seconds or 0.0)))


def _collect_layers(nodes: Nodes, names: Mapping[str, str]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the nodes of one file by layer."""
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        scope = read_scope(node["name"], node["op"])
        layers.setdefault(names.get(scope, scope), []).append(node)
    return layers


def read_scope(name: str, op: str) -> str:
    """Return the layer of a node: "layer1.conv" for "layer1.conv/Conv", "layer1/conv" for "/layer1/conv/Conv".

    A node that the runtime inserted without a name gets the name of its operator.
    """
    name = _TOKEN_SUFFIX.sub("", name).rstrip("/")
    if "/" not in name:
        return name or op
    scope = name.rpartition("/")[0] if name.startswith("/") else name.partition("/")[0]
    return scope.strip("/") or op


def _sum_seconds(nodes: Sequence[Mapping[str, Any]]) -> float | None:
    return sum(float(node["seconds"]) for node in nodes) if nodes else None


def _list_kernels(nodes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the kernels, the slowest first."""
    slowest_first = sorted(nodes, key=lambda node: -float(node["seconds"]))
    return tuple(dict.fromkeys(str(node["op"]) for node in slowest_first))


def map_layer_names(model: Any) -> dict[str, str]:
    """Map the module path of each group, which begins the names of its nodes in the file, to the name of the layer.

    Example: "block.conv_bn_relu" -> "block.conv"
    """
    if not isinstance(model, fx.GraphModule) or not has_record(model):
        return {}
    layer_names = record_of(model).names
    return {str(node.target): layer_names[node.name] for node in model.graph.nodes if node.name in layer_names}
