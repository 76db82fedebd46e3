"""Reads untrusted files: downloaded checkpoints, reports, configs, model files.

    regular file  ->  inside its folder  ->  size  ->  read at most `limit` bytes  ->  UTF-8  ->  JSON or YAML

Each check comes before the work it protects: a FIFO would block, `/dev/zero` never ends, and a sparse file of 5 GB
takes no space on the disk and all of the memory. No other module opens such a file:
`tests/support/test_untrusted.py` checks the source.

A missing or unreadable file raises OSError, as `open` does; everything else raises DocumentError.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scalepoint.errors import DocumentError, short_repr

MAX_BYTES = 1_000_000  # of a text
# O_BINARY exists on Windows only, where text mode would change line ends; the other two exist everywhere else.
OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
LARGEST_PROTOBUF = 2**31 - 1  # bytes
LARGEST_FLATBUFFER = 2**31 - 1  # bytes: offsets are signed 32-bit integers


def check_file(path: Path, limit: int | None = None, *, folder: Path | None = None) -> int:
    """Check a file that a library opens by itself (safetensors, numpy, torch).

    Args:
        path: The file.
        limit: Largest size in bytes; None for any size.
        folder: The folder that the file must be in once links are followed; None if the user named the file itself.

    Returns:
        The size of the file in bytes.
    """
    try:
        status = os.stat(path)
    except ValueError as error:  # a NUL in the name
        raise DocumentError(f"{short_repr(str(path))} is not the name of a file: {error}") from error
    _check_status(path, status, limit)
    if folder is not None:
        _check_inside(path, folder)
    return status.st_size


def read_bytes(path: Path, limit: int, *, folder: Path | None = None) -> bytes:
    """Read a file of at most `limit` bytes; arguments as for `check_file`."""
    check_file(path, limit, folder=folder)
    with _opened(path, limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # it grew while it was read
        raise DocumentError(f"{path} cannot be read: it has more than {limit} bytes")
    return data


def read_head(path: Path, count: int) -> bytes:
    """Read the first `count` bytes of a file of any size."""
    check_file(path)
    with _opened(path, limit=None) as file:
        return file.read(count)


def read_part(path: Path, offset: int, length: int, *, folder: Path | None = None) -> bytes:
    """Read `length` bytes at `offset`. A shorter file is an error before anything is read."""
    size = check_file(path, folder=folder)
    if not (offset >= 0 and length >= 0 and offset + length <= size):
        raise DocumentError(f"{path} cannot be read: it has no bytes {offset} to {offset + length}, only {size}")
    with _opened(path, limit=None) as file:
        file.seek(offset)
        return file.read(length)


def read_text(path: Path, limit: int = MAX_BYTES, *, folder: Path | None = None) -> str:
    """Read a UTF-8 text of at most `limit` bytes (default 1 MB)."""
    try:
        return read_bytes(path, limit, folder=folder).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} cannot be read: it is not UTF-8 text: {error}") from error


def read_json(path: Path, limit: int = MAX_BYTES, *, folder: Path | None = None) -> Any:
    """Read a JSON file of at most `limit` bytes (default 1 MB)."""
    from scalepoint.support.documents import parse_json  # noqa: PLC0415  # imports yaml

    text = read_text(path, limit, folder=folder)
    with _path_in_errors(path):
        return parse_json(text, limit)


def read_yaml(path: Path, *, folder: Path | None = None) -> Any:
    """Read a YAML file of at most 1 MB."""
    from scalepoint.support.documents import parse_yaml  # noqa: PLC0415  # see read_json

    text = read_text(path, folder=folder)
    with _path_in_errors(path):
        return parse_yaml(text)


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text of any size, for a reader that stops by itself."""
    check_file(path)
    with _opened(path, limit=None) as file, open(file.fileno(), encoding="utf-8", closefd=False) as text:
        yield text


@contextmanager
def open_tensors(path: Path, *, folder: Path | None = None, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file; safetensors checks its length against its header. `framework` is "pt" or "np"."""
    from safetensors import safe_open  # noqa: PLC0415  # loads numpy

    check_file(path, folder=folder)
    with safe_open(path, framework=framework) as file:
        yield file


def file_in(folder: Path, name: str) -> Path:
    """Join a folder and a relative name from one of its files. A name outside of the folder is an error."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ".." in parts or Path(name).is_absolute() or ":" in parts[0]:
        raise DocumentError(f"{short_repr(name)} is not the name of a file in {folder}")
    path = folder / name
    if os.path.lexists(path):
        _check_inside(path, folder)
    return path


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Inside this context, a DocumentError gets the path of the file."""
    try:
        yield
    except DocumentError as error:
        raise DocumentError(f"{path} cannot be read: {error.args[0]}") from error


@contextmanager
def _opened(path: Path, limit: int | None) -> Iterator[IO[bytes]]:
    # The file may have been replaced since check_file: opening a FIFO without O_NONBLOCK would wait for a writer.
    with os.fdopen(os.open(path, OPEN_FLAGS), "rb") as file:
        _check_status(path, os.fstat(file.fileno()), limit)
        yield file


def _check_status(path: Path, status: os.stat_result, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise DocumentError(f"{path} cannot be read: it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise DocumentError(f"{path} cannot be read: it is a pipe, a device or a socket. Copy it into a regular file")
    if limit is not None and status.st_size > limit:
        raise DocumentError(f"{path} cannot be read: it has {status.st_size} bytes, at most {limit} are allowed")


def _check_inside(path: Path, folder: Path) -> None:
    # Path.resolve raises RuntimeError for a loop of links
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    # The cache of huggingface_hub: models--x/snapshots/<revision>/config.json links to models--x/blobs/<hash>
    blobs = [above.parent.parent / "blobs" for above in (home, *home.parents) if above.parent.name == "snapshots"]
    if not real.is_relative_to(home) and real.parent not in blobs:
        raise DocumentError(f"{path} cannot be read: it is a link to {real}, outside of {folder}. Copy the file there")
