"""Child program that runs a file in ONNX Runtime on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

LOW_PRECISION_OPERATORS = frozenset(
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
FLOAT_OPERATORS = frozenset(("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose"))
WEIGHT_CONVERSIONS = ("DequantizeLinear", "Transpose", "Cast")  # may stand between a constant and its product
MATMULNBITS_BLOCK_SIZES = (16, 32, 64, 128, 256)
KERNEL_EVENT_SUFFIX = "_kernel_time"  # of the names of kernel events in a profile
LEVELS = ort.GraphOptimizationLevel


class File:
    """A loaded file.

    Options: threads (0: ONNX Runtime chooses), optimize, session (session config entries), expose (outputs of all
    QuantizeLinear nodes become outputs of the file), profile, sizes (of free axes, by the name of the axis).
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        level = LEVELS.ORT_ENABLE_ALL if options.get("optimize", True) else LEVELS.ORT_DISABLE_ALL
        self.folder = tempfile.TemporaryDirectory(prefix="scalepoint-") if options.get("profile") else None
        self.session = self._create_session(_expose_codes(path) if options.get("expose") else path, level)
        self.inputs = [node.name for node in self.session.get_inputs()]
        self.outputs = [node.name for node in self.session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        return list(zip(self.outputs, self.session.run(None, feeds), strict=True))

    def with_fixed_sizes(self, feeds: dict[str, np.ndarray]) -> "File | None":
        """Return this file with its free axes fixed to the sizes of these inputs; None if it has no free axis."""
        sizes = {
            axis_name: feeds[node.name].shape[axis]
            for node in self.session.get_inputs()
            for axis, axis_name in enumerate(node.shape)
            if isinstance(axis_name, str)
        }
        return File(self.path, {**self.options, "sizes": sizes}) if sizes else None

    def executed(self) -> list[dict[str, Any]]:
        """Return the nodes of the compiled graph."""
        with self._compiled_file() as path:
            return _describe_nodes(path)

    @contextmanager
    def _compiled_file(self) -> Iterator[str]:
        """Temporary file with the graph after all optimisations that do not depend on the machine."""
        entries = {
            "session.optimized_model_external_initializers_file_name": "weights",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }
        with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
            path = f"{folder}/compiled.onnx"
            self._create_session(self.path, LEVELS.ORT_ENABLE_EXTENDED, entries, path)
            yield path

    def profiled(self) -> list[dict[str, Any]]:
        """Return the median time of each node from the profile of ONNX Runtime, without the first run."""
        run_times: dict[tuple[str, str, str], list[float]] = {}  # (index, name, operator) -> seconds in each run
        for event in json.loads(Path(self.session.end_profiling()).read_text("utf-8")):
            if event.get("cat") == "Node" and event["name"].endswith(KERNEL_EVENT_SUFFIX):
                index, op = str(event["args"].get("node_index", "")), str(event["args"].get("op_name", ""))
                name = event["name"].removesuffix(KERNEL_EVENT_SUFFIX)
                run_times.setdefault((index, name, op), []).append(event["dur"] / 1e6)
        producers = _read_producers(self.path)
        file_names = {name: _name_in_file(name, producers) for _, name, _ in run_times}
        file_nodes = set(producers.values())
        unknown = {name for name, file_name in file_names.items() if file_name not in file_nodes}
        file_names |= self._names_of_fused_nodes(unknown, producers)
        return [
            {"name": file_names[name], "op": op, "seconds": statistics.median(times[1:] or times)}
            for (_, name, op), times in run_times.items()
        ]

    def _names_of_fused_nodes(self, names: set[str], producers: dict[str, str]) -> dict[str, str]:
        """Map nodes that an optimisation created to the nodes of the file that produce the same tensors."""
        if not names:
            return {}
        with self._compiled_file() as path:
            tensors = {node: tensor for tensor, node in _read_producers(path).items() if node in names}
        return {node: producers[tensor] for node, tensor in tensors.items() if tensor in producers}

    def _create_session(
        self, model: str | bytes, level: Any, entries: dict[str, str] | None = None, optimized_path: str = ""
    ) -> Any:
        """Create a session. With `optimized_path` ONNX Runtime writes the optimized graph there."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.options.get("threads", 1)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = level
        if optimized_path:
            options.optimized_model_filepath = optimized_path
        elif self.folder is not None:
            options.enable_profiling, options.profile_file_prefix = True, f"{self.folder.name}/profile"
        if isinstance(model, bytes):  # ONNX Runtime cannot derive the folder of external data from bytes
            folder = str(Path(self.path).parent)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        for axis_name, size in self.options.get("sizes", {}).items():
            options.add_free_dimension_override_by_name(axis_name, size)
        for key, value in {**(entries or {}), **self.options.get("session", {})}.items():
            options.add_session_config_entry(key, value)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _expose_codes(path: str) -> bytes:
    """Return the model with the outputs of all QuantizeLinear nodes as additional outputs."""
    import onnx  # noqa: PLC0415  # not needed to run files

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    data: bytes = model.SerializeToString()
    return data


def _read_producers(path: str) -> dict[str, str]:
    """Map each tensor of a file to the name of the node that produces it."""
    import onnx  # noqa: PLC0415

    nodes = onnx.load(path, load_external_data=False).graph.node
    return {name: node.name for node in nodes for name in node.output}


def _name_in_file(name: str, producers: dict[str, str]) -> str:
    """Return the name in the file of a compiled node. Nodes in the NCHWc layout are named after their output tensor."""
    name = name.removeprefix("fused ")
    return producers.get(name.removesuffix("_nchwc"), name)


def _describe_nodes(path: str) -> list[dict[str, Any]]:
    """Describe the nodes of a compiled graph: name, operator, whether it runs in low precision, and why not."""
    import onnx  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    nodes = []
    for node in model.graph.node:
        name = node.input[1] if len(node.input) > 1 else ""
        conversions = []  # from the node back to the constant
        while name in producers and producers[name].op_type in WEIGHT_CONVERSIONS:
            conversions.append(producers[name])
            name = producers[name].input[0]
        is_float = node.op_type in FLOAT_OPERATORS and name in constants
        low = None  # an operation without weights
        if node.op_type in LOW_PRECISION_OPERATORS:
            low = True
        elif is_float:
            low = False
        why = _why_float(node, conversions, constants[name]) if is_float else ""
        nodes.append({"name": node.name, "op": node.op_type, "low": low, "why": why})
    return nodes


def _why_float(node: Any, conversions: list[Any], shape: list[int]) -> str:
    """Explain why a product with a constant runs in float. `shape` is the shape of the constant."""
    from onnx.helper import get_node_attr_value  # noqa: PLC0415

    dequantize = next((conversion for conversion in conversions if conversion.op_type == "DequantizeLinear"), None)
    if dequantize is None:
        return "its weight is float"
    attributes = {attribute.name: get_node_attr_value(dequantize, attribute.name) for attribute in dequantize.attribute}
    block, axis = attributes.get("block_size", 0), attributes.get("axis", 1)
    is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    if is_transposed or any(conversion.op_type == "Transpose" for conversion in conversions):
        reason = "which is stored as (out, in): MatMulNBits takes (in, out)"
    elif block and axis:
        reason = "which has blocks along its outputs: MatMulNBits takes them along its inputs"
    elif block and (block not in MATMULNBITS_BLOCK_SIZES or shape[axis] % block):
        sizes = ", ".join(map(str, MATMULNBITS_BLOCK_SIZES))
        reason = f"which has blocks of {block} in {shape[axis]}: MatMulNBits takes blocks of {sizes}"
    elif any(conversion.op_type == "Cast" for conversion in conversions):
        reason = "through a Cast that MatMulNBits does not take"
    else:
        return "its weight is dequantized at each run"
    return f"it dequantizes its weight at each run, {reason}"
