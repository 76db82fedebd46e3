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

    try:
        tensors = onnx.load(path, load_external_data=False).graph.initializer
    except Exception:  # nothing there, or no model: nothing of ours
        return set()
    locations = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return {name for name in locations if _OWN.fullmatch(name) and Path(name).name == name}


def _save_whole(graph: Any, path: Path) -> None:
    import onnx  # noqa: PLC0415
    import onnx_ir as ir  # noqa: PLC0415

    proto = ir.serde.serialize_model(graph)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the checker and shape inference have kinds of their own
        raise ExportError(f"the exported graph is not sound: {error}") from error
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
