"""Writing an ONNX file at once: whole or not at all, with its weights in a data file beside it where they are large.

The data file is named after what it holds, so that an old model keeps its own until the new one is in its place.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from scalepoint.errors import ExportError, StoreError
from scalepoint.files import TEMPORARY, digest, replace_file

LARGEST_IN_ONE_FILE = 1_900_000_000  # protobuf stops at 2 GB
LARGEST_IN_CHECK = 1024  # bytes of a constant that shapes may depend on
_OWN = re.compile(r".+\.[0-9a-f]{8}\.data")


def save_graph(graph: Any, path: Path) -> None:
    """One file, or a data file beside it when it would be too large; the .onnx file comes last."""
    before = data_files(path)
    if sum(value.const_value.nbytes for value in graph.graph.initializers.values()) < LARGEST_IN_ONE_FILE:
        _save_whole(graph, path)
        now = set()
    else:
        now = {_save_in_two(graph, path)}
    for name in before - now:
        (path.parent / name).unlink(missing_ok=True)


def files_of(path: Path) -> list[Path]:
    """The file, after the data files that were written with it."""
    return [*(path.parent / name for name in sorted(data_files(path))), path]


def data_files(path: Path) -> set[str]:
    """The data files of our making that a model refers to."""
    import onnx  # noqa: PLC0415  # only an export needs it

    if not any(map(_OWN.fullmatch, os.listdir(path.parent) if path.is_file() else ())):
        return set()  # without reading a model of any size
    try:
        tensors = onnx.load(path, load_external_data=False).graph.initializer
    except Exception:  # nothing there, or no model: nothing of ours
        return set()
    locations = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return {name for name in locations if _OWN.fullmatch(name) and Path(name).name == name}


def _save_whole(graph: Any, path: Path) -> None:
    """Checked with large weights as inputs: of those the checker reads type and shape, but copies all of them."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    initializers = graph.graph.initializers
    large = [value for value in initializers.values() if value.const_value.nbytes > LARGEST_IN_CHECK]
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
        stored = proto.graph.initializer.add()
        ir.serde.serialize_tensor_into(stored, value.const_value)
        stored.name = value.name
    data = proto.SerializeToString(deterministic=True)
    replace_file(path, lambda temporary: _put(temporary, data))


def _save_in_two(graph: Any, path: Path) -> str:
    """Written and checked in a folder of its own; returns the name of the data file."""
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    folder = path.parent / f"{TEMPORARY}{os.getpid()}-{path.stem}"
    try:
        folder.mkdir(exist_ok=True)
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
        reason = error.strerror or error
        raise StoreError(f"cannot write {path}: {reason}. What was there before is untouched") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return name


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
