"""Records which files scalepoint wrote into an output folder, so that it deletes only these.

    OUT/.scalepoint-files.json    size and sha256 of every file that scalepoint wrote, by its path in the folder

A file is deleted only if it is in the list and unchanged. Symbolic links with the name of one of our files or folders
are an error, and so is an output that contains an input or lies inside one.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, ValidationError

from scalepoint.errors import DocumentError, StoreError, UsageError, short_repr
from scalepoint.support.files import LINK_MESSAGE, compute_digest, remove_path, replace_file, replace_text
from scalepoint.support.untrusted import read_json

LIST_FILE = ".scalepoint-files.json"
MAX_LIST_BYTES = 64_000_000


class FileRecord(BaseModel):
    """Size and digest of a file when it was written."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int
    sha256: str


class FileList(BaseModel):
    """The content of `.scalepoint-files.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = 1
    files: dict[str, FileRecord] = {}


class WrittenFiles:
    """The files that scalepoint wrote into an output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = _read(folder / LIST_FILE)

    def __contains__(self, name: str) -> bool:
        """Whether scalepoint wrote this file and it is unchanged."""
        record, path = self.records.get(name), self.folder / name
        if record is None or not _is_file_inside(self.folder, name):
            return False
        return path.stat().st_size == record.size and compute_digest(path) == record.sha256

    def add(self, paths: Iterable[Path], root: Path | None = None) -> list[str]:
        """Record files, and all files in folders.

        Args:
            paths: Files and folders.
            root: The folder that names are relative to, if the files will be moved to the output folder later.

        Returns:
            The names of the files.
        """
        names = []
        for path in paths:
            files = sorted(child for child in path.rglob("*") if child.is_file()) if path.is_dir() else [path]
            for file in files:
                name = file.relative_to(root or self.folder).as_posix()
                self.records[name] = FileRecord(size=file.stat().st_size, sha256=compute_digest(file))
                names.append(name)
        self._store()
        return names

    def remove_all_but(self, names: Iterable[str]) -> None:
        """Delete the recorded files except these, and their records. Files that were changed stay."""
        kept_names = set(names)
        for name in sorted(set(self.records) - kept_names):
            if name in self:
                path = self.folder / name
                path.unlink(missing_ok=True)
                with suppress(OSError):  # the folder is not empty
                    for parent in PurePosixPath(name).parents[:-1]:
                        (self.folder / parent).rmdir()
            del self.records[name]
        self._store()

    def _store(self) -> None:
        file_list = FileList(files=dict(sorted(self.records.items())))
        replace_text(self.folder / LIST_FILE, json.dumps(file_list.model_dump(), indent=1) + "\n")


def move_into(source: Path, folder: Path) -> None:
    """Move all files of a temporary folder into an output folder, and delete the files of earlier runs there.

    A new output folder appears in one step. In an existing one each file is replaced in one step, and files of others
    stay.
    """
    if not folder.exists():
        WrittenFiles(source).add([source])
        try:
            os.replace(source, folder)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from error
        return
    written_files = WrittenFiles(folder)
    check_links(folder, [child.relative_to(source).as_posix() for child in source.rglob("*")])
    names = written_files.add([source], source)  # before the move: a file without a record is never deleted
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _move(source / name, folder / name)
    written_files.remove_all_but(names)
    remove_path(source)


def _move(source: Path, target: Path) -> None:
    """Rename a file, or copy it if the output folder is on another disk."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
        replace_file(target, lambda temporary: shutil.copyfile(source, temporary), source.stat().st_size)
        source.unlink()


def check_path(path: Path, what: str = "output") -> None:
    """Raise UsageError for a path that a file cannot have, or that cannot be passed to a runtime."""
    text = str(path)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(
            f"{what}={text!r} cannot be encoded as text in this locale, and runtimes open files by text: choose "
            "another name, or run with PYTHONUTF8=1"
        )
    try:
        path.lstat()
    except ValueError:
        raise UsageError(f"{what}={short_repr(text)} contains a NUL character: choose another name") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            longest = max(len(os.fsencode(part)) for part in path.parts)
            raise UsageError(
                f"{what}={short_repr(text)} is too long for this file system (a name of {longest} bytes): choose a "
                "shorter name"
            ) from None


def check_inputs(output: Path, inputs: Mapping[str, Path]) -> None:
    """Raise UsageError if the output folder is an input, contains an input or lies inside one.

    Args:
        output: The output folder.
        inputs: Description of each input, such as "checkpoint" -> its path.
    """
    resolved_output = output.resolve()
    for what, path in inputs.items():
        resolved_path = path.resolve()
        if resolved_output == resolved_path:
            raise UsageError(f"{output} is the {what} itself: choose another output")
        if resolved_output in resolved_path.parents:
            raise UsageError(f"output {output} contains the {what} {path}: choose another output")
        if resolved_path in resolved_output.parents:
            raise UsageError(f"output {output} lies inside the {what} {path}: choose another output")


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Raise UsageError if one of these names, a folder above it, or anything below it is a symbolic link."""
    for name in names:
        parts = PurePosixPath(name).parts
        above = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        below = (
            Path(parent) / child
            for parent, folder_names, file_names in os.walk(folder / name)
            for child in folder_names + file_names
        )
        for path in (*above, *below):
            if path.is_symlink():
                raise UsageError(f"{path} {LINK_MESSAGE}")


def _is_file_inside(folder: Path, name: str) -> bool:
    """Whether a name is that of a file inside the folder, without symbolic links."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return False
    paths = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return paths[-1].is_file() and not any(path.is_symlink() for path in paths)


def _read(path: Path) -> dict[str, FileRecord]:
    """Read the list of a folder. A damaged list is empty: then nothing is deleted."""
    try:
        return {} if path.is_symlink() else FileList.model_validate(read_json(path, MAX_LIST_BYTES)).files
    except (OSError, DocumentError, ValidationError):
        return {}
