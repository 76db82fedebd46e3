"""What a .tflite file says of itself: its inputs by the schema, the rest in metadata of our own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import ExportError, StoreError
from scalepoint.formats.format import About, FileInput
from scalepoint.formats.litert.schema import ABOUT, IDENTIFIER, TYPES, schema
from scalepoint.formats.metadata import made_for


def files_of(path: Path) -> Sequence[Path]:
    return [path]


def about(path: Path) -> About:
    """Its inputs, and what it was made for; of files that others wrote only the inputs."""
    model = _read(path)
    said = _said(model)
    metadata = said.get("made_for", {})
    graph = model.Subgraphs(0)
    return About(
        size=path.stat().st_size,
        inputs=tuple(_input(graph.Tensors(graph.Inputs(place))) for place in range(graph.InputsLength())),
        made_for=made_for(metadata),
        quantizers=said.get("quantizers", {}),
        metadata=metadata,
    )


def _read(path: Path) -> Any:
    data = path.read_bytes()
    if data[4:8] != IDENTIFIER:
        raise StoreError(f"{path} is no .tflite file")
    try:
        known = schema()
    except ExportError as error:
        raise StoreError(f"a .tflite file is read by its schema: {error}") from error
    try:
        model = known.Model.GetRootAs(data, 0)
        held = [model.Buffers(place) for place in range(model.BuffersLength())]
        if any(each.DataLength() and len(each.DataAsNumpy()) != each.DataLength() for each in held):
            raise ValueError("a buffer is cut off")
        if not model.SubgraphsLength():
            raise ValueError("it holds no graph")
        return model
    except Exception as error:  # an offset that points behind the end raises every kind
        raise StoreError(f"{path} is only a part of a .tflite file: {error}") from error


def _said(model: Any) -> dict[str, Any]:
    for place in range(model.MetadataLength()):
        each = model.Metadata(place)
        if each.Name() == ABOUT.encode():
            found: dict[str, Any] = json.loads(bytes(model.Buffers(each.Buffer()).DataAsNumpy()))
            return found
    return {}


def _input(tensor: Any) -> FileInput:
    types = {getattr(schema().TensorType, name): kind for kind, name in TYPES.items()}
    kind = types.get(tensor.Type())
    if kind is None:
        raise StoreError(f"input {tensor.Name().decode()!r} is of a type that is not known here: {tensor.Type()}")
    shape = np.atleast_1d(tensor.ShapeSignatureAsNumpy() if tensor.ShapeSignatureLength() else tensor.ShapeAsNumpy())
    sizes = tuple(None if size < 0 else int(size) for size in shape) if tensor.ShapeLength() else ()
    return FileInput(tensor.Name().decode(), kind, sizes)
