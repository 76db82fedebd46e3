"""What an .mlpackage says of itself, read without its weights."""

from pathlib import Path
from typing import Any

from scalepoint.errors import StoreError
from scalepoint.formats.apple.package import read_spec
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import read_target_options

_TYPES = {65568: "float32", 65552: "float16", 65600: "float64", 131104: "int32", 131080: "int8"}  # of MLMultiArray


def list_files(path: Path) -> list[Path]:
    """A package is one folder."""
    return [path]


def read_info(path: Path) -> FileInfo:
    """Its inputs, its quantizers, what it was made for; the size of all its files."""
    spec = read_spec(path)
    said = dict(spec.description.metadata.userDefined)
    blocks = list(spec.mlProgram.functions["main"].block_specializations.values())
    if not blocks:
        raise StoreError(f"{path} is only a part of a Core ML package: its program has no function 'main'")
    quantizers = {_read_name(op): _read_name(op) for op in blocks[0].operations if op.type == "quantize" and op.outputs}
    return FileInfo(
        size=sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink()),
        inputs=tuple(map(_read_input, spec.description.input)),
        made_for=read_target_options(said),
        quantizers=quantizers,
        metadata=dict(sorted(said.items())),
    )


def _read_name(op: Any) -> str:
    return str(op.outputs[0].name)


def _read_input(value: Any) -> FileInput:
    kind = value.type.multiArrayType
    if kind.dataType not in _TYPES:
        raise StoreError(f"input {value.name!r} is of a type that is not known here: {kind.dataType}")
    return FileInput(value.name, _TYPES[kind.dataType], tuple(kind.shape))
