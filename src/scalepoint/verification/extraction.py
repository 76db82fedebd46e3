"""extract_failing: writes the first failing layer, one that departs from the simulation by itself, as a small file.

FOLDER/model.onnx     the nodes of this layer, from quantizer to quantizer
FOLDER/inputs.npz     its inputs in the simulation
FOLDER/expected.npz   its output in the simulation
FOLDER/run.py         runs model.onnx in ONNX Runtime and prints the difference from expected.npz

`compare_layers` returns the file cut at its quantizers: the input of every DequantizeLinear is an input of the graph
with the codes of the simulation. So the nodes that compute one output are those of a single layer.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx

from scalepoint.errors import StoreError, UsageError
from scalepoint.support.files import replace_bytes, replace_file, replace_text
from scalepoint.support.output_folder import check_inputs, check_links, check_path
from scalepoint.verification.layers import ComparedLayers, compare_layers

EXTRACTED_FILES = ("model.onnx", "inputs.npz", "expected.npz", "run.py")
MAX_NODE_NAME = 80  # characters of the name of a node in the docstring of run.py
SCRIPT = '''"""{node_name}: compares one layer in ONNX Runtime with its expected output. Needs numpy and onnxruntime."""

import os
from pathlib import Path

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

folder = Path(__file__).resolve().parent
inputs, expected = (dict(np.load(folder / name)) for name in ("inputs.npz", "expected.npz"))
feeds = {{name: inputs[f"input_{{index}}"] for index, name in enumerate(inputs["names"].tolist())}}
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
output = session.run(None, feeds)[0]
difference = np.abs(output.astype(np.float64) - expected["output"].astype(np.float64))
print(f"{{(difference == 0).mean():.2%}} of {{difference.size}} values are equal, at most {{difference.max():g}} apart")
'''


def extract_failing(
    path: str | Path,
    model: fx.GraphModule,
    inputs: Any,
    folder: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path | None:
    """Write a small file that reproduces the first layer that departs from the simulation by itself.

    Args:
        path: The file.
        model: The quantized model that the file was written from.
        inputs: Inputs to run.
        folder: The folder for the four files. It must be empty or new.
        kwargs: Keyword inputs of the model.
        force: Allow a folder with other files. Only the four files are overwritten.

    Returns:
        The folder, or None if no single layer departs (rounding differences then add up over layers).

    Raises:
        UsageError: The folder is not empty.
        VerificationError: ONNX Runtime cannot run the file.
    """
    folder = Path(folder)
    _check_folder(folder, Path(path), force=force)
    compared = compare_layers(path, model, inputs, kwargs=kwargs)
    node_order = {name: index for index, node in enumerate(compared.proto.graph.node) for name in node.output}
    failing = [name for name, layer in compared.layers.items() if not layer.holds]
    if not failing:
        return None
    first_output = min(failing, key=node_order.__getitem__)
    proto = _extract_subgraph(compared.proto, first_output)
    _write_folder(folder, proto, first_output, compared)
    return folder


def _check_folder(folder: Path, file: Path, *, force: bool) -> None:
    check_path(folder, "folder")
    check_inputs(folder, {"file": file})
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"folder={str(folder)!r} is a file: pass the path of a folder")
    check_links(folder, EXTRACTED_FILES)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty: pass another folder=, or overwrite {', '.join(EXTRACTED_FILES)} there "
            "with force=True"
        )


def _extract_subgraph(proto: Any, output_name: str) -> Any:
    """Build a model from the nodes that compute one output, back to the inputs and initializers of the graph."""
    import onnx  # noqa: PLC0415  # only files need it

    graph = proto.graph
    nodes = list(graph.node)
    producers = {name: index for index, node in enumerate(nodes) for name in node.output}
    needed_nodes: set[int] = set()
    needed_tensors: set[str] = set()
    pending = [output_name]
    while pending:
        name = pending.pop()
        needed_tensors.add(name)
        producer = producers.get(name)
        if producer is not None and producer not in needed_nodes:
            needed_nodes.add(producer)
            pending += [input_name for input_name in nodes[producer].input if input_name]  # "" is an omitted input
    subgraph = onnx.helper.make_graph(
        [node for index, node in enumerate(nodes) if index in needed_nodes],
        "failing",
        [value for value in graph.input if value.name in needed_tensors],
        [value for value in graph.output if value.name == output_name],
        [value for value in graph.initializer if value.name in needed_tensors],
    )
    return onnx.helper.make_model(subgraph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def _write_folder(folder: Path, proto: Any, output_name: str, compared: ComparedLayers) -> None:
    names = [value.name for value in proto.graph.input]
    arrays: dict[str, Any] = {f"input_{index}": compared.feeds[name] for index, name in enumerate(names)}
    # The name of the node becomes text of a Python file: keep only characters that cannot end the docstring.
    node_name = re.sub(r"[^\w./ -]", "_", compared.layers[output_name].where, flags=re.ASCII)[:MAX_NODE_NAME]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    model, inputs, expected, script = (folder / name for name in EXTRACTED_FILES)
    replace_bytes(model, proto.SerializeToString(deterministic=True))
    replace_file(inputs, lambda path: _save_arrays(path, {"names": np.array(names), **arrays}))
    replace_file(expected, lambda path: _save_arrays(path, {"output": compared.expected[output_name]}))
    replace_text(script, SCRIPT.format(node_name=node_name))


def _save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # given a path, np.savez appends .npz to the temporary name
        np.savez(file, **arrays)
