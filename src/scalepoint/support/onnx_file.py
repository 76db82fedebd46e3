"""Reads untrusted ONNX files: returns a model that passed all checks, or raises StoreError.

file --parse--> ModelProto --check header and tensors, inline functions, check graph--> onnx_ir model
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, inliner, shape_inference

from scalepoint.errors import DocumentError, StoreError, short_repr
from scalepoint.support.untrusted import read_bytes, read_part

MIN_OPSET = 10  # the first with QuantizeLinear
MAX_NODES = 1_000_000  # after inlining: each level of nested functions can multiply the number of nodes
MAX_BYTES = 2**31  # the limit of protobuf
MAX_FUNCTION_DEPTH = 64

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_EXTERNAL_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})


class OnnxFile(NamedTuple):
    """A model that passed all checks. Read the values of its tensors with `tensor_values` or `tensor_array` only."""

    model: ir.Model
    opset: int
    folder: Path | None


def read_model(
    source: str | os.PathLike[str] | ModelProto, *, min_opset: int = MIN_OPSET, infer_shapes: bool = True
) -> OnnxFile:
    """Read a model, inline its functions and infer its shapes where possible.

    Args:
        source: A file, or a model in memory. A model in memory cannot have external data.
        min_opset: The oldest opset that is read.
        infer_shapes: Whether to infer shapes, which copies the whole model in memory.

    Returns:
        The model, its opset, and the folder of its external data.

    Raises:
        StoreError: The file or the model is damaged, too large, or refers to files outside of its folder.
    """
    if isinstance(source, ModelProto):
        model, name, folder = source, "the model", None
    else:
        path = _check_path(source)
        model, name, folder = _parse(path), str(path), path.parent
    _check_header(model, name, min_opset)
    for tensor in iterate_tensors(model):
        _check_tensor(tensor, folder)
    model = _inline_functions(model, name)
    if infer_shapes:
        model = _infer_shapes(model)
    _check_graph(model.graph, frozenset())
    try:
        return OnnxFile(ir.from_proto(model), read_opset(model), folder)
    except Exception as error:  # onnx_ir wraps any error in one whose text contains the whole node, weights included
        raise StoreError(f"{name} is damaged: {_root_cause(error)}") from None


def tensor_values(tensor: ir.TensorProtocol, folder: Path | None) -> Floats:
    """Read the numbers of a constant as float32; external ones from the folder that `read_model` returned."""
    return tensor_array(tensor, folder).astype(np.float32)


def tensor_array(tensor: ir.TensorProtocol, folder: Path | None) -> np.ndarray:
    """Read the numbers of a constant in its own type; types that numpy lacks are those of ml_dtypes."""
    name = tensor.name or ""
    try:
        if isinstance(tensor, ir.ExternalTensor):  # its own numpy() would open any file that the model names
            entries = {"location": str(tensor.location), "offset": tensor.offset, "length": tensor.length}
            location = _locate_external_data(name, entries, folder)
            data = read_part(location.path, location.offset, location.length, folder=folder)
            dims = list(tensor.shape.numpy())
            proto = TensorProto(name=name, data_type=int(tensor.dtype), dims=dims, raw_data=data)
            tensor = ir.serde.deserialize_tensor(proto)
        return np.asarray(tensor.numpy())
    except Exception as error:  # onnx_ir 1.1 asserts that the data field fits the data type
        raise StoreError(f"the values of {short_repr(name)} cannot be read: {error}") from error


def _check_path(source: str | os.PathLike[str]) -> Path:
    try:
        path = Path(source)
        if not path.is_file():
            raise StoreError(f"there is no file {short_repr(str(path))}")
        if path.stat().st_size >= MAX_BYTES:
            raise StoreError(f"{path} has 2 GB or more: such weights must be in a data file next to it (external data)")
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"the source must be the path of an ONNX file or a ModelProto, got {short_repr(source)}: {error}"
        ) from error
    return path


def _parse(path: Path) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(path, MAX_BYTES - 1))
    except DecodeError as error:
        raise StoreError(f"{path} is not an ONNX file, or is truncated: export it again") from error
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return model


def _check_header(model: ModelProto, name: str, min_opset: int) -> None:
    if not model.HasField("graph") or not model.opset_import or not model.ir_version:
        raise StoreError(f"{name} has no graph, opset or IR version: it is not an ONNX file, or is truncated")
    if model.ir_version > onnx.IR_VERSION:
        raise StoreError(
            f"{name} has IR version {model.ir_version}, but the installed onnx supports versions up to "
            f"{onnx.IR_VERSION}"
        )
    opset, newest = read_opset(model), onnx.defs.onnx_opset_version()
    other = next((node for node in model.graph.node if node.domain not in ("", "ai.onnx")), None)
    if not opset and other is not None:
        operator = short_repr(f"{other.domain}::{other.op_type}")
        raise StoreError(f"{name} has operators of other domains only, such as {operator}: they are not supported")
    if not min_opset <= opset <= newest:
        raise StoreError(f"{name} has opset {opset}; files with opset {min_opset} to {newest} can be read")


def read_opset(model: ModelProto) -> int:
    """Return the opset of the standard domain; 0 if the model does not import it."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def iterate_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor of the file, including those in attributes, bodies and functions."""
    yield from _iterate_graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _iterate_node_tensors(node)
        for attribute in function.attribute_proto:
            yield from _iterate_attribute_tensors(attribute)


