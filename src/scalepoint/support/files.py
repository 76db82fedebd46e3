"""Files that are never half-written: written in a temporary folder next to the target, flushed to the disk, renamed.

The temporary folder of NAME is .tmp-<pid>-NAME. A killed process leaves it behind; `sweep` deletes it by that name.
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

TEMPORARY_PREFIX = ".tmp-"
TEMPORARY_FOLDER_PREFIX = "scalepoint-"  # of folders in the system's temporary folder
LOCK_FILE = ".lock"
MIN_AGE_SECONDS = 5.0  # seconds in which a process takes the lock of a folder that it has made
MAX_NAME_LENGTH = 200  # bytes of a name in the name of its temporary folder; file systems allow 255
LINK_MESSAGE = (
    "is a symbolic link, and scalepoint writes through none: remove the link, or choose another output folder"
)
OLD_PREFIX = "old-"  # before the name of a folder that was moved away while its successor takes its place
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the limit of the process
_TEMPORARY_NAME = re.compile(r"\.tmp-\d+-(?P<rest>.+)", re.DOTALL)


def temporary_path(path: Path, kind: str = "") -> Path:
    """The name that stands for `path` while it is written."""
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{kind}{_shorten_name(path.name)}")


def _shorten_name(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= MAX_NAME_LENGTH else hashlib.sha256(encoded).hexdigest()


def replace_file(path: Path, write: Callable[[Path], None], size: int | None = None) -> None:
    """Let `write` make the file in a temporary folder; then it replaces `path` in one step.

    `size` is the number of bytes that the file will have, if it is known: an error of a full disk tells it.
    """
    folder = temporary_path(path)
    temporary = folder / "file"
    try:
        with _explain_disk_errors(path, folder, size):
            make_empty_folder(folder)
            write(temporary)
            finish_file(temporary)
            os.replace(temporary, path)
        with suppress(OSError):  # the file is there and whole; only a power cut now could take it back
            _flush(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(path: Path, write: Callable[[Path], None], size: int | None = None) -> None:
    """Let `write` fill a temporary folder next to `path`; then it replaces `path`, whole.

    The old folder is moved away first and put back if the last step fails. A folder that contains other names than
    the new one is not replaced: those files are not ours.
    """
    temporary, old = temporary_path(path), temporary_path(path, OLD_PREFIX)
    try:
        with _explain_disk_errors(path, temporary, size):
            path.parent.mkdir(parents=True, exist_ok=True)
            make_empty_folder(temporary)
            write(temporary)
            for each in (*temporary.rglob("*"), temporary):
                _flush(each)
            _check_replaceable(path, {each.name for each in temporary.iterdir()})
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
    others = sorted(each.name for each in path.iterdir() if each.name not in names) if path.is_dir() else []
    if others:
        raise StoreError(
            f"{path} contains {others[0]!r}, which the new folder does not have: remove it, or write to another folder"
        )


def make_empty_folder(folder: Path) -> None:
    """Make an empty folder. A killed process with the same id may have left one of this name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def finish_file(path: Path) -> None:
    """Flush a file in a temporary folder of ours, and give it the mode that the user's umask gives to a new file."""
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
    _flush(path)


@contextmanager
def _explain_disk_errors(path: Path, temporary: Path, size: int | None) -> Iterator[None]:
    """Turn an error of the disk into one that names the file, and what a full disk would need."""
    try:
        yield
    except OSError as error:
        room = f". {describe_needed_space(temporary, size)}" if is_disk_full(error) else ""
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. What was there before is untouched{room}"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or its cause, says that the disk is full, also as safetensors words it."""
    text, cause = str(error), error.__cause__
    is_told = any(os.strerror(number) in text or f"(os error {number})" in text for number in DISK_FULL_ERRORS)
    return (
        is_told
        or (isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS)
        or (cause is not None and is_disk_full(cause))
    )


def describe_needed_space(temporary: Path, size: int | None = None) -> str:
    """How many bytes a write needs (at least, if `size` is not known) and how many its disk has for it."""
    written = measure_size(temporary)
    folder = next(each for each in (temporary, *temporary.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free + written
    least = "at least " if size is None or size < written else ""
    return f"It needs {least}{max(size or 0, written):,} bytes, the disk has {free:,} bytes for it"


def measure_size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(each.lstat().st_size for each in path.rglob("*") if not each.is_dir())
    return path.stat().st_size if path.is_file() else 0


def copy_path(source: Path, target: Path) -> None:
    """A file or a folder under another name, which appears at once; where the disk allows it, the same bytes."""
    if source.is_dir():
        replace_folder(target, lambda made: _copy_tree(source, made), measure_size(source))
    else:
        replace_file(target, lambda made: _link(source, made), measure_size(source))


def remove_path(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
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


def remove_leftovers(folder: Path, names: Iterable[str] | None = None) -> None:
    """Delete the temporary folders and files that killed processes left for these names.

    The caller must hold the folder's lock. Other programs have files called .tmp-* too: only in a folder that is
    ours alone `names` may be None, for all names. A folder that was moved away and not yet replaced is put back.
    """
    known = None if names is None else {_shorten_name(name): name for name in names}
    for left in folder.iterdir():
        found = _TEMPORARY_NAME.fullmatch(left.name)
        if found is None or left.is_symlink() or (known is not None and _target_name(found["rest"]) not in known):
            continue
        place = folder / (_target_name(found["rest"]) if known is None else known[_target_name(found["rest"])])
        if found["rest"].startswith(OLD_PREFIX) and left.is_dir() and not place.exists():
            os.replace(left, place)
        else:
            remove_path(left)


def _target_name(rest: str) -> str:
    return rest.removeprefix(OLD_PREFIX)


class TemporaryFolder:
    """A folder in the system's temporary folder, deleted on close.

    The process holds a lock in it. When a process was killed, the next one can take the lock and deletes the folder.
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY_FOLDER_PREFIX))
            self._lock = _lock_of(self.path)
            self._lock.acquire()
        except OSError as error:
            where = os.environ.get("TMPDIR") or tempfile.tempdir or "the system's temporary folder"
            raise StoreError(
                f"cannot make a temporary folder in {where}: {error.strerror or error}. Set TMPDIR to a folder that "
                "exists and can be written to"
            ) from error

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_leftover_folders() -> None:
    """Delete temporary folders of ours whose processes were killed."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_FOLDER_PREFIX}*"):
            with suppress(OSError):
                if path.is_symlink() or path.stat().st_uid != os.geteuid():
                    continue
                # The lock of a folder is taken a moment after the folder is made: leave young ones to the next sweep.
                if time.time() - (path / LOCK_FILE).stat().st_mtime > MIN_AGE_SECONDS:
                    with suppress(Timeout), _lock_of(path):
                        shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    replace_file(path, lambda temporary: _write_bytes(temporary, data), len(data))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flush(path: Path) -> None:
    """Without this a file, or a rename in a folder, may be lost when the power goes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def compute_digest(path: Path) -> str:
    """sha256 of a file, read in pieces; of a folder, that of the names and contents of all its files."""
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.is_file())
        told = "".join(f"{each.relative_to(path)} {compute_digest(each)}\n" for each in inside)
        return hashlib.sha256(told.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Only one process writes into a folder; a second one gets an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(folder).acquire()
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
    """The lock of a folder. Taking it raises Timeout at once if another process, or another caller here, has it."""
    return FileLock(folder / LOCK_FILE, blocking=False, thread_local=False)
