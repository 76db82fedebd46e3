"""A file in ExecuTorch, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported."""

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

ABOUT = "scalepoint"  # a method that gives what the file says of itself
HOME = Path(executorch.runtime.__file__).parent.parent
MULTIPLY = ("XNNConv2d", "XNNConvTranspose2d", "XNNDepthwiseConv2d", "XNNFullyConnected")
OUTSIDE = ("aten::convolution", "aten::linear", "aten::addmm", "aten::mm")  # with weights, in ExecuTorch's own kernels
DELEGATE = "XnnpackBackend"
INFINITE = re.compile(r"(: -?)inf\b")  # as flatc writes it


class File:
    """options: threads (0: it chooses)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads"):
            portable_lib._unsafe_reset_threadpool(options["threads"])
        self.path = Path(path)
        self.program = executorch.runtime.Runtime.get().load_program(path)
        self.method = self.program.load_method("forward")
        said = self.program.load_method(ABOUT).execute([])[0] if ABOUT in self.program.method_names else "{}"
        meta = self.method.metadata
        self.said = json.loads(said)
        own = self.said.get("inputs", [])
        self.inputs = [each["name"] for each in own] or [f"input_{place}" for place in range(meta.num_inputs())]
        self.is_free = [bool(each["shape"]) and each["shape"][0] is None for each in own]
        sizes = [meta.input_tensor_meta(place).sizes() for place in range(meta.num_inputs())]
        self.largest = min((size[0] for size, free in zip(sizes, self.is_free, strict=False) if free), default=0)

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """In pieces where the batch is larger than the file's largest."""
        given = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        batch = next((len(value) for value, free in zip(given, self.is_free, strict=False) if free), 0)
        if not self.largest or batch <= self.largest:
            found = self._run(given)
        else:
            pieces = [self._run(self._piece(given, start)) for start in range(0, batch, self.largest)]
            found = [np.concatenate(each) for each in zip(*pieces, strict=True)]
        names = self.said.get("outputs") or [f"output_{place}" for place in range(len(found))]
        return list(zip(names, found, strict=True))

    def _piece(self, given: list[np.ndarray], start: int) -> list[np.ndarray]:
        piece = slice(start, start + self.largest)
        return [value[piece] if free else value for value, free in zip(given, self.is_free, strict=True)]

    def _run(self, given: list[np.ndarray]) -> list[np.ndarray]:
        outputs = self.method.execute([torch.from_numpy(value) for value in given])
        return [value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for value in outputs]

    def executed(self) -> list[dict[str, Any]]:
        """The operations of all XNNPACK graphs, with the type of their weights, and what runs outside of them."""
        raw = self.path.read_bytes()
        size, base = (int.from_bytes(raw[start : start + 8], "little") for start in (16, 24))
        program = _decoded(raw[:size], "exir/_serialize/program.fbs")
        plan = next(each for each in program["execution_plan"] if each["name"] == "forward")
        calls = [each for chain in plan["chains"] for each in chain["instructions"]]
        nodes = []
        for call in calls:
            given = call["instr_args"]
            if call["instr_args_type"] == "KernelCall":
                op = plan["operators"][given["op_index"]]["name"]
                nodes.append(_node(op, op, False if op in OUTSIDE else None, "XNNPACK does not take it"))
            elif call["instr_args_type"] == "DelegateCall":
                delegate = plan["delegates"][given["delegate_index"]]
                nodes.append(_node(delegate["id"], delegate["id"]))
                segment = program["segments"][delegate["processed"]["index"]]
                start = base + segment["offset"]
                nodes += self._delegated(raw[start : start + segment["size"]]) if delegate["id"] == DELEGATE else []
        return nodes

    def _delegated(self, blob: bytes) -> list[dict[str, Any]]:
        start, size = (int.from_bytes(blob[at : at + 4], "little") for at in (10, 14))
        graph = _decoded(blob[start : start + size], "backends/xnnpack/serialization/schema.fbs")
        values = {}
        for each in graph["xvalues"]:
            value = each["xvalue_union"]
            own = value.get("tensor_value", value)
            values[own["id_out"]] = (own, value.get("quant_params") or {})
        keys = [each["named_key"] for each in graph["constant_data"]]
        found = []
        for node in graph["xnodes"]:
            kind, given = node["xnode_union_type"], node["xnode_union"]
            if kind not in MULTIPLY:
                found.append(_node(kind, kind))
                continue
            weight, parameters = values[given["filter_id"]]
            places = (parameters.get("scale_buffer_idx", 0), weight["constant_buffer_idx"])
            named = (self.said.get("layers", {}).get(keys[place]) for place in places if place < len(keys))
            name = next((each for each in named if each), kind)
            dtype = weight["datatype"].removeprefix("xnn_datatype_")
            found.append(_node(name, f"{kind} {dtype}", "int" in dtype, "its weight is float"))
        return found


def _node(name: str, op: str, low: bool | None = None, why: str = "") -> dict[str, Any]:
    return {"name": name, "op": op, "low": low, "why": why if low is False else ""}


def _decoded(data: bytes, schema: str) -> dict[str, Any]:
    """A flatbuffer by a schema of ExecuTorch's, through the compiler that comes with it."""
    with tempfile.TemporaryDirectory(prefix="scalepoint-") as folder:
        binary = Path(folder) / "data.bin"
        binary.write_bytes(data)
        options = ["--json", "--defaults-json", "--strict-json", "--raw-binary", "-o", folder]
        subprocess.run(  # noqa: S603  # a program of an installed package, no shell
            [str(HOME / "data/bin/flatc"), *options, str(HOME / schema), "--", str(binary)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found: dict[str, Any] = json.loads(INFINITE.sub(r"\1Infinity", binary.with_suffix(".json").read_text("utf-8")))
        return found
