"""Finds the format and the runtime of an exported file."""

from pathlib import Path

from scalepoint.errors import StoreError, UsageError
from scalepoint.formats import FileFormat, FileInfo, find_format, list_formats
from scalepoint.runtimes import Runtime, find_runtime, list_runtimes


def check_exists(path: str | Path) -> Path:
    """Return the path; raise StoreError if nothing exists there. A Core ML package is a folder."""
    path = Path(path)
    if not path.exists():
        raise StoreError(f"{path} does not exist: check the path")
    return path


def find_file_format(path: Path, runtime: Runtime) -> FileFormat:
    """Return the format of the runtime that has the suffix of the file; the runtime's first format by default."""
    formats = [find_format(name) for name in runtime.formats]
    return next((file_format for file_format in formats if file_format.suffix == path.suffix), formats[0])


def find_runtime_for(path: str | Path) -> Runtime:
    """Return the first runtime that reads files with this suffix."""
    suffix = Path(path).suffix
    runtimes = [find_runtime(name) for name in list_runtimes()]
    for runtime in runtimes:
        if suffix in _list_suffixes(runtime):
            return runtime
    suffixes = sorted({suffix for runtime in runtimes for suffix in _list_suffixes(runtime)})
    raise UsageError(f"{Path(path).name}: no runtime reads this kind of file: use one of {', '.join(suffixes)}")


def _list_suffixes(runtime: Runtime) -> list[str]:
    return [find_format(name).suffix for name in runtime.formats if name in list_formats()]


def read_file_info(path: str | Path, runtime: Runtime) -> FileInfo:
    """Read the inputs, size, quantizers and origin of a file."""
    path = check_exists(path)
    return find_file_format(path, runtime).about(path)