def _iterate_graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _iterate_node_tensors(node)


def _iterate_node_tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        yield from _iterate_attribute_tensors(attribute)


def _iterate_attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse_tensors = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for sparse in (*sparse_tensors, *attribute.sparse_tensors):
        yield from (sparse.values, sparse.indices)
    for graph in _list_attribute_graphs(attribute):
        yield from _iterate_graph_tensors(graph)


def _list_attribute_graphs(attribute: AttributeProto) -> list[GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _check_tensor(tensor: TensorProto, folder: Path | None) -> None:
    """Check that a tensor has one source of values, a valid type and shape, and safe external data."""
    name = short_repr(tensor.name)
    fields = [field for field in _DATA_FIELDS if len(getattr(tensor, field))]
    fields += ["raw_data"] if tensor.HasField("raw_data") and tensor.raw_data else []
    is_external = tensor.data_location == TensorProto.EXTERNAL
    fields += ["external data"] if is_external else []
    if len(fields) > 1:
        raise StoreError(f"tensor {name} has {' and '.join(fields)}: programs could read different values")
    if any(size < 0 for size in tensor.dims):
        raise StoreError(f"tensor {name} has a negative size: {list(tensor.dims)}")
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise StoreError(f"tensor {name} has the unknown data type {tensor.data_type}")
    if is_external:
        entries = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        unknown = sorted(entries.keys() - _EXTERNAL_KEYS)
        if unknown or len(entries) != len(tensor.external_data):
            raise StoreError(f"tensor {name} has unknown or repeated keys of external data: {short_repr(unknown)}")
        _locate_external_data(tensor.name, entries, folder)


class _DataLocation(NamedTuple):
    """Where the external data of a tensor is stored."""

    path: Path
    offset: int
    length: int


def _locate_external_data(
    tensor_name: str, entries: Mapping[str, str | int | None], folder: Path | None
) -> _DataLocation:
    """Return where a tensor's data is stored. It must be in a regular file in the model's folder."""
    name = short_repr(tensor_name)
    if folder is None:
        raise StoreError(f"tensor {name} has external data: pass the path of the file instead of a ModelProto")
    location = str(entries.get("location") or "")
    path = _resolve_in_folder(location, folder, name)
    try:
        size = path.stat().st_size
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or size - offset)  # missing or 0: to the end of the file
    except (OSError, ValueError) as error:
        raise StoreError(f"tensor {name}: external data {short_repr(location)} cannot be used: {error}") from error
    if not (offset >= 0 and length >= 0 and offset + length <= size):
        raise StoreError(
            f"tensor {name} needs bytes {offset} to {offset + length} of {short_repr(location)}, which has {size} bytes"
        )
    return _DataLocation(path, offset, length)


def _resolve_in_folder(location: str, folder: Path, name: str) -> Path:
    """Return the path of a data file. It must be in the folder, and no link to a file outside of it."""
    parts = location.replace("\\", "/").split("/")
    if not location or "\0" in location or ".." in parts or Path(location).is_absolute() or ":" in parts[0]:
        raise StoreError(
            f"tensor {name} has its data in {short_repr(location)}: only files in the model's folder are read"
        )
    path = folder / location
    relative_parts = Path(location).parts
    paths = [folder.joinpath(*relative_parts[: count + 1]) for count in range(len(relative_parts))]
    if any(path_or_parent.is_symlink() for path_or_parent in paths):
        raise StoreError(f"tensor {name}: {short_repr(location)} is a symbolic link; copy the file instead")
    if not path.is_file():
        raise StoreError(f"tensor {name}: its data file {short_repr(location)} is missing")
    if path.stat().st_nlink > 1:
        raise StoreError(f"tensor {name}: {short_repr(location)} is a hard link; copy the file instead")
    return path


