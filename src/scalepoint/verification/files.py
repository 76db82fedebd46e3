"""Files of any format, by the runtime that reads them."""

from pathlib import Path

from scalepoint.errors import StoreError
from scalepoint.formats import About, FileFormat, find_format
from scalepoint.runtimes import Runtime


def existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():  # a package is a folder
        raise StoreError(f"{path} is not there")
    return path


def format_of(path: Path, runtime: Runtime) -> FileFormat:
    """Of what a runtime reads, what the file's name says; else the first."""
    known = [find_format(name) for name in runtime.formats]
    return next((each for each in known if each.suffix == path.suffix), known[0])


def about_file(path: str | Path, runtime: Runtime) -> About:
    """What a file says of itself."""
    path = existing(path)
    return format_of(path, runtime).about(path)
