"""The smallest graph that fails: the first layer that departs on its own, as a file with its inputs and a script.

FOLDER/model.onnx     the layer between two quantizers, and nothing else
FOLDER/inputs.npz     what the simulation feeds it     expected.npz  what the simulation gives
FOLDER/run.py         runs it in ONNX Runtime, and says how far it is off
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
SCRIPT = '''"""{where}: what ONNX Runtime gives for one layer, and what it should. Needs numpy and onnxruntime alone."""

import os
from pathlib import Path

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

here = Path(__file__).resolve().parent
inputs, expected = (dict(np.load(here / name)) for name in ("inputs.npz", "expected.npz"))
names = dict(zip(inputs["names"].tolist(), (inputs[f"input_{{place}}"] for place in range(len(inputs["names"])))))
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(here / "model.onnx", options, providers=["CPUExecutionProvider"])
found = session.run(None, names)[0]
apart = np.abs(found.astype(np.float64) - expected["output"].astype(np.float64))
print(f"{{(apart == 0).mean():.2%}} of {{apart.size}} values are equal, at most {{apart.max():g}} apart")
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
    """Write the first layer of a file that departs from the simulation by itself, as a small file that reproduces it.

    Args:
        path: The file.
        model: The quantized model that it was written from.
        inputs: Inputs to run.
        folder: The folder for the four files. A folder that contains something is refused.
        kwargs: Keyword inputs of the model.
        force: Overwrite the four files in `folder`; other files stay.

    Returns:
        The folder, or None if no single layer departs (rounding differences then add up over layers).
    """
    folder = Path(folder)
    _check_folder(folder, Path(path), force=force)
    found = compare_layers(path, model, inputs, kwargs=kwargs)
    made = {name: place for place, node in enumerate(found.proto.graph.node) for name in node.output}
    departing = sorted((name for name, layer in found.layers.items() if not layer.holds), key=made.__getitem__)
    if not departing:
        return None
    tensor = departing[0]
    proto = _extract_subgraph(found.proto, tensor)
    _write_folder(folder, proto, tensor, found)
    return folder


def _check_folder(folder: Path, file: Path, *, force: bool) -> None:
    check_path(folder, "folder")
    check_inputs(folder, {"file": file})
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"folder={str(folder)!r} is a file: give a folder")
    check_links(folder, EXTRACTED_FILES)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty: choose another folder=, or overwrite {', '.join(EXTRACTED_FILES)} there "
            "with force=True"
        )


def _extract_subgraph(proto: Any, tensor: str) -> Any:
    """The nodes that make a tensor of inputs and weights."""
    import onnx  # noqa: PLC0415  # only files need it

    graph = proto.graph
    nodes = list(graph.node)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    needed: set[int] = set()
    read: set[str] = set()
    pending = [tensor]
    while pending:
        name = pending.pop()
        place = makers.get(name)
        read.add(name)
        if place is not None and place not in needed:
            needed.add(place)
            pending += [each for each in nodes[place].input if each]
    made = onnx.helper.make_graph(
        [node for place, node in enumerate(nodes) if place in needed],
        "failing",
        [each for each in graph.input if each.name in read],
        [each for each in graph.output if each.name == tensor],
        [each for each in graph.initializer if each.name in read],
    )
    return onnx.helper.make_model(made, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def _write_folder(folder: Path, proto: Any, tensor: str, found: ComparedLayers) -> None:
    names = [each.name for each in proto.graph.input]
    arrays: dict[str, Any] = {f"input_{place}": found.feeds[name] for place, name in enumerate(names)}
    where = re.sub(r"[^\w./ -]", "_", found.layers[tensor].where, flags=re.ASCII)[:80]  # it stands in a script
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    model, inputs, expected, script = (folder / name for name in EXTRACTED_FILES)
    replace_bytes(model, proto.SerializeToString(deterministic=True))
    replace_file(inputs, lambda path: _save_arrays(path, {"names": np.array(names), **arrays}))
    replace_file(expected, lambda path: _save_arrays(path, {"output": found.expected[tensor]}))
    replace_text(script, SCRIPT.format(where=where))


def _save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # np.savez would put .npz after the temporary name
        np.savez(file, **arrays)
