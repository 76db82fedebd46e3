"""Reading an ONNX file that nobody vouches for: it is sound and its data lies beside it, or StoreError says why not."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, inliner, shape_inference

from scalepoint.errors import DocumentError, StoreError, shown
from scalepoint.support.untrusted import read_bytes, read_part

OLDEST_OPSET = 10  # QuantizeLinear appeared
MOST_NODES = 1_000_000  # after inlining functions, which can double at every level
MOST_BYTES = 2**31  # the limit of protobuf

_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_EXTERNAL_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})


def read_model(source: str | os.PathLike[str] | ModelProto) -> tuple[ModelProto, Path | None]:
    """The model with functions inlined and shapes inferred where possible, and the folder of its external data."""
    path = None if isinstance(source, ModelProto) else _path(source)
    model = source if isinstance(source, ModelProto) else _parse(_path(source))
    name = "the model" if path is None else str(path)
    folder = None if path is None else path.parent
    _check_header(model, name)
    for tensor in _tensors(model):
        _check_tensor(tensor, folder)
    return _with_shapes(_inlined(model, name)), folder


def tensor_values(tensor: TensorProto, folder: Path | None) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """The numbers of a constant; external ones are read from the folder that `read_model` gave."""
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor = _loaded(tensor, folder)
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise StoreError(f"the values of {shown(tensor.name)} cannot be read: {error}") from error


def _path(source: str | os.PathLike[str]) -> Path:
    try:
        path = Path(source)
        if not path.is_file():
            raise StoreError(f"there is no file {shown(str(path))}")
        if path.stat().st_size >= MOST_BYTES:
            raise StoreError(f"{path} has 2 GB or more: ONNX keeps such weights in a data file beside it")
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"give the path of an ONNX file or a ModelProto, not {shown(source)}: {error}") from error
    return path


def _parse(path: Path) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(path, MOST_BYTES - 1))
    except DecodeError as error:
        raise StoreError(f"{path} is no ONNX file, or is cut off: write it again") from error
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return model


def _check_header(model: ModelProto, name: str) -> None:
    if not model.HasField("graph") or not model.opset_import or not model.ir_version:
        raise StoreError(f"{name} has no graph, opset or IR version: it is no ONNX file, or is cut off")
    if model.ir_version > onnx.IR_VERSION:
        raise StoreError(f"{name} has IR version {model.ir_version}; known are those up to {onnx.IR_VERSION}")
    opset, newest = opset_of(model), onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise StoreError(f"{name} has opset {opset}; Q/DQ files have one from {OLDEST_OPSET} to {newest}")


def opset_of(model: ModelProto) -> int:
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor in the file, also those in attributes, bodies and functions."""
    yield from _tensors_of_graph(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _tensors_of_node(node)
        for attribute in function.attribute_proto:
            yield from _tensors_of_attribute(attribute)


def _tensors_of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of_node(node)


def _tensors_of_node(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        yield from _tensors_of_attribute(attribute)


def _tensors_of_attribute(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for part in (*sparse, *attribute.sparse_tensors):
        yield from (part.values, part.indices)
    for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
        yield from _tensors_of_graph(graph)


def _check_tensor(tensor: TensorProto, folder: Path | None) -> None:
    name = shown(tensor.name)
    fields = [field for field in _DATA_FIELDS if len(getattr(tensor, field))]
    fields += ["raw_data"] if tensor.HasField("raw_data") and tensor.raw_data else []
    external = tensor.data_location == TensorProto.EXTERNAL
    fields += ["external data"] if external else []
    if len(fields) > 1:
        raise StoreError(f"tensor {name} has {' and '.join(fields)}: readers would see different numbers")
    if any(size < 0 for size in tensor.dims):
        raise StoreError(f"tensor {name} has a negative size: {list(tensor.dims)}")
    if external:
        _external(tensor, folder)


def _external(tensor: TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Where the data of a tensor lies: file, offset, length. Only a plain file in the model's own folder is read."""
    name = shown(tensor.name)
    if folder is None:
        raise StoreError(f"tensor {name} has external data: give the path of the file instead of a ModelProto")
    entries = {str(entry.key): str(entry.value) for entry in tensor.external_data}
    unknown = sorted(entries.keys() - _EXTERNAL_KEYS)
    if unknown or len(entries) != len(tensor.external_data):
        raise StoreError(f"tensor {name} has unknown or repeated keys of external data: {shown(unknown)}")
    location = entries.get("location", "")
    path = _contained(location, folder, name)
    try:
        size = path.stat().st_size
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or size - offset)
    except (OSError, ValueError) as error:
        raise StoreError(f"tensor {name}: external data {shown(location)} cannot be used: {error}") from error
    if not (offset >= 0 and length >= 0 and offset + length <= size):
        raise StoreError(
            f"tensor {name} wants bytes {offset} to {offset + length} of {shown(location)}, which has {size}"
        )
    return path, offset, length


def _contained(location: str, folder: Path, name: str) -> Path:
    parts = location.replace("\\", "/").split("/")
    if not location or "\0" in location or ".." in parts or Path(location).is_absolute() or ":" in parts[0]:
        raise StoreError(f"tensor {name} has its data in {shown(location)}: only files in the model's folder are read")
    path = folder / location
    steps = [folder.joinpath(*Path(location).parts[: count + 1]) for count in range(len(Path(location).parts))]
    if any(step.is_symlink() for step in steps):
        raise StoreError(f"tensor {name}: {shown(location)} is a symbolic link; copy the file instead")
    if not path.is_file():
        raise StoreError(f"tensor {name}: its data file {shown(location)} is missing")
    if path.stat().st_nlink > 1:
        raise StoreError(f"tensor {name}: {shown(location)} is a hard link; copy the file instead")
    return path


def _loaded(tensor: TensorProto, folder: Path | None) -> TensorProto:
    path, offset, length = _external(tensor, folder)
    data = read_part(path, offset, length, folder=folder)
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data)


def _inlined(model: ModelProto, name: str) -> ModelProto:
    if not model.functions:
        return model
    functions = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    for key in functions:
        _count(key, functions, sizes, ())
    if sum(sizes.get((node.domain, node.op_type), 1) for node in _nodes(model.graph.node)) > MOST_NODES:
        raise StoreError(f"{name} has functions that grow to more than {MOST_NODES} nodes")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # native code raises what it likes
        raise StoreError(f"{name} has functions that cannot be inlined: {error}") from error


def _count(
    key: tuple[str, str],
    functions: dict[tuple[str, str], FunctionProto],
    sizes: dict[tuple[str, str], int],
    open_: tuple[tuple[str, str], ...],
) -> int:
    """How many nodes a function becomes; a function that calls itself has no such number."""
    if key in open_ or len(open_) > 64:
        raise StoreError(f"function {shown(key[1])} calls itself, or functions are nested more than 64 deep")
    if key not in functions:
        return 1
    if key not in sizes:
        inner = _nodes(functions[key].node)
        sizes[key] = sum(_count((node.domain, node.op_type), functions, sizes, (*open_, key)) for node in inner)
    return sizes[key]


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from _nodes(body.node)


def bodies_of(node: NodeProto) -> list[GraphProto]:
    """The graphs of If, Loop and Scan."""
    return [
        graph
        for attribute in node.attribute
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    ]


def _with_shapes(model: ModelProto) -> ModelProto:
    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # shapes are a help, not a need: rules that lack one say nothing
        return model
