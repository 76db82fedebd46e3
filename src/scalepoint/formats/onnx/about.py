"""What an ONNX file says of itself, read without its weights."""

from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import StoreError
from scalepoint.formats.format import About, FileInput
from scalepoint.formats.metadata import made_for


def about(path: Path) -> About:
    """Its inputs, its quantizers, what it was made for; its size with the data beside it."""
    model = _model(path)
    said = {_text(each.key): _text(each.value) for each in model.metadata_props}
    return About(
        size=_size(path, model),
        inputs=tuple(map(_input, model.graph.input)),
        made_for=made_for(said),
        quantizers={_text(node.name): _text(node.output[0]) for node in model.graph.node if _is_quantizer(node)},
        metadata=said,
    )


def _model(path: Path) -> Any:
    import onnx  # noqa: PLC0415  # only files need it

    try:
        found = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises its own kinds
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: {error}") from error
    if not found.graph.output or not found.opset_import:  # where a file that was cut off ends well by chance
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: it has no graph or names no opset")
    return found


def _size(path: Path, model: Any) -> int:
    pairs = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    beside = [path.parent / name for name in {_text(entry.value) for entry in pairs if entry.key == "location"}]
    gone = [each for each in beside if not each.is_file()]
    if gone:
        raise StoreError(f"{gone[0]} is not there: {path.name} has its weights in it")
    return sum(each.stat().st_size for each in (path, *beside))


def _is_quantizer(node: Any) -> bool:
    return node.op_type == "QuantizeLinear" and len(node.output) == 1


def _text(value: str | bytes) -> str:
    """What is no text in a file that was damaged comes as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _input(value: Any) -> FileInput:
    import onnx  # noqa: PLC0415

    kind = value.type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    except (KeyError, ValueError, TypeError) as error:  # a sequence, a map, or a number that stands for no type
        raise StoreError(f"input {_text(value.name)!r} of the file is no tensor of a type that ONNX has") from error
    return FileInput(_text(value.name), dtype, tuple(each.dim_value or None for each in kind.shape.dim))
