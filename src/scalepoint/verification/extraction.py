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

from scalepoint.files import replace_folder
from scalepoint.verification.layers import Compared, compared

SCRIPT = '''"""{where}: what ONNX Runtime gives for one layer, and what it should. Needs numpy and onnxruntime alone."""

from pathlib import Path

import numpy as np
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
) -> Path | None:
    """Write the first layer of a file that departs by itself into `folder`; None where none does: then roundings grow
    from layer to layer."""
    found = compared(path, model, inputs, kwargs=kwargs)
    made = {name: place for place, node in enumerate(found.proto.graph.node) for name in node.output}
    departing = sorted((name for name, layer in found.layers.items() if not layer.holds), key=made.__getitem__)
    if not departing:
        return None
    tensor = departing[0]
    proto = _part(found.proto, tensor)
    replace_folder(Path(folder), lambda place: _write(place, proto, tensor, found))
    return Path(folder)


def _part(proto: Any, tensor: str) -> Any:
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


def _write(folder: Path, proto: Any, tensor: str, found: Compared) -> None:
    import onnx  # noqa: PLC0415

    onnx.save(proto, folder / "model.onnx")
    names = [each.name for each in proto.graph.input]
    arrays: dict[str, Any] = {f"input_{place}": found.feeds[name] for place, name in enumerate(names)}
    np.savez(folder / "inputs.npz", names=np.array(names), **arrays)
    np.savez(folder / "expected.npz", output=found.expected[tensor])
    where = re.sub(r"[^\w./ -]", "_", found.layers[tensor].where, flags=re.ASCII)[:80]  # it stands in a script
    (folder / "run.py").write_text(SCRIPT.format(where=where), encoding="utf-8")