def _inline_functions(model: ModelProto, name: str) -> ModelProto:
    """Replace calls of the model's functions by their nodes, after a check that not too many nodes result."""
    if not model.functions:
        return model
    functions = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    for key in functions:
        _count_nodes(key, functions, sizes, ())
    if sum(sizes.get((node.domain, node.op_type), 1) for node in _iterate_nodes(model.graph.node)) > MAX_NODES:
        raise StoreError(f"{name} has functions that grow to more than {MAX_NODES} nodes when they are inlined")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # onnx's C++ code raises exceptions of many types
        raise StoreError(f"{name} has functions that cannot be inlined: {error}") from error


def _count_nodes(
    key: tuple[str, str],
    functions: dict[tuple[str, str], FunctionProto],
    sizes: dict[tuple[str, str], int],
    callers: tuple[tuple[str, str], ...],
) -> int:
    """Return how many nodes a function becomes when it is inlined; raise StoreError if it calls itself.

    Args:
        key: Domain and name of the function.
        functions: All functions of the model.
        sizes: Results for other functions, which this call adds to.
        callers: The functions around this call.
    """
    if key in callers or len(callers) > MAX_FUNCTION_DEPTH:
        raise StoreError(
            f"function {short_repr(key[1])} calls itself, or functions are nested more than {MAX_FUNCTION_DEPTH} deep"
        )
    if key not in functions:
        return 1
    if key not in sizes:
        sizes[key] = sum(
            _count_nodes((node.domain, node.op_type), functions, sizes, (*callers, key))
            for node in _iterate_nodes(functions[key].node)
        )
    return sizes[key]


def _iterate_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for body in _list_bodies(node):
            yield from _iterate_nodes(body.node)


def _list_bodies(node: NodeProto) -> list[GraphProto]:
    """Return the body graphs of If, Loop and Scan."""
    return [graph for attribute in node.attribute for graph in _list_attribute_graphs(attribute)]


def _infer_shapes(model: ModelProto) -> ModelProto:
    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # the model can be used without inferred shapes
        return model


def _check_graph(graph: GraphProto, outer: frozenset[str]) -> None:
    """Check that names are text, and that each tensor has one producer, which comes before its readers.

    Args:
        graph: The main graph or a body.
        outer: The tensors that a body may read from the graphs around it.
    """
    for info in (*graph.input, *graph.value_info, *graph.output, *graph.initializer):
        _check_text(info.name)
    constants = {tensor.name for tensor in graph.initializer}
    constants.update(sparse.values.name for sparse in graph.sparse_initializer)
    defined = {info.name for info in graph.input} | constants
    for index, node in enumerate(graph.node):
        for text in (node.name, node.op_type, *node.input, *node.output, *(entry.name for entry in node.attribute)):
            _check_text(text)
        label = node.name or next(filter(None, node.output), f"{node.op_type}_{index}")
        for tensor in filter(None, node.input):
            if tensor not in defined and tensor not in outer:
                raise StoreError(f"node {short_repr(label)} reads {short_repr(tensor)}, which no earlier node computes")
        for body in _list_bodies(node):
            _check_graph(body, outer | defined)
        for tensor in filter(None, node.output):
            if tensor in defined:
                raise StoreError(
                    f"two nodes compute the tensor {short_repr(tensor)}, or it is also an input or initializer"
                )
            defined.add(tensor)
    missing = sorted({info.name for info in graph.output} - defined - outer)
    if missing:
        raise StoreError(f"no node computes the graph's output {short_repr(missing[0])}")


def _check_text(name: str) -> None:
    if not isinstance(name, str):  # protobuf returns text that is not UTF-8 as bytes
        raise StoreError(f"the name {short_repr(name)} is not text: the file is damaged")


def _root_cause(error: BaseException) -> str:
    """Return the text of the first error in a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)[:200]
