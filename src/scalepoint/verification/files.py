"""What an ONNX file says of itself, read without its weights."""

from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import StoreError
from scalepoint.targets.target import LABEL


def existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"{path} is not there")
    return path


def _model(path: Path) -> Any:
    import onnx  # noqa: PLC0415  # only files need it

    try:
        found = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises its own kinds
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: {error}") from error
    if not found.graph.output or not found.opset_import:  # where a file that was cut off ends well by chance
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: it has no graph or names no opset")
    return found


def size_of(path: str | Path) -> int:
    """Bytes of a file and of the data files beside it that hold its weights."""
    path = existing(path)
    beside = {
        entry.value
        for tensor in _model(path).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return path.stat().st_size + sum(existing(path.parent / name).stat().st_size for name in beside)


def made_for(path: str | Path) -> dict[str, str]:
    """The target of a file that scalepoint wrote, and its options: {"target": "onnxruntime", "cpu": "avx2"}."""
    try:
        found = {each.key: each.value for each in _model(existing(path)).metadata_props}
    except StoreError:  # the runtime will say so
        return {}
    mine = {key.removeprefix(f"{LABEL}."): value for key, value in found.items() if key.startswith(f"{LABEL}.")}
    return {"target": found[LABEL], **mine} if LABEL in found else {}


def random_inputs(path: Path) -> dict[str, np.ndarray]:
    """Inputs of the shapes that a file declares; free axes are 1, integers are small."""
    import onnx  # noqa: PLC0415

    generator = np.random.default_rng(0)
    feeds = {}
    for each in _model(path).graph.input:
        kind = each.type.tensor_type
        shape = [dimension.dim_value or 1 for dimension in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        is_float = np.issubdtype(dtype, np.floating)
        feeds[each.name] = (generator.standard_normal(shape) if is_float else np.ones(shape)).astype(dtype)
    return feeds


def quantize_nodes(path: Path) -> dict[str, str]:
    """Name of a QuantizeLinear node -> its output tensor."""
    return {node.name: node.output[0] for node in _model(path).graph.node if node.op_type == "QuantizeLinear"}
