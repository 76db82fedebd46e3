"""Child program that runs a file in ExecuTorch on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import executorch.runtime
import numpy as np
import torch
from executorch.extension.pybindings import portable_lib

METADATA_METHOD = "scalepoint"  # method of the program that returns its metadata as JSON
PACKAGE_FOLDER = Path(executorch.runtime.__file__).parent.parent
WEIGHTED_KINDS = ("XNNConv2d", "XNNConvTranspose2d", "XNNDepthwiseConv2d", "XNNFullyConnected")
# Operations with weights in ExecuTorch's own kernels, which compute in float.
WEIGHTED_FLOAT_KERNELS = ("aten::convolution", "aten::linear", "aten::addmm", "aten::mm")
XNNPACK_DELEGATE = "XnnpackBackend"
FLATC_INFINITY = re.compile(r"(: -?)inf\b")  # flatc writes inf, JSON readers need Infinity


class File:
    """A loaded program. Options: threads (0: ExecuTorch chooses)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads"):
            portable_lib._unsafe_reset_threadpool(options["threads"])
        self.path = Path(path)
        self.program = executorch.runtime.Runtime.get().load_program(path)
        self.method = self.program.load_method("forward")
        self.metadata: dict[str, Any] = {}
        if METADATA_METHOD in self.program.method_names:
            self.metadata = json.loads(self.program.load_method(METADATA_METHOD).execute([])[0])
        method_info = self.method.metadata
        input_infos = self.metadata.get("inputs", [])
        self.inputs = [info["name"] for info in input_infos]
        if not self.inputs:
            self.inputs = [f"input_{index}" for index in range(method_info.num_inputs())]
        # One flag per input. Free batches still have a maximum, which ExecuTorch allocates memory for.
        self.free_batch_flags = [bool(info["shape"]) and info["shape"][0] is None for info in input_infos]
        shapes = [method_info.input_tensor_meta(index).sizes() for index in range(method_info.num_inputs())]
        batch_sizes = [shape[0] for shape, is_free in zip(shapes, self.free_batch_flags, strict=False) if is_free]
        self.max_batch = min(batch_sizes, default=0)  # 0: no input has a free batch

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Run the file. A batch larger than the maximum of the file is run in pieces."""
        inputs = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        batch = next((len(value) for value, is_free in zip(inputs, self.free_batch_flags, strict=False) if is_free), 0)
        if not self.max_batch or batch <= self.max_batch:
            outputs = self._execute(inputs)
        else:
            pieces = [self._execute(self._slice(inputs, start)) for start in range(0, batch, self.max_batch)]
            outputs = [np.concatenate(output_pieces) for output_pieces in zip(*pieces, strict=True)]
        names = self.metadata.get("outputs") or [f"output_{index}" for index in range(len(outputs))]
        return list(zip(names, outputs, strict=True))

    def _slice(self, inputs: list[np.ndarray], start: int) -> list[np.ndarray]:
        """Return the inputs of the piece of the batch that begins at `start`."""
        rows = slice(start, start + self.max_batch)
        return [value[rows] if is_free else value for value, is_free in zip(inputs, self.free_batch_flags, strict=True)]

    def _execute(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        outputs = self.method.execute([torch.from_numpy(value) for value in inputs])
        return [value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for value in outputs]

    def executed(self) -> list[dict[str, Any]]:
        """Return the operations of all XNNPACK graphs, with the dtype of their weights, and all other operations."""
        data = self.path.read_bytes()
        # The extended header of the file: bytes 16-23 are the size of the program, 24-31 the offset of the segments.
        program_size, segments_offset = (int.from_bytes(data[start : start + 8], "little") for start in (16, 24))
        program = _decode_flatbuffer(data[:program_size], "exir/_serialize/program.fbs")
        plan = next(plan for plan in program["execution_plan"] if plan["name"] == "forward")
        instructions = [instruction for chain in plan["chains"] for instruction in chain["instructions"]]
        nodes = []
        for instruction in instructions:
            arguments = instruction["instr_args"]
            if instruction["instr_args_type"] == "KernelCall":
                op = plan["operators"][arguments["op_index"]]["name"]
                is_low = False if op in WEIGHTED_FLOAT_KERNELS else None
                nodes.append(_describe_node(op, op, is_low, "XNNPACK does not support it"))
            elif instruction["instr_args_type"] == "DelegateCall":
                delegate = plan["delegates"][arguments["delegate_index"]]
                nodes.append(_describe_node(delegate["id"], delegate["id"]))
                if delegate["id"] == XNNPACK_DELEGATE:
                    segment = program["segments"][delegate["processed"]["index"]]
                    start = segments_offset + segment["offset"]
                    nodes += self._describe_xnnpack_graph(data[start : start + segment["size"]])
        return nodes

    def _describe_xnnpack_graph(self, data: bytes) -> list[dict[str, Any]]:
        # The header of a delegate: bytes 10-13 are the offset of the graph, 14-17 its size.
        start, size = (int.from_bytes(data[offset : offset + 4], "little") for offset in (10, 14))
        graph = _decode_flatbuffer(data[start : start + size], "backends/xnnpack/serialization/schema.fbs")
        tensors = {}
        for value in graph["xvalues"]:
            union = value["xvalue_union"]
            tensor = union.get("tensor_value", union)  # a quantized tensor is wrapped
            tensors[tensor["id_out"]] = (tensor, union.get("quant_params") or {})
        keys = [constant["named_key"] for constant in graph["constant_data"]]
        layer_names = self.metadata.get("layers", {})
        nodes = []
        for node in graph["xnodes"]:
            kind = node["xnode_union_type"]
            if kind not in WEIGHTED_KINDS:
                nodes.append(_describe_node(kind, kind))
                continue
            weight, quantization = tensors[node["xnode_union"]["filter_id"]]
            # The file names a quantized layer by the key of its scales, and a float layer by the key of its weight.
            buffers = (quantization.get("scale_buffer_idx", 0), weight["constant_buffer_idx"])
            names = [layer_names.get(keys[buffer]) for buffer in buffers if buffer < len(keys)]
            name = next((name for name in names if name), kind)
            dtype = weight["datatype"].removeprefix("xnn_datatype_")
            nodes.append(_describe_node(name, f"{kind} {dtype}", "int" in dtype, "its weight is float"))
        return nodes


def _describe_node(name: str, op: str, is_low: bool | None = None, why_float: str = "") -> dict[str, Any]:
    """Describe an operation. `is_low` is None for one without weights, and False for one with float weights."""
    return {"name": name, "op": op, "low": is_low, "why": why_float if is_low is False else ""}


def _decode_flatbuffer(data: bytes, schema: str) -> dict[str, Any]:
    """Decode a flatbuffer with a schema and the compiler flatc, which are parts of the executorch package."""
    with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
        binary = Path(folder) / "data.bin"
        binary.write_bytes(data)
        options = ["--json", "--defaults-json", "--strict-json", "--raw-binary", "-o", folder]
        subprocess.run(  # noqa: S603  # a program of an installed package, no shell
            [str(PACKAGE_FOLDER / "data/bin/flatc"), *options, str(PACKAGE_FOLDER / schema), "--", str(binary)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        text = binary.with_suffix(".json").read_text("utf-8")
        content: dict[str, Any] = json.loads(FLATC_INFINITY.sub(r"\1Infinity", text))
        return content
