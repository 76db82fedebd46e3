"""Files of any format, by the runtime that reads them."""

from pathlib import Path

from scalepoint.errors import StoreError, UsageError
from scalepoint.formats import FileFormat, FileInfo, find_format, list_formats
from scalepoint.runtimes import Runtime, find_runtime, list_runtimes


def check_exists(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():  # a package is a folder
        raise StoreError(f"{path} is not there")
    return path


def find_file_format(path: Path, runtime: Runtime) -> FileFormat:
    """Of what a runtime reads, what the file's name says; else the first."""
    known = [find_format(name) for name in runtime.formats]
    return next((each for each in known if each.suffix == path.suffix), known[0])


def find_runtime_for(path: str | Path) -> Runtime:
    """The first that reads files of this name."""
    suffix = Path(path).suffix
    found = [each for each in map(find_runtime, list_runtimes()) if suffix in _list_suffixes(each)]
    if not found:
        known = sorted({each for name in list_runtimes() for each in _list_suffixes(find_runtime(name))})
        raise UsageError(f"{Path(path).name}: no runtime reads it; files are {', '.join(known)}")
    return found[0]


def _list_suffixes(runtime: Runtime) -> list[str]:
    return [find_format(name).suffix for name in runtime.formats if name in list_formats()]


def read_file_info(path: str | Path, runtime: Runtime) -> FileInfo:
    """What a file says of itself."""
    path = check_exists(path)
    return find_file_format(path, runtime).about(path)
