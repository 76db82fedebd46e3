"""What a run has done so far, in OUT/.scalepoint: every stage's result with the marks of what it was made from.

    journal.json    stage -> marks, result, sha256 of its files; replaced whole after every stage
    trial-0/ ..     the files of each trial

A stage is taken from the journal when all its marks are as they were and its files are whole; otherwise what changed is
named in a warning, and the stage is done again.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from scalepoint.documents import parse_json
from scalepoint.errors import DocumentError, ScalepointWarning
from scalepoint.files import digest, locked, replace_text
from scalepoint.plain import plain

FOLDER = ".scalepoint"
FILE = "journal.json"
FORMAT = 1
LARGEST = 64_000_000
# what an earlier stage made: that it changed is a consequence, and needs no word
DERIVED = frozenset(("the quantized model", "the file", "the float file", "the files", "the drop"))

Marks = Mapping[str, str | None]


class Entry(BaseModel):
    """One finished stage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    marks: dict[str, str | None]
    result: dict[str, Any]
    files: dict[str, str]


class Pages(BaseModel):
    """The journal as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = FORMAT
    stages: dict[str, Entry] = {}


class Journal:
    """The finished stages of a run into one output folder."""

    def __init__(self, output: Path, pages: Pages) -> None:
        self.folder = output / FOLDER
        self._pages = pages

    @classmethod
    @contextmanager
    def opened(cls, output: Path, *, resume: bool) -> Iterator[Self]:
        """The journal of a folder, anew unless resumed, for one process at a time. It goes when the run ends well; of a
        run that fails before its first stage ended nothing stays."""
        folder = output / FOLDER
        existed = output.exists()
        with locked(folder):
            journal = cls(output, _read(folder / FILE) if resume else Pages())
            if not journal._pages.stages:
                _empty(folder)
            try:
                yield journal
            except BaseException:
                if not journal._pages.stages:
                    shutil.rmtree(folder, ignore_errors=True)
                    if not existed:
                        shutil.rmtree(output, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)

    def has(self, stage: str) -> bool:
        return stage in self._pages.stages

    def find(self, stage: str, marks: Marks) -> dict[str, Any] | None:
        """What a stage gave, or None when it has to be done (again)."""
        entry = self._pages.stages.get(stage)
        if entry is None:
            return None
        names = dict.fromkeys([*marks, *entry.marks])
        changed = [name for name in names if name not in marks or marks[name] is None or _differs(name, marks, entry)]
        if changed:
            named = [name for name in changed if name not in DERIVED]
            if named:
                _warn(f"{stage}: {', '.join(named)} changed since it was saved: done again")
            return None
        broken = [name for name, sha256 in entry.files.items() if not _is_whole(self.folder / name, sha256)]
        if broken:
            _warn(f"{stage}: {', '.join(broken)} in {self.folder} is missing or damaged: done again")
            return None
        return entry.result

    def keep(self, stage: str, marks: Marks, result: Mapping[str, Any], files: Sequence[Path] = ()) -> None:
        """A stage is finished."""
        names = {str(path.relative_to(self.folder)): digest(path) for path in files}
        self._pages.stages[stage] = Entry(marks=dict(marks), result=plain(result), files=names)
        replace_text(self.folder / FILE, json.dumps(self._pages.model_dump(), indent=1) + "\n")

    def drop(self, stage: str, why: object) -> None:
        """What was saved of a stage cannot be used."""
        self._pages.stages.pop(stage, None)
        _warn(f"{stage}: what was saved cannot be used ({why}): done again")


def stages_in(output: Path) -> list[str]:
    """The finished stages of an unfinished run, in order."""
    path = output / FOLDER / FILE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_read(path).stages) if path.is_file() else []


def _differs(name: str, marks: Marks, entry: Entry) -> bool:
    return name not in entry.marks or marks[name] != entry.marks[name]


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and digest(path) == sha256


def _read(path: Path) -> Pages:
    if not path.is_file():
        _warn(f"{path.parent} holds no unfinished run: nothing to resume, starting from the beginning")
        return Pages()
    try:
        found = Pages.model_validate(parse_json(path.read_text(), LARGEST))
    except (OSError, UnicodeDecodeError, DocumentError, ValidationError) as error:
        reason = error.args[0] if isinstance(error, DocumentError) else str(error).splitlines()[0]
        _warn(f"{path} is damaged ({reason}): starting from the beginning")
        return Pages()
    if found.format != FORMAT:
        _warn(f"{path} has format {found.format}, this scalepoint reads {FORMAT}: starting from the beginning")
        return Pages()
    return found


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=2)
