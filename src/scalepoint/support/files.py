"""Atomic writes: files are written in a temporary folder next to the target, flushed to the disk, and renamed.

The temporary folder of NAME is .tmp-<pid>-NAME. If a process is killed, it stays, and `remove_leftovers` deletes it.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from scalepoint.errors import StoreError

IS_WINDOWS = os.name == "nt"
TEMPORARY_PREFIX = ".tmp-"
TEMPORARY_FOLDER_PREFIX = "scalepoint-"  # in the system's temporary folder
LOCK_FILE = ".lock"
MIN_AGE_SECONDS = 5.0  # a process locks its new temporary folder within this time
MAX_NAME_LENGTH = 200  # bytes; file systems allow 255, and a temporary name has a prefix
LINK_MESSAGE = (
    "is a symbolic link, and scalepoint does not write through links: remove it, or choose another output folder"
)
OLD_PREFIX = "old-"  # in the temporary name of a folder that is being replaced
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota of the user, limit of the process
_TEMPORARY_NAME = re.compile(r"\.tmp-\d+-(?P<rest>.+)", re.DOTALL)


def temporary_path(path: Path, kind: str = "") -> Path:
    """Return the path of the temporary folder for writing `path`."""
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{kind}{_shorten_name(path.name)}")


def _shorten_name(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= MAX_NAME_LENGTH else hashlib.sha256(encoded).hexdigest()


def replace_file(path: Path, write: Callable[[Path], object], size: int | None = None) -> None:
    """Write a file in a temporary folder, then replace `path` by it in one step.

    Args:
        path: The file.
        write: Writes the file to the path that it gets.
        size: Bytes of the file if known, for the error if the disk is full.
    """
    folder = temporary_path(path)
    temporary = folder / "file"
    try:
        with _explain_disk_errors(path, folder, size):
            make_empty_folder(folder)
            write(temporary)
            finish_file(temporary)
            os.replace(temporary, path)
        with suppress(OSError):  # the file is complete: flushing the rename only protects from a power cut
            _flush(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(path: Path, write: Callable[[Path], None], size: int | None = None) -> None:
    """Write a temporary folder next to `path`, then replace `path` by it.

    The old folder is moved away first, and moved back if the last step fails. Arguments as for `replace_file`.

    Raises:
        StoreError: The old folder contains names that the new one does not: they are not ours to delete.
    """
    temporary, old = temporary_path(path), temporary_path(path, OLD_PREFIX)
    try:
        with _explain_disk_errors(path, temporary, size):
            path.parent.mkdir(parents=True, exist_ok=True)
            make_empty_folder(temporary)
            write(temporary)
            for child in (*temporary.rglob("*"), temporary):
                _flush(child)
            _check_replaceable(path, {child.name for child in temporary.iterdir()})
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


def _check_replaceable(path: Path, names: set[str]) -> None:
    if path.is_symlink():
        raise StoreError(f"{path} {LINK_MESSAGE}")
    unknown = sorted(child.name for child in path.iterdir() if child.name not in names) if path.is_dir() else []
    if unknown:
        raise StoreError(
            f"{path} contains {unknown[0]!r}, which the new folder does not have: remove it, or write to another folder"
        )


def make_empty_folder(folder: Path) -> None:
    """Create an empty folder. A killed process with the same id may have left one with this name: delete it first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def finish_file(path: Path) -> None:
    """Flush a file in a temporary folder, and set the mode that the user's umask gives to a new file."""
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read
    _flush(path)


@contextmanager
def _explain_disk_errors(path: Path, temporary: Path, size: int | None) -> Iterator[None]:
    """Translate OSError to StoreError with the name of the file, and the needed space if the disk is full."""
    try:
        yield
    except OSError as error:
        needed_space = f". {describe_needed_space(temporary, size)}" if is_disk_full(error) else ""
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. The old content is unchanged{needed_space}"
        ) from error


def is_broken_pipe(error: OSError) -> bool:
    """Whether the reader of a pipe has closed it. Windows reports this as EINVAL."""
    return error.errno in (errno.EPIPE, errno.EINVAL)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error or its cause is about a full disk. safetensors has the number only in the text."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return True
    text, cause = str(error), error.__cause__
    if any(os.strerror(number) in text or f"(os error {number})" in text for number in DISK_FULL_ERRORS):
        return True
    return cause is not None and is_disk_full(cause)


