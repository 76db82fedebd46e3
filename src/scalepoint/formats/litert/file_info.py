"""What a .tflite file says of itself: its inputs by the schema, the rest in metadata of our own."""

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

# What the flatbuffers package raises where an offset or a length is wrong: it follows them without a check.
DAMAGED_FILE_ERRORS = (struct.error, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError)


def list_files(path: Path) -> Sequence[Path]:
    return [path]


def read_info(path: Path) -> FileInfo:
    """Its inputs, and what it was made for; of files that others wrote only the inputs."""
    data = _read_bytes(path)
    try:
        known = import_schema()
    except ExportError as error:
        raise StoreError(f"a .tflite file is read by its schema: {error}") from error
    try:
        model = known.Model.GetRootAs(data, 0)
        _check_lengths(model)
        said = _read_description(model)
        graph = model.Subgraphs(0)
        inputs = tuple(_read_input(graph.Tensors(graph.Inputs(place))) for place in range(graph.InputsLength()))
    except StoreError as error:
        raise StoreError(f"{path}: {error.args[0]}") from error
    except DAMAGED_FILE_ERRORS as error:
        raise StoreError(f"{path} is damaged, or only a part of a .tflite file: {error}") from error
    return FileInfo(
        size=len(data),
        inputs=inputs,
        made_for=read_target_options(said.made_for),
        quantizers=said.quantizers,
        metadata=said.made_for,
    )


def _read_bytes(path: Path) -> bytes:
    try:
        if read_head(path, 8)[4:] != IDENTIFIER:  # before all of it is read
            raise StoreError(f"{path} is no .tflite file")
        return read_bytes(path, LARGEST_FLATBUFFER)
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _check_lengths(model: Any) -> None:
    held = [model.Buffers(place) for place in range(model.BuffersLength())]
    if any(each.DataLength() and len(each.DataAsNumpy()) != each.DataLength() for each in held):
        raise ValueError("a buffer is cut off")
    if not model.SubgraphsLength():
        raise ValueError("it holds no graph")


def _read_description(model: Any) -> FileDescription:
    for place in range(model.MetadataLength()):
        each = model.Metadata(place)
        if each.Name() == DESCRIPTION_NAME.encode():
            return read_description(bytes(model.Buffers(each.Buffer()).DataAsNumpy()).decode())
    return FileDescription()


def _read_input(tensor: Any) -> FileInput:
    types = {getattr(import_schema().TensorType, name): kind for kind, name in TYPES.items()}
    kind = types.get(tensor.Type())
    if kind is None:
        raise StoreError(f"input {tensor.Name().decode()!r} is of a type that is not known here: {tensor.Type()}")
    shape = np.atleast_1d(tensor.ShapeSignatureAsNumpy() if tensor.ShapeSignatureLength() else tensor.ShapeAsNumpy())
    sizes = tuple(None if size < 0 else int(size) for size in shape) if tensor.ShapeLength() else ()
    return FileInput(tensor.Name().decode(), kind, sizes)
