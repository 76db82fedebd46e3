"""Saves an ONNX graph atomically. Weights of large models go into an external data file.

The name of the data file contains a digest of its bytes. So an old model keeps its own data file until the new model
replaces it.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.errors import ExportError, StoreError
from scalepoint.formats.onnx.file_info import read_model
from scalepoint.support.files import (
    compute_digest,
    describe_needed_space,
    is_disk_full,
    make_empty_folder,
    replace_file,
    temporary_path,
)
from scalepoint.support.untrusted import LARGEST_PROTOBUF, read_bytes

MAX_SINGLE_FILE_BYTES = 1_900_000_000  # protobuf messages are limited to 2 GB
MAX_CHECKED_CONSTANT_BYTES = 1024  # the checker sees smaller constants, because shapes may depend on them
_DATA_FILE_NAME = re.compile(r".+\.[0-9a-f]{8}\.data")


def save_graph(graph: Any, path: Path) -> None:
    """Write one file, or also a data file if it would be too large. The .onnx file is written last."""
    old_data_files = list_data_files(path)
    if sum(value.const_value.nbytes for value in graph.graph.initializers.values()) < MAX_SINGLE_FILE_BYTES:
        _save_single_file(graph, path)
        new_data_files = set()
    else:
        new_data_files = {_save_with_data_file(graph, path)}
    for name in old_data_files - new_data_files:
        (path.parent / name).unlink(missing_ok=True)


def list_files(path: Path) -> list[Path]:
    """Return the data files of a model, and the .onnx file last."""
    return [*(path.parent / name for name in sorted(list_data_files(path))), path]


def list_data_files(path: Path) -> set[str]:
    """Return the names of the data files that scalepoint wrote for this model."""
    import onnx  # noqa: PLC0415  # only an export needs it

    if not any(map(_DATA_FILE_NAME.fullmatch, os.listdir(path.parent) if path.is_file() else ())):
        return set()  # decided without reading the model, which may be large
    try:
        model = onnx.load_from_string(read_bytes(path, LARGEST_PROTOBUF))
    except Exception:  # no file, or not an ONNX model: scalepoint did not write it
        return set()
    locations = {str(entry.value) for entry in _iterate_locations(model)}
    return {name for name in locations if _DATA_FILE_NAME.fullmatch(name) and Path(name).name == name}


def list_external_files(path: Path) -> list[Path]:
    """Return the data files of any model, whoever wrote it.

    Raises:
        StoreError: The file cannot be read.
    """
    names = {str(entry.value) for entry in _iterate_locations(read_model(path))}
    return [path.parent / name for name in sorted(names)]


def copy_model(source: Path, path: Path) -> None:
    """Copy a model that was read before. Its data files get names like those that `save_graph` writes."""
    model = read_model(source)
    entries = list(_iterate_locations(model))
    if not entries:
        shutil.copyfile(source, path)
        return
    names: dict[str, str] = {}
    for location in dict.fromkeys(str(entry.value) for entry in entries):
        data_file = source.parent / location
        names[location] = f"{path.stem}.{compute_digest(data_file)[:8]}.data"
        shutil.copyfile(data_file, path.parent / names[location])
    for entry in entries:
        entry.value = names[str(entry.value)]
    path.write_bytes(model.SerializeToString(deterministic=True))


def _iterate_locations(model: Any) -> Iterator[Any]:
    """Yield the entries of tensors that have the name of a data file."""
    from scalepoint.support.onnx_file import iterate_tensors  # noqa: PLC0415  # imports onnx

    for tensor in iterate_tensors(model):
        yield from (entry for entry in tensor.external_data if entry.key == "location")


def _save_single_file(graph: Any, path: Path) -> None:
    """Check and write one file.

    The checker would copy large weights, so it sees them as inputs, which have only a type and a shape.
    """
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    initializers = graph.graph.initializers
    large = [value for value in initializers.values() if value.const_value.nbytes > MAX_CHECKED_CONSTANT_BYTES]
    for value in large:
        initializers.pop(value.name)
    proto = ir.serde.serialize_model(graph)
    input_count = len(proto.graph.input)
    weight_infos = [ir.serde.serialize_value(value) for value in large]
    proto.graph.input.extend(weight_infos)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the checker and shape inference raise their own error types
        raise ExportError(f"the exported graph is invalid: {error}") from error
    del proto.graph.input[input_count:]
    proto.graph.value_info.extend(weight_infos)
    for value in large:
        initializers.add(value)
    size = proto.ByteSize() + sum(value.const_value.nbytes for value in large)
    replace_file(path, lambda temporary: _write_bytes(temporary, proto, large), size)


def _save_with_data_file(graph: Any, path: Path) -> str:
    """Write and check both files in a temporary folder, then move them. Returns the name of the data file."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    folder = temporary_path(path)
    try:
        make_empty_folder(folder)
        ir.save(graph, folder / path.name, external_data="data")
        name = f"{path.stem}.{compute_digest(folder / 'data')[:8]}.data"
        os.replace(folder / "data", folder / name)
        proto = onnx.load(folder / path.name, load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        (folder / path.name).write_bytes(proto.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(folder / path.name))
        os.replace(folder / name, path.parent / name)
        os.replace(folder / path.name, path)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the exported graph is invalid: {error}") from error
    except OSError as error:
        size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
        needed_space = f". {describe_needed_space(folder, size)}" if is_disk_full(error) else ""
        reason = error.strerror or error
        raise StoreError(f"cannot write {path}: {reason}. The old content is unchanged{needed_space}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return name


def _write_bytes(path: Path, proto: Any, large: Sequence[Any]) -> None:
    """Write the bytes of the model, with the large weights as its last initializers.

    The weights are written directly from their tensors: as a protobuf message, hundreds of MB would be copied three
    times. So the message is put together by hand: the bytes before and after the field that contains the weights.
    """
    copy_buffer = _CopyBuffer()
    weights = [_encode_initializer(value, copy_buffer) for value in large]
    graph = type(proto.graph)()
    graph.CopyFrom(proto.graph)
    proto.ClearField("graph")
    model_start, model_end = _serialize_around(proto, "graph")
    graph_start, graph_end = _serialize_around(graph, "initializer")
    size = len(graph_start) + sum(len(weight.header) + weight.size for weight in weights) + len(graph_end)
    with path.open("wb") as file:
        file.write(model_start + _field_header(proto, "graph", size) + graph_start)
        for weight in weights:
            file.write(weight.header)
            start = file.tell()
            weight.write(file)
            byte_count = file.tell() - start
            if byte_count != weight.size:
                raise ExportError(f"{weight.name} has {byte_count} bytes, but its type and shape need {weight.size}")
        file.write(graph_end + model_end)


class _CopyBuffer:
    """Memory that is reused to make non-contiguous weights contiguous, one after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, weight: Tensor) -> Any:
        if weight.nbytes > self._memory.nbytes:
            self._memory = torch.empty(weight.nbytes, dtype=torch.uint8)
        contiguous = self._memory[: weight.nbytes]
        contiguous.view(weight.dtype).view(weight.shape).copy_(weight)
        return contiguous.numpy()


class _InitializerBytes(NamedTuple):
    """An initializer in protobuf: a header, then `size` bytes that `write` writes to a file."""

    name: str
    header: bytes
    size: int
    write: Callable[[Any], object]


def _encode_initializer(value: Any, copy_buffer: _CopyBuffer) -> _InitializerBytes:
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    tensor = value.const_value
    if not _is_plain_tensor(tensor):
        proto = ir.serde.serialize_tensor(tensor)
        proto.name = value.name
        data = proto.SerializeToString(deterministic=True)
        header = _field_header(onnx.GraphProto, "initializer", len(data))
        return _InitializerBytes(value.name, header, len(data), lambda file: file.write(data))
    proto = onnx.TensorProto(name=value.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    fields = proto.SerializeToString(deterministic=True) + _field_header(proto, "raw_data", tensor.nbytes)
    header = _field_header(onnx.GraphProto, "initializer", len(fields) + tensor.nbytes) + fields
    raw: Any = getattr(tensor, "raw", None)
    is_transposed = isinstance(raw, Tensor) and raw.device.type == "cpu" and not raw.is_contiguous()
    if is_transposed and raw.nbytes == tensor.nbytes:
        return _InitializerBytes(value.name, header, raw.nbytes, lambda file: file.write(copy_buffer(raw.detach())))
    return _InitializerBytes(value.name, header, tensor.nbytes, tensor.tofile)


def _is_plain_tensor(tensor: Any) -> bool:
    """Whether a tensor has only a name, type, shape and values, and can write its values to a file."""
    import onnx_ir as ir  # noqa: PLC0415

    return isinstance(tensor, ir.Tensor | ir.PackedTensor) and not (tensor.doc_string or tensor.metadata_props)


def _serialize_around(message: Any, name: str) -> tuple[bytes, bytes]:
    """Return the bytes of a message before and after the end of a field. Fields are ordered by their numbers."""
    start, end = message, type(message)()
    end.CopyFrom(message)
    number = message.DESCRIPTOR.fields_by_name[name].number
    for field in message.DESCRIPTOR.fields:
        if field.number <= number:
            end.ClearField(field.name)
        else:
            start.ClearField(field.name)
    return start.SerializeToString(deterministic=True), end.SerializeToString(deterministic=True)


def _field_header(message: Any, name: str, size: int) -> bytes:
    """Return the header of a field in protobuf: its number with wire type 2 (bytes), and the number of bytes."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    """Encode a number as protobuf does: 7 bits per byte, the lowest first; the eighth bit is set if more follow."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))
