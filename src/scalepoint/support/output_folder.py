"""What this library wrote into an output folder, and what it may do there.

    OUT/.scalepoint-files.json    size and sha256 of every file that was written there, by its path in the folder

A file is deleted only if the list has it and its content is still what was written. Every other file stays. Symbolic
links in the place of files or folders of ours are refused, as is an output that contains an input or lies inside one.
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
    """One file as it was written."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int
    sha256: str


class FileList(BaseModel):
    """The list as it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = 1
    files: dict[str, FileRecord] = {}


class WrittenFiles:
    """The files of ours in one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = _read(folder / LIST_FILE)

    def __contains__(self, name: str) -> bool:
        """Whether we wrote this file and it is unchanged."""
        record, path = self.records.get(name), self.folder / name
        if record is None or not _is_plain(self.folder, name):
            return False
        return path.stat().st_size == record.size and compute_digest(path) == record.sha256

    def add(self, paths: Iterable[Path], root: Path | None = None) -> list[str]:
        """Record files, and every file in folders, by their paths in `root`: the output folder, or one whose files
        are to be moved there. Returns these paths."""
        names = []
        for path in paths:
            inside = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
            for file in inside:
                name = file.relative_to(root or self.folder).as_posix()
                self.records[name] = FileRecord(size=file.stat().st_size, sha256=compute_digest(file))
                names.append(name)
        self._store()
        return names

    def remove_all_but(self, names: Iterable[str]) -> None:
        """Delete the files of earlier runs except these, and forget them. Files that were changed stay."""
        kept = set(names)
        for name in sorted(set(self.records) - kept):
            if name in self:
                path = self.folder / name
                path.unlink(missing_ok=True)
                with suppress(OSError):  # a folder that contains something else stays
                    for parent in PurePosixPath(name).parents[:-1]:
                        (self.folder / parent).rmdir()
            del self.records[name]
        self._store()

    def _store(self) -> None:
        found = FileList(files=dict(sorted(self.records.items())))
        replace_text(self.folder / LIST_FILE, json.dumps(found.model_dump(), indent=1) + "\n")


def move_into(source: Path, folder: Path) -> None:
    """Move all files of a folder of ours into an output folder, and delete what earlier runs wrote there.

    A new folder appears at once. In one that exists, each file is replaced as a whole, and other files stay.
    """
    if not folder.exists():
        WrittenFiles(source).add([source])
        try:
            os.replace(source, folder)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from error
        return
    written = WrittenFiles(folder)
    check_links(folder, [each.relative_to(source).as_posix() for each in source.rglob("*")])
    names = written.add([source], source)  # first: what is moved and not recorded would stay forever
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _move(source / name, folder / name)
    written.remove_all_but(names)
    remove_path(source)


def _move(source: Path, target: Path) -> None:
    """Rename a file, or copy it where the output folder is on another disk."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
        replace_file(target, lambda temporary: _copy(source, temporary), source.stat().st_size)
        source.unlink()


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def check_path(path: Path, what: str = "output") -> None:
    """Refuse a path that no file can have, or whose name no runtime can be given."""
    text = str(path)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(
            f"{what}={text!r} is no text in this locale's encoding, and runtimes open files by text: choose "
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
                "shorter one"
            ) from None


def check_inputs(output: Path, inputs: Mapping[str, Path]) -> None:
    """Refuse an output folder that is an input, contains one or lies inside one; inputs by what they are."""
    place = output.resolve()
    for what, given in inputs.items():
        path = given.resolve()
        if place == path:
            raise UsageError(f"{output} is the {what} itself: choose another output")
        if place in path.parents:
            raise UsageError(f"output {output} contains the {what} {given}: choose another output")
        if path in place.parents:
            raise UsageError(f"output {output} lies inside the {what} {given}: choose another output")


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse symbolic links in the place of these files and folders of ours, and in all of those folders."""
    for name in names:
        parts = PurePosixPath(name).parts
        above = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        below = (Path(place) / each for place, *found in os.walk(folder / name) for each in found[0] + found[1])
        for path in (*above, *below):
            if path.is_symlink():
                raise UsageError(f"{path} {LINK_MESSAGE}")


def _is_plain(folder: Path, name: str) -> bool:
    """Whether a name leads to a file in the folder, through no link."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return False
    places = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return places[-1].is_file() and not any(each.is_symlink() for each in places)


def _read(path: Path) -> dict[str, FileRecord]:
    """The list of a folder. A list that is damaged names nothing: then nothing is ours to delete."""
    try:
        return {} if path.is_symlink() else FileList.model_validate(read_json(path, MAX_LIST_BYTES)).files
    except (OSError, DocumentError, ValidationError):
        return {}
