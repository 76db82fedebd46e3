"""Reads what a .tflite file states about itself: inputs from the schema, the rest from scalepoint's metadata entry."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import DocumentError, ExportError, StoreError
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.litert.schema import DESCRIPTION_NAME, IDENTIFIER, TYPES, import_schema
from scalepoint.formats.metadata import FileDescription, read_description, read_target_options
from scalepoint.support.untrusted import LARGEST_FLATBUFFER, read_bytes, read_head

# The flatbuffers package raises these errors on wrong offsets and lengths, because it follows them without a check.
DAMAGED_FILE_ERRORS = (struct.error, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError)


def list_files(path: Path) -> Sequence[Path]:
    return [path]


def read_info(path: Path) -> FileInfo:
    """Return inputs, target, quantizers and metadata. A file that scalepoint did not write has inputs only."""
    data = _read_bytes(path)
    try:
        schema = import_schema()
    except ExportError as error:
        raise StoreError(f"the schema is needed to read a .tflite file: {error}") from error
    try:
        model = schema.Model.GetRootAs(data, 0)
        _check_lengths(model)
        description = _read_description(model)
        graph = model.Subgraphs(0)
        inputs = tuple(_read_input(graph.Tensors(graph.Inputs(index))) for index in range(graph.InputsLength()))
    except StoreError as error:
        raise StoreError(f"{path}: {error.args[0]}") from error
    except DAMAGED_FILE_ERRORS as error:
        raise StoreError(f"{path} is damaged, or only a part of a .tflite file: {error}") from error
    return FileInfo(
        size=len(data),
        inputs=inputs,
        made_for=read_target_options(description.made_for),
        quantizers=description.quantizers,
        metadata=description.made_for,
    )


def _read_bytes(path: Path) -> bytes:
    try:
        if read_head(path, 8)[4:] != IDENTIFIER:  # checked before the whole file is read
            raise StoreError(f"{path} is not a .tflite file")
        return read_bytes(path, LARGEST_FLATBUFFER)
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _check_lengths(model: Any) -> None:
    buffers = [model.Buffers(index) for index in range(model.BuffersLength())]
    if any(buffer.DataLength() and len(buffer.DataAsNumpy()) != buffer.DataLength() for buffer in buffers):
        raise ValueError("a buffer is cut off")
    if not model.SubgraphsLength():
        raise ValueError("it contains no graph")


def _read_description(model: Any) -> FileDescription:
    for index in range(model.MetadataLength()):
        entry = model.Metadata(index)
        if entry.Name() == DESCRIPTION_NAME.encode():
            return read_description(bytes(model.Buffers(entry.Buffer()).DataAsNumpy()).decode())
    return FileDescription()


def _read_input(tensor: Any) -> FileInput:
    numpy_names = {getattr(import_schema().TensorType, name): numpy_name for numpy_name, name in TYPES.items()}
    dtype = numpy_names.get(tensor.Type())
    if dtype is None:
        raise StoreError(f"input {tensor.Name().decode()!r} has an unsupported type: {tensor.Type()}")
    sizes = np.atleast_1d(tensor.ShapeSignatureAsNumpy() if tensor.ShapeSignatureLength() else tensor.ShapeAsNumpy())
    shape: tuple[int | None, ...] = ()
    if tensor.ShapeLength():  # flatbuffers returns 0 for the missing shape vector of a tensor without axes
        shape = tuple(None if size < 0 else int(size) for size in sizes)
    return FileInput(tensor.Name().decode(), dtype, shape)
