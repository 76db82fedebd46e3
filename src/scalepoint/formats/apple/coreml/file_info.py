"""Read inputs, quantizers and metadata of an .mlpackage, without its weights."""

from pathlib import Path
from typing import Any

from scalepoint.errors import StoreError
from scalepoint.formats.apple.coreml.package import read_spec
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import read_target_options

# MLMultiArrayDataType of Core ML
_DTYPES = {65568: "float32", 65552: "float16", 65600: "float64", 131104: "int32", 131080: "int8"}


def list_files(path: Path) -> list[Path]:
    """Return the paths that belong to a package: the one folder."""
    return [path]


def read_info(path: Path) -> FileInfo:
    """Read inputs, quantizers, target options, metadata and the total size in bytes."""
    spec = read_spec(path)
    metadata = dict(spec.description.metadata.userDefined)
    blocks = list(spec.mlProgram.functions["main"].block_specializations.values())
    if not blocks:
        raise StoreError(f"{path} is not a complete Core ML package: its program has no function 'main'")
    quantizers = [str(op.outputs[0].name) for op in blocks[0].operations if op.type == "quantize" and op.outputs]
    return FileInfo(
        size=sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()),
        inputs=tuple(map(_read_input, spec.description.input)),
        made_for=read_target_options(metadata),
        quantizers={name: name for name in quantizers},
        metadata=dict(sorted(metadata.items())),
    )


def _read_input(value: Any) -> FileInput:
    array_type = value.type.multiArrayType
    if array_type.dataType not in _DTYPES:
        raise StoreError(f"input {value.name!r} has the unknown MLMultiArray data type {array_type.dataType}")
    return FileInput(value.name, _DTYPES[array_type.dataType], tuple(array_type.shape))
