"""Writing an ONNX file at once: whole or not at all, with its weights in a data file beside it where they are large.

The data file is named after what it holds, so that an old model keeps its own until the new one is in its place.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import ExportError, StoreError
from scalepoint.support.files import (
    describe_needed_space,
    digest,
    is_disk_full,
    make_empty_folder,
    replace_file,
    temporary_path,
)
from scalepoint.support.untrusted import LARGEST_PROTOBUF, read_bytes

MAX_SINGLE_FILE_BYTES = 1_900_000_000  # protobuf stops at 2 GB
MAX_CHECKED_CONSTANT_BYTES = 1024  # bytes of a constant that shapes may depend on
_DATA_FILE_NAME = re.compile(r".+\.[0-9a-f]{8}\.data")


def save_graph(graph: Any, path: Path) -> None:
    """One file, or a data file beside it when it would be too large; the .onnx file comes last."""
    before = list_data_files(path)
    if sum(value.const_value.nbytes for value in graph.graph.initializers.values()) < MAX_SINGLE_FILE_BYTES:
        _save_single_file(graph, path)
        now = set()
    else:
        now = {_save_with_data_file(graph, path)}
    for name in before - now:
        (path.parent / name).unlink(missing_ok=True)


def list_files(path: Path) -> list[Path]:
    """The file, after the data files that were written with it."""
    return [*(path.parent / name for name in sorted(list_data_files(path))), path]


def list_data_files(path: Path) -> set[str]:
    """The data files of our making that a model refers to."""
    import onnx  # noqa: PLC0415  # only an export needs it

    if not any(map(_DATA_FILE_NAME.fullmatch, os.listdir(path.parent) if path.is_file() else ())):
        return set()  # without reading a model of any size
    try:
        tensors = onnx.load_from_string(read_bytes(path, LARGEST_PROTOBUF)).graph.initializer
    except Exception:  # nothing there, or no model: nothing of ours
        return set()
    locations = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return {name for name in locations if _DATA_FILE_NAME.fullmatch(name) and Path(name).name == name}


def _save_single_file(graph: Any, path: Path) -> None:
    """Checked with large weights as inputs: of those the checker reads type and shape, but copies all of them."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    initializers = graph.graph.initializers
    large = [value for value in initializers.values() if value.const_value.nbytes > MAX_CHECKED_CONSTANT_BYTES]
    for value in large:
        initializers.pop(value.name)
    proto = ir.serde.serialize_model(graph)
    count = len(proto.graph.input)
    typed = [ir.serde.serialize_value(value) for value in large]
    proto.graph.input.extend(typed)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the checker and shape inference have kinds of their own
        raise ExportError(f"the exported graph is not sound: {error}") from error
    del proto.graph.input[count:]
    proto.graph.value_info.extend(typed)
    for value in large:
        initializers.add(value)
    size = proto.ByteSize() + sum(value.const_value.nbytes for value in large)
    replace_file(path, lambda temporary: _write_bytes(temporary, proto, large), size)


def _save_with_data_file(graph: Any, path: Path) -> str:
    """Written and checked in a folder of its own; returns the name of the data file."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    folder = temporary_path(path)
    try:
        make_empty_folder(folder)
        ir.save(graph, folder / path.name, external_data="data")
        name = f"{path.stem}.{digest(folder / 'data')[:8]}.data"
        os.replace(folder / "data", folder / name)
        proto = onnx.load(folder / path.name, load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                entry.value = name if entry.key == "location" else entry.value
        (folder / path.name).write_bytes(proto.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(folder / path.name))
        os.replace(folder / name, path.parent / name)
        os.replace(folder / path.name, path)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the exported graph is not sound: {error}") from error
    except OSError as error:
        size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
        room = f". {describe_needed_space(folder, size)}" if is_disk_full(error) else ""
        reason = error.strerror or error
        raise StoreError(f"cannot write {path}: {reason}. What was there before is untouched{room}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return name


def _write_bytes(path: Path, proto: Any, large: Sequence[Any]) -> None:
    """The bytes of the model, large weights last of its initializers. They are written from where they lie: a protobuf
    message of hundreds of MB copies them three times."""
    room = _CopyBuffer()
    weights = [_InitializerBytes(value, room) for value in large]
    graph = type(proto.graph)()
    graph.CopyFrom(proto.graph)
    proto.ClearField("graph")
    before, after = _serialize_around(proto, "graph")
    start, end = _serialize_around(graph, "initializer")
    size = len(start) + sum(len(weight.head) + weight.size for weight in weights) + len(end)
    with path.open("wb") as file:
        file.write(before + _field_header(proto, "graph", size) + start)
        for weight in weights:
            file.write(weight.head)
            at = file.tell()
            weight.write(file)
            if file.tell() != at + weight.size:
                raise ExportError(f"{weight.name} has {file.tell() - at} bytes, its type and shape say {weight.size}")
        file.write(end + after)


class _CopyBuffer:
    """Memory in which one weight after the other is laid out that lies turned in the model."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, weight: Tensor) -> Any:
        if weight.nbytes > self._memory.nbytes:
            self._memory = torch.empty(weight.nbytes, dtype=torch.uint8)
        own = self._memory[: weight.nbytes]
        own.view(weight.dtype).view(weight.shape).copy_(weight)
        return own.numpy()


class _InitializerBytes:
    """An initializer as bytes: what stands before its values, and the values."""

    def __init__(self, value: Any, room: _CopyBuffer) -> None:
        import onnx  # noqa: PLC0415
        import onnx_ir as ir  # noqa: PLC0415

        tensor, self.name = value.const_value, value.name
        self.write: Callable[[Any], object]
        if not _is_plain_tensor(tensor):
            proto = ir.serde.serialize_tensor(tensor)
            proto.name = value.name
            data = proto.SerializeToString(deterministic=True)
            own, self.write, self.size = b"", lambda file: file.write(data), len(data)
        else:
            proto = onnx.TensorProto(name=value.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
            raw: Any = getattr(tensor, "raw", None)
            is_turned = isinstance(raw, Tensor) and raw.device.type == "cpu" and not raw.is_contiguous()
            self.write, self.size = tensor.tofile, tensor.nbytes
            if is_turned and raw.nbytes == self.size:
                self.write = lambda file: file.write(room(raw.detach()))
            own = proto.SerializeToString(deterministic=True) + _field_header(proto, "raw_data", self.size)
        self.head = _field_header(onnx.GraphProto, "initializer", len(own) + self.size) + own


def _is_plain_tensor(tensor: Any) -> bool:
    """Whether a tensor is its name, type, shape and values, and can write these."""
    import onnx_ir as ir  # noqa: PLC0415

    return isinstance(tensor, ir.Tensor | ir.PackedTensor) and not (tensor.doc_string or tensor.metadata_props)


def _serialize_around(message: Any, name: str) -> tuple[bytes, bytes]:
    """A message up to the end of a field, and what follows: fields are written in the order of their numbers."""
    rest = type(message)()
    rest.CopyFrom(message)
    number = message.DESCRIPTOR.fields_by_name[name].number
    for field in message.DESCRIPTOR.fields:
        (rest if field.number <= number else message).ClearField(field.name)
    return message.SerializeToString(deterministic=True), rest.SerializeToString(deterministic=True)


def _field_header(message: Any, name: str, size: int) -> bytes:
    """What stands before the bytes of a field: its number with its kind, and how many there are."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))
