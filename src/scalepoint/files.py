"""Files that are never half-written: a temporary one in the same folder, flushed to the disk, then renamed."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalepoint.errors import StoreError

TEMPORARY = ".tmp-"
LEFT = re.compile(r"\.tmp(-.*|\w{6})")  # ours, and those of safetensors, which writes under a name of its own first


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the file under a temporary name; then it replaces `path` in one step."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with _told(path):
            write(temporary)
            _flush(temporary)
            os.replace(temporary, path)
        with suppress(OSError):  # the file is there and whole; only a power cut now could take it back
            _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder under a temporary name beside `path`; then it stands there, whole.

    What stood there before is moved away first and put back when the last step fails.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    old = path.with_name(f"{TEMPORARY}{os.getpid()}-old-{path.name}")
    try:
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            write(temporary)
            for each in (*temporary.rglob("*"), temporary):
                _flush(each)
            if path.exists():
                os.replace(path, old)
            try:
                os.replace(temporary, path)
            except OSError:
                if old.exists():
                    os.replace(old, path)
                raise
        with suppress(OSError):
            _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """An error of the disk says what could not be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. What was there before is untouched"
        ) from error


def copy_whole(source: Path, target: Path) -> None:
    """A file or a folder under another name, which appears at once; where the disk allows it, the same bytes."""
    if source.is_dir():
        replace_folder(target, lambda made: _copy_tree(source, made))
    else:
        replace_file(target, lambda made: _link(source, made))


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=lambda one, other: _link(Path(one), Path(other)))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def sweep(folder: Path) -> None:
    """Take away what killed processes left; only while nobody else can write there."""
    for left in folder.iterdir():
        if LEFT.fullmatch(left.name) and left.is_file():
            left.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: _write_bytes(temporary, text.encode()))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flush(path: Path) -> None:
    """Without this a file, or a rename in a folder, may be lost when the power goes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """sha256 of a file, read in pieces; of a folder, that of the names and contents of all its files."""
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.is_file())
        told = "".join(f"{each.relative_to(path)} {digest(each)}\n" for each in inside)
        return hashlib.sha256(told.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process writes into a folder; a second one gets an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another process is writing into {folder}: wait for it, or choose another folder"
            raise StoreError(message) from None
        yield
    finally:
        os.close(handle)
