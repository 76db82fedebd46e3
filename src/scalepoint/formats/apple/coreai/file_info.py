"""Read inputs, quantizers and metadata of an .aimodel from its metadata.json, without its program."""

from pathlib import Path

from scalepoint.errors import StoreError
from scalepoint.formats.apple.coreai.package import HASH_FILE, PROGRAM_FILE, read_metadata
from scalepoint.formats.format import FileInfo, FileInput
from scalepoint.formats.metadata import read_description, read_target_options
from scalepoint.support.files import measure_size

DESCRIPTION_KEY = "scalepoint.description"


def list_files(path: Path) -> list[Path]:
    """Return the paths that belong to a package: the one folder."""
    return [path]


def read_info(path: Path) -> FileInfo:
    """Read inputs, quantizers, target options, metadata and the total size in bytes."""
    metadata = read_metadata(path)
    for name in (PROGRAM_FILE, HASH_FILE):
        if not (path / name).is_file():
            raise StoreError(f"{path} is not a complete Core AI package: it has no {name}")
    description = read_description(metadata.pop(DESCRIPTION_KEY, "{}"))
    return FileInfo(
        size=measure_size(path),
        inputs=tuple(FileInput(value.name, value.dtype, value.shape) for value in description.inputs),
        made_for=read_target_options(metadata),
        quantizers=description.quantizers,
        metadata=dict(sorted(metadata.items())),
    )
