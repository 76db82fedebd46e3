"""What an ONNX file says of itself, read without its weights."""

from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import DocumentError, StoreError
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import read_target_options
from scalepoint.support.untrusted import LARGEST_PROTOBUF, check_file, file_in, read_bytes


def read_info(path: Path) -> FileInfo:
    """Its inputs, its quantizers, what it was made for; its size with the data beside it."""
    model = read_model(path)
    said = {_decode_text(each.key): _decode_text(each.value) for each in model.metadata_props}
    return FileInfo(
        size=_measure_size(path, model),
        inputs=tuple(map(_read_input, model.graph.input)),
        made_for=read_target_options(said),
        quantizers={
            _decode_text(node.name): _decode_text(node.output[0]) for node in model.graph.node if _is_quantizer(node)
        },
        metadata=said,
    )


def read_model(path: Path) -> Any:
    """The file without the data beside it."""
    import onnx  # noqa: PLC0415  # only files need it

    try:
        found = onnx.load_from_string(read_bytes(path, LARGEST_PROTOBUF))
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # protobuf raises its own kinds
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: {error}") from error
    if not found.graph.output or not found.opset_import:  # where a file that was cut off ends well by chance
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: it has no graph or names no opset")
    return found


def _measure_size(path: Path, model: Any) -> int:
    pairs = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    locations = sorted({_decode_text(entry.value) for entry in pairs if entry.key == "location"})
    try:
        return path.stat().st_size + sum(check_file(file_in(path.parent, location)) for location in locations)
    except DocumentError as error:
        raise StoreError(f"{path.name} has its weights in another file: {error.args[0]}") from error
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}. {path.name} has its weights in this file") from error


def _is_quantizer(node: Any) -> bool:
    return node.op_type == "QuantizeLinear" and len(node.output) == 1


def _decode_text(value: str | bytes) -> str:
    """What is no text in a file that was damaged comes as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _read_input(value: Any) -> FileInput:
    import onnx  # noqa: PLC0415

    kind = value.type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    except (KeyError, ValueError, TypeError) as error:  # a sequence, a map, or a number that stands for no type
        raise StoreError(
            f"input {_decode_text(value.name)!r} of the file is no tensor of a type that ONNX has"
        ) from error
    return FileInput(_decode_text(value.name), dtype, tuple(each.dim_value or None for each in kind.shape.dim))
