"""Cache of finished stages in OUT/.scalepoint. With resume=True a run reuses the stages that it finds here.

    journal.json    stage -> inputs (name -> fingerprint), result, sha256 of its files; replaced after every stage
    trial-0/ ..     the files of each trial

    with cache.stage("trial-0 exported", compute_inputs) as stage:
        if stage.must_run:
            export(...)
            stage.store(files=[path])

A stage is reused if the fingerprints of all its inputs and all its files are unchanged. Otherwise a warning names the
inputs that changed, and the stage runs again. Only rank 0 computes fingerprints and writes the cache.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from scalepoint import distributed
from scalepoint.errors import DocumentError, ScalepointError, ScalepointWarning
from scalepoint.support.files import compute_digest, replace_text
from scalepoint.support.interrupts import check_interrupt
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_json

JOURNAL_FILE = "journal.json"
JOURNAL_FORMAT = 1
MAX_JOURNAL_BYTES = 64_000_000  # bytes
# Inputs that are results of an earlier stage. If one changed, that stage ran again and has warned about the cause.
OUTPUTS_OF_EARLIER_STAGES = frozenset(
    ("the quantized model", "the file", "the float file", "the plain export", "the baseline", "the files", "the drop")
)
# The fingerprint of the data covers at most max_batches batches, so it changes with max_batches. Name only the cause.
CAUSES = {"the calibration data": "max_batches"}

Inputs = dict[str, str | None]  # name -> fingerprint; None is never equal to anything
T = TypeVar("T")


class CachedStage(BaseModel):
    """One finished stage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    marks: dict[str, str | None]  # the inputs, name -> fingerprint; "marks" is the key in existing files
    result: dict[str, Any]
    files: dict[str, str]


class CacheFile(BaseModel):
    """The content of journal.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = JOURNAL_FORMAT
    stages: dict[str, CachedStage] = {}


class Stage:
    """One stage of this run.

    Attributes:
        inputs: Fingerprints of what the stage depends on. More may be added before the stage ends.
        cached: The result in the cache; None if the stage must run.
    """

    def __init__(self, name: str, inputs: Inputs, cached: dict[str, Any] | None) -> None:
        self.name, self.inputs, self.cached = name, inputs, cached
        self.stored: tuple[Mapping[str, Any], Sequence[Path]] | None = None

    @property
    def must_run(self) -> bool:
        return self.cached is None

    def load(self, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Return the cached result as `parse` decodes it; None if the stage must run or the result cannot be read."""
        if self.cached is None:
            return None
        with distributed.phase(self.name) as step:
            try:
                value, step.value = parse(self.cached), ""
            except (ScalepointError, ValidationError) as error:
                value, step.value = None, str(error).splitlines()[0]
        problem = next(filter(None, step.values), "")  # of any rank: all ranks must agree whether the stage runs
        if problem:
            self.cached = None
            _warn(f"{self.name}: the cached result cannot be used ({problem}): the stage runs again")
            return None
        return value

    def store(self, result: Mapping[str, Any] | None = None, files: Sequence[Path] = ()) -> None:
        """Set the result and files that are written to the cache when the stage ends without an error."""
        self.stored = (result or {}, files)


class StageCache:
    """The finished stages of a run in one folder."""

    def __init__(self, folder: Path, content: CacheFile | None = None) -> None:
        self.folder = folder
        self._content = content or CacheFile()

    @classmethod
    def read(cls, folder: Path) -> "StageCache":
        """Read the cache of an unfinished run. Warn and return an empty cache if there is none or it is damaged."""
        return cls(folder, _read(folder / JOURNAL_FILE))

    @property
    def stages(self) -> list[str]:
        """Names of the finished stages, in order."""
        return list(self._content.stages)

    @contextmanager
    def stage(self, name: str, compute_inputs: Callable[[], Inputs]) -> Iterator[Stage]:
        """Enter a stage. The result that it stores is written when the block ends without an error."""
        check_interrupt()
        inputs: Inputs = {}

        def find() -> dict[str, Any] | None:
            inputs.update(compute_inputs())
            return self._find(name, inputs)

        stage = Stage(name, inputs, distributed.run_on_main(name, find, dict[str, Any] | None))
        with distributed.phase(name):
            yield stage
        if stage.stored is not None and distributed.is_main():
            self._write(stage, *stage.stored)

    def _find(self, name: str, inputs: Inputs) -> dict[str, Any] | None:
        """Return the cached result of a stage; None if the stage must run."""
        entry = self._content.stages.get(name)
        if entry is None:
            return None
        names = dict.fromkeys([*inputs, *entry.marks])
        changed = [input_name for input_name in names if not _is_same(input_name, inputs, entry.marks)]
        if changed:
            direct = [input_name for input_name in changed if input_name not in OUTPUTS_OF_EARLIER_STAGES]
            causes = [input_name for input_name in direct if CAUSES.get(input_name) not in changed]
            if causes:
                _warn(f"{name}: {', '.join(causes)} changed since it was saved: the stage runs again")
            return None
        broken = [path for path, sha256 in entry.files.items() if not _is_unchanged(self.folder / path, sha256)]
        if broken:
            _warn(f"{name}: {', '.join(broken)} in {self.folder} is missing or damaged: the stage runs again")
            return None
        return entry.result

    def _write(self, stage: Stage, result: Mapping[str, Any], files: Sequence[Path]) -> None:
        digests = {path.relative_to(self.folder).as_posix(): compute_digest(path) for path in files}
        entry = CachedStage(marks=dict(stage.inputs), result=to_jsonable(result), files=digests)
        self._content.stages[stage.name] = entry
        replace_text(self.folder / JOURNAL_FILE, json.dumps(self._content.model_dump(), indent=1) + "\n")


def _is_same(name: str, inputs: Inputs, saved: Inputs) -> bool:
    return name in inputs and name in saved and inputs[name] is not None and inputs[name] == saved[name]


def _is_unchanged(path: Path, sha256: str) -> bool:
    return path.exists() and compute_digest(path) == sha256


def _read(path: Path) -> CacheFile:
    if not path.is_file():
        _warn(f"{path.parent} contains no unfinished run to resume: starting from the beginning")
        return CacheFile()
    try:
        content = CacheFile.model_validate(read_json(path, MAX_JOURNAL_BYTES, folder=path.parent))
    except (OSError, DocumentError, ValidationError) as error:
        reason = error.args[0] if isinstance(error, DocumentError) else str(error).splitlines()[0]
        _warn(f"{path} is damaged ({reason}): starting from the beginning")
        return CacheFile()
    if content.format != JOURNAL_FORMAT:
        _warn(
            f"{path} has format {content.format}, this scalepoint reads {JOURNAL_FORMAT}: starting from the beginning"
        )
        return CacheFile()
    return content


def _warn(message: str) -> None:
    warnings.warn(ScalepointWarning(message), stacklevel=2)
