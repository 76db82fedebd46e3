"""Reads what an ONNX file states about itself, without its external weights."""

from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import DocumentError, StoreError
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import read_target_options
from scalepoint.support.untrusted import LARGEST_PROTOBUF, check_file, file_in, read_bytes


def read_info(path: Path) -> FileInfo:
    """Return inputs, quantizers, target and metadata, and the size including external data files."""
    model = read_model(path)
    metadata = {_decode_text(entry.key): _decode_text(entry.value) for entry in model.metadata_props}
    return FileInfo(
        size=_measure_size(path, model),
        inputs=tuple(map(_read_input, model.graph.input)),
        made_for=read_target_options(metadata),
        quantizers={
            _decode_text(node.name): _decode_text(node.output[0]) for node in model.graph.node if _is_quantizer(node)
        },
        metadata=metadata,
    )


def read_model(path: Path) -> Any:
    """Read the model without its external data."""
    import onnx  # noqa: PLC0415  # only files need it

    try:
        model = onnx.load_from_string(read_bytes(path, LARGEST_PROTOBUF))
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # protobuf raises its own error types
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: {error}") from error
    if not model.graph.output or not model.opset_import:  # a truncated file can still be a valid protobuf message
        raise StoreError(f"{path} is not an ONNX file, or only a part of one: it has no graph or no opset")
    return model


def _measure_size(path: Path, model: Any) -> int:
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    locations = sorted({_decode_text(entry.value) for entry in entries if entry.key == "location"})
    try:
        return path.stat().st_size + sum(check_file(file_in(path.parent, location)) for location in locations)
    except DocumentError as error:
        raise StoreError(f"{path.name} has its weights in another file: {error.args[0]}") from error
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}. {path.name} has its weights in this file") from error


def _is_quantizer(node: Any) -> bool:
    return node.op_type == "QuantizeLinear" and len(node.output) == 1


def _decode_text(value: str | bytes) -> str:
    """Return text; in a damaged file protobuf gives bytes for what is not UTF-8."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _read_input(value: Any) -> FileInput:
    import onnx  # noqa: PLC0415

    tensor_type = value.type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)).name
    except (KeyError, ValueError, TypeError) as error:  # a sequence, a map, or an unknown type number
        raise StoreError(
            f"input {_decode_text(value.name)!r} of the file is not a tensor with a type that ONNX has"
        ) from error
    shape = tuple(dim.dim_value or None for dim in tensor_type.shape.dim)
    return FileInput(_decode_text(value.name), dtype, shape)
