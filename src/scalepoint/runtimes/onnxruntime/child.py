"""A file in ONNX Runtime, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported."""

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

LOW = frozenset(
    (
        "QLinearConv",
        "QGemm",
        "QLinearMatMul",
        "MatMulIntegerToFloat",
        "MatMulInteger",
        "ConvInteger",
        "MatMulNBits",
        "DynamicQuantizeMatMul",
    )
)
FLOAT = frozenset(("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose"))
PASSED = ("DequantizeLinear", "Transpose", "Cast")  # from a weight to the product
BLOCKS = (16, 32, 64, 128, 256)
KERNEL = "_kernel_time"  # ends the names of what the profiler tells of nodes
LEVELS = ort.GraphOptimizationLevel


class File:
    """options: threads (0: it chooses), optimize, session (entries of its configuration), expose (codes), profile."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        level = LEVELS.ORT_ENABLE_ALL if options.get("optimize", True) else LEVELS.ORT_DISABLE_ALL
        self.folder = tempfile.TemporaryDirectory(prefix="scalepoint-") if options.get("profile") else None
        self.session = self._session(_exposed(path) if options.get("expose") else path, level)
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        return list(zip(self.outputs, self.session.run(None, feeds), strict=True))

    def executed(self) -> list[dict[str, Any]]:
        with self._compiled() as path:
            return _nodes(path)

    @contextmanager
    def _compiled(self) -> Iterator[str]:
        """The graph after all optimisations that do not depend on the machine, which it writes as a file."""
        entries = {
            "session.optimized_model_external_initializers_file_name": "weights",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }
        with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
            path = f"{folder}/compiled.onnx"
            self._session(self.path, LEVELS.ORT_ENABLE_EXTENDED, entries, path)
            yield path

    def profiled(self) -> list[dict[str, Any]]:
        """What its profiler wrote: the time of every kernel in every run."""
        taken: dict[tuple[str, str, str], list[float]] = {}
        for event in json.loads(Path(self.session.end_profiling()).read_text()):
            if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
                told = event["args"]
                key = (
                    str(told.get("node_index", "")),
                    event["name"].removesuffix(KERNEL),
                    str(told.get("op_name", "")),
                )
                taken.setdefault(key, []).append(event["dur"] / 1e6)
        made = _made_by(self.path)
        named = {name: _named(name, made) for _, name, _ in taken}
        named |= self._fused({name for name, own in named.items() if own not in made.values()}, made)
        return [
            {"name": named[name], "op": op, "seconds": statistics.median(times[1:] or times)}
            for (_, name, op), times in taken.items()
        ]

    def _fused(self, names: set[str], made: dict[str, str]) -> dict[str, str]:
        """Nodes that an optimisation made, by the nodes of the file whose tensors they give."""
        if not names:
            return {}
        with self._compiled() as path:
            given = {own: name for name, own in _made_by(path).items() if own in names}
        return {own: made[name] for own, name in given.items() if name in made}

    def _session(self, model: str | bytes, level: Any, entries: dict[str, str] | None = None, written: str = "") -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.options.get("threads", 1)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = level
        if written:
            options.optimized_model_filepath = written
        elif self.folder is not None:
            options.enable_profiling, options.profile_file_prefix = True, f"{self.folder.name}/profile"
        if isinstance(model, bytes):  # then it does not know where the data files lie
            folder = str(Path(self.path).parent)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        for key, value in {**(entries or {}), **self.options.get("session", {})}.items():
            options.add_session_config_entry(key, value)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _exposed(path: str) -> bytes:
    """The model with the outputs of its QuantizeLinear nodes as outputs of its own, named after the nodes."""
    import onnx  # noqa: PLC0415  # only this needs it

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    data: bytes = model.SerializeToString()
    return data


def _made_by(path: str) -> dict[str, str]:
    """A tensor of the file -> the node that gives it."""
    import onnx  # noqa: PLC0415

    nodes = onnx.load(path, load_external_data=False).graph.node
    return {name: node.name for node in nodes for name in node.output}


def _named(name: str, made: dict[str, str]) -> str:
    """A node of the compiled graph as the file calls it: blocked layouts are named after the tensor that they give."""
    name = name.removeprefix("fused ")
    return made.get(name.removesuffix("_nchwc"), name)


def _nodes(path: str) -> list[dict[str, Any]]:
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    executed = []
    for node in model.graph.node:
        name, passed = node.input[1] if len(node.input) > 1 else "", []
        while name in made and made[name].op_type in PASSED:
            passed.append(made[name])
            name = made[name].input[0]
        is_float = node.op_type in FLOAT and name in constants
        low = True if node.op_type in LOW else False if is_float else None
        why = _why_float(node, passed, constants[name]) if is_float else ""
        executed.append({"name": node.name, "op": node.op_type, "low": low, "why": why})
    return executed


def _why_float(node: Any, passed: list[Any], shape: list[int]) -> str:
    """Why a product with a constant is one of floats: `passed` leads from the node to the constant."""
    from onnx.helper import get_node_attr_value  # noqa: PLC0415

    dequantize = next((each for each in passed if each.op_type == "DequantizeLinear"), None)
    if dequantize is None:
        return "its weight is float"
    found = {each.name: get_node_attr_value(dequantize, each.name) for each in dequantize.attribute}
    block, axis = found.get("block_size", 0), found.get("axis", 1)
    is_turned = any(each.name == "transB" and each.i for each in node.attribute)
    if is_turned or any(each.op_type == "Transpose" for each in passed):
        why = "which is stored as (out, in): MatMulNBits takes (in, out)"
    elif block and axis:
        why = "which has blocks along its outputs: MatMulNBits takes them along its inputs"
    elif block and (block not in BLOCKS or shape[axis] % block):
        why = f"which has blocks of {block} in {shape[axis]}: MatMulNBits takes {', '.join(map(str, BLOCKS))}"
    elif any(each.op_type == "Cast" for each in passed):
        why = "through a Cast that MatMulNBits does not take"
    else:
        return "its weight is dequantized at each run"
    return f"it dequantizes its weight at each run, {why}"
