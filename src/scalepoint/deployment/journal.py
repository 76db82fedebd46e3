"""What a run has done so far, in OUT/.scalepoint: every stage's result with the marks of what it was made from.

    journal.json    stage -> marks, result, sha256 of its files; replaced whole after every stage
    trial-0/ ..     the files of each trial

    with journal.stage("trial-0 exported", marks) as stage:
        if stage.is_due:
            export(...)
            stage.keep(files=[path])

Of several ranks the first has the journal; the others do as it is told there, and a stage ends on all of them together.
A stage is taken from the journal when all its marks are as they were and its files are whole; otherwise what changed is
named in a warning, and the stage is due again. What is kept is written when the stage ends well.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from scalepoint import ranks
from scalepoint.errors import DocumentError, ScalepointError, ScalepointWarning, StoreError, UsageError
from scalepoint.files import LOCK, TEMPORARY, digest, is_full, locked, remove, replace_text, sweep
from scalepoint.interrupts import check_interrupt
from scalepoint.output_folder import LIST, check_links, check_path
from scalepoint.plain import plain
from scalepoint.untrusted import read_json

FOLDER = ".scalepoint"
FILE = "journal.json"
FORMAT = 1
LARGEST = 64_000_000
_OURS = re.compile(
    r"journal\.json|log\.txt|trial-\d+|float(_plain)?(\..*)?|inputs\.safetensors"
)  # in the folder of a run
# what an earlier stage made: that it changed is a consequence, and needs no word
DERIVED = frozenset(
    ("the quantized model", "the file", "the float file", "the plain export", "the baseline", "the files", "the drop")
)

Marks = Mapping[str, str | None]
T = TypeVar("T")


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


class Stage:
    """One stage of a run: due, or `saved` by the run that is resumed."""

    def __init__(self, name: str, marks: Marks, saved: dict[str, Any] | None) -> None:
        self.name, self.marks, self.saved = name, dict(marks), saved
        self.kept: tuple[Mapping[str, Any], Sequence[Path]] | None = None

    @property
    def is_due(self) -> bool:
        return self.saved is None

    def reuse(self, read: Callable[[dict[str, Any]], T]) -> T | None:
        """What was saved, as `read` makes it; None when the stage is due, also because it cannot be read."""
        if self.saved is None:
            return None
        with ranks.agreed(self.name) as told:
            try:
                value, told.mine = read(self.saved), ""
            except (ScalepointError, ValidationError) as error:
                value, told.mine = None, str(error).splitlines()[0]
        why = next(filter(None, told.all), "")
        if why:
            self.saved = None
            _warn(f"{self.name}: what was saved cannot be used ({why}): done again")
        return None if why else value

    def keep(self, result: Mapping[str, Any] | None = None, files: Sequence[Path] = ()) -> None:
        """What the stage gave, and the files that it made."""
        self.kept = (result or {}, files)


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
        if not ranks.is_main():
            yield cls(output, Pages())
            return
        existed = output.exists()
        with locked(folder):
            _sweep(folder)
            journal = cls(output, _read(folder / FILE) if resume else Pages())
            if not journal._pages.stages:
                _empty(folder)
            try:
                yield journal
            except BaseException as error:
                if not journal._pages.stages:
                    _remove(folder)
                    if not existed:
                        with suppress(OSError):  # what a metric of the user wrote there stays
                            output.rmdir()
                elif isinstance(error, StoreError) and is_full(error):
                    raise StoreError(
                        f"{error.args[0]}; finished stages are kept, resume=True goes on from them"
                    ) from error
                raise
            _remove(folder)

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

    @contextmanager
    def stage(self, name: str, marks: Marks) -> Iterator[Stage]:
        """A stage with what is known of it; what it keeps is written down when it ends well."""
        check_interrupt()
        stage = Stage(name, marks, ranks.told(name, lambda: self.find(name, marks)))
        with ranks.agreed(name):
            yield stage
        if stage.kept is not None and ranks.is_main():
            self._keep(name, stage.marks, *stage.kept)

    def _keep(self, stage: str, marks: Marks, result: Mapping[str, Any], files: Sequence[Path]) -> None:
        names = {str(path.relative_to(self.folder)): digest(path) for path in files}
        self._pages.stages[stage] = Entry(marks=dict(marks), result=plain(result), files=names)
        replace_text(self.folder / FILE, json.dumps(self._pages.model_dump(), indent=1) + "\n")


def check_output(folder: Path, *, force: bool, resume: bool, names: Iterable[str] = ()) -> None:
    """Refuse a folder that contains something, unless files there may be overwritten or an unfinished run goes on.

    `names` are the files and folders that will be written there: symbolic links in their places are refused.
    """
    check_path(folder)
    check_links(folder, (FOLDER, LIST, *names))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output={str(folder)!r} is a file: give a folder")
    if force or resume or not folder.exists():
        return
    if stages_in(folder):
        raise UsageError(f"{folder} holds an unfinished run: go on with resume=True, or anew with force=True")
    if any(path.name != FOLDER for path in folder.iterdir()):
        raise UsageError(f"{folder} is not empty: choose another output=, or overwrite it with force=True")


def stages_in(output: Path) -> list[str]:
    """The finished stages of an unfinished run, in order."""
    path = output / FOLDER / FILE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_read(path).stages) if path.is_file() else []


def _differs(name: str, marks: Marks, entry: Entry) -> bool:
    return name not in entry.marks or marks[name] != entry.marks[name]


def _is_whole(path: Path, sha256: str) -> bool:
    return path.exists() and digest(path) == sha256


def _read(path: Path) -> Pages:
    if not path.is_file():
        _warn(f"{path.parent} holds no unfinished run: nothing to resume, starting from the beginning")
        return Pages()
    try:
        found = Pages.model_validate(read_json(path, LARGEST, folder=path.parent))
    except (OSError, DocumentError, ValidationError) as error:
        reason = error.args[0] if isinstance(error, DocumentError) else str(error).splitlines()[0]
        _warn(f"{path} is damaged ({reason}): starting from the beginning")
        return Pages()
    if found.format != FORMAT:
        _warn(f"{path} has format {found.format}, this scalepoint reads {FORMAT}: starting from the beginning")
        return Pages()
    return found


def _sweep(folder: Path) -> None:
    """Delete what a killed run left half-written in its own folder, and in those of its trials."""
    for place in (folder, *(each.parent for each in folder.rglob(f"{TEMPORARY}*"))):
        if place.is_dir():
            sweep(place)


def _empty(folder: Path) -> None:
    """Delete the files that a run keeps in its folder, except the lock. Files of others stay."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            remove(path)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        _empty(folder)
        (folder / LOCK).unlink()
        folder.rmdir()


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=2)