def describe_needed_space(temporary: Path, size: int | None = None) -> str:
    """Describe how many bytes a write needs (at least, if `size` is not known) and how many are free."""
    written_bytes = measure_size(temporary)
    folder = next(path for path in (temporary, *temporary.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free + written_bytes
    at_least = "at least " if size is None or size < written_bytes else ""
    return f"It needs {at_least}{max(size or 0, written_bytes):,} bytes, the disk has {free:,} bytes for it"


def measure_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(child.lstat().st_size for child in path.rglob("*") if not child.is_dir())
    return path.stat().st_size if path.is_file() else 0


def copy_path(source: Path, target: Path) -> None:
    """Copy a file or a folder in one step. Uses hard links if the file system allows them."""
    if source.is_dir():
        replace_folder(target, lambda temporary: _copy_tree(source, temporary), measure_size(source))
    else:
        replace_file(target, lambda temporary: _link(source, temporary), measure_size(source))


def remove_path(path: Path) -> None:
    """Delete a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=lambda old, new: _link(Path(old), Path(new)))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def remove_leftovers(folder: Path, names: Iterable[str] | None = None) -> None:
    """Delete temporary folders and files of killed processes. The caller must hold the folder's lock.

    A folder that was moved away by `replace_folder` and not replaced yet is moved back.

    Args:
        folder: The folder.
        names: Names of the files that were being written. None for all names, only in a folder that only scalepoint
            writes to, because other programs use names like .tmp-* too.
    """
    names_by_short_name = None if names is None else {_shorten_name(name): name for name in names}
    for path in folder.iterdir():
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        target_name = match["rest"].removeprefix(OLD_PREFIX)
        if names_by_short_name is not None:
            if target_name not in names_by_short_name:
                continue
            target_name = names_by_short_name[target_name]
        target = folder / target_name
        if match["rest"].startswith(OLD_PREFIX) and path.is_dir() and not target.exists():
            os.replace(path, target)
        else:
            remove_path(path)


class TemporaryFolder:
    """A folder in the system's temporary folder, deleted on close.

    The process holds a lock in it. If the process is killed, the next process can take the lock and deletes the folder.
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY_FOLDER_PREFIX))
            self._lock = _lock_of(self.path)
            self._lock.acquire()
        except OSError as error:
            parent = tempfile.tempdir or os.environ.get("TMPDIR") or "the system's temporary folder"
            raise StoreError(
                f"cannot create a temporary folder in {parent}: {error.strerror or error}. Set TMPDIR to a folder that "
                "exists and can be written to"
            ) from error

    def close(self) -> None:
        self._lock.release()  # first: Windows does not delete an open file
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_leftover_folders() -> None:
    """Delete temporary folders of killed processes in the system's temporary folder."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_FOLDER_PREFIX}*"):
            with suppress(OSError):  # another process may delete it meanwhile
                _remove_if_left_over(path)


def _remove_if_left_over(path: Path) -> None:
    """Delete a temporary folder if its process does not exist any more, which its lock shows."""
    if path.is_symlink() or (hasattr(os, "geteuid") and path.stat().st_uid != os.geteuid()):
        return  # of another user; on Windows every user has a temporary folder of their own
    # A process locks its folder shortly after it is created: keep new folders.
    if time.time() - (path / LOCK_FILE).stat().st_mtime > MIN_AGE_SECONDS:
        with suppress(Timeout), _lock_of(path):
            shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    replace_file(path, lambda temporary: temporary.write_bytes(data), len(data))


def _flush(path: Path) -> None:
    """Flush a file, or the renames in a folder, to the disk, so that a power cut does not undo them."""
    if IS_WINDOWS and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDWR if IS_WINDOWS else os.O_RDONLY)  # Windows flushes only what can be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def compute_digest(path: Path) -> str:
    """Return the sha256 of a file; of a folder, the sha256 of the names and digests of all its files."""
    if path.is_dir():
        files = {child.relative_to(path).parts: child for child in path.rglob("*") if child.is_file()}
        lines = "".join(f"{'/'.join(parts)} {compute_digest(files[parts])}\n" for parts in sorted(files))
        return hashlib.sha256(lines.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def folder_locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Inside this context, other processes cannot lock this folder: they get a StoreError after `wait_seconds`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(folder).acquire(timeout=wait_seconds, blocking=wait_seconds > 0)
    except Timeout:
        message = f"another process is writing into {folder}: wait for it, or choose another folder"
        raise StoreError(message) from None
    except OSError as error:
        if error.errno == errno.ELOOP and (folder / LOCK_FILE).is_symlink():
            raise StoreError(f"{folder / LOCK_FILE} {LINK_MESSAGE}") from error
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    with lock:
        yield


def _lock_of(folder: Path) -> FileLock:
    """Return the lock of a folder. Acquiring it raises Timeout at once if another process or caller has it."""
    return FileLock(folder / LOCK_FILE, blocking=False, thread_local=False)
