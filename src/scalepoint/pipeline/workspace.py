"""The only code that creates, refuses, replaces or deletes files in output folders. It also locks them.

    DeployWorkspace       OUT/ has the results. OUT/.scalepoint/ has the cache, the log and the trials of a run.
    CheckpointWorkspace   OUT is a folder, or a file such as OUT.gguf. .OUT.work/ has the finished blocks of a run.
    SweepWorkspace        OUT/ has the table, and a folder for each run. Each of these is a DeployWorkspace.

A folder that is not empty is refused unless `resume` or `force` is set. Every folder has a list of the files that were
written (support/output_folder.py), and only files in the list are ever deleted. Only rank 0 opens the folder; on other
ranks a workspace has only the paths.
"""

import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from scalepoint import distributed
from scalepoint.errors import NonFiniteError, ScalepointWarning, StoreError, UsageError
from scalepoint.graph.user_traceback import user_level
from scalepoint.pipeline.cache import StageCache
from scalepoint.report import Report, write
from scalepoint.report.html import HTML_FILE, JSON_FILE
from scalepoint.report.model import CONFIG_FILE
from scalepoint.report.sweep import PAGE_FILE, SWEEP_FILE
from scalepoint.support.files import (
    LOCK_FILE,
    TEMPORARY_PREFIX,
    copy_path,
    folder_locked,
    is_disk_full,
    remove_leftover_folders,
    remove_leftovers,
    remove_path,
    replace_text,
)
from scalepoint.support.output_folder import LIST_FILE, WrittenFiles, check_inputs, check_links, check_path, move_into
from scalepoint.support.progress import Event, send_event
from scalepoint.verification.inputs import INPUTS_FILE

WORK_FOLDER = ".scalepoint"
LOG_FILE, BEST_CONFIG_FILE, SCRIPT_FILE = "log.txt", "kept.yaml", "reproduce.py"
CARD_FILE, USE_FILE, BOM_FILE = "README.md", "use.py", "bom.cdx.json"
FAILING_FOLDER, QUANTIZED_FOLDER = "failing", "quantized"
# Names without the suffix of the format, see the float files in `stages.py`.
FILE_STEM, FLOAT_STEM, PLAIN_STEM = "model", "float", "float_plain"
SOURCE_STEM = "original"  # a copy of the .onnx file that the model was read from
REPORT_FILES = (JSON_FILE, HTML_FILE)
OUTPUT_NAMES = (
    *REPORT_FILES,
    QUANTIZED_FOLDER,
    FAILING_FOLDER,
    CONFIG_FILE,
    LOG_FILE,
    INPUTS_FILE,
    BEST_CONFIG_FILE,
    SCRIPT_FILE,
    CARD_FILE,
    USE_FILE,
    BOM_FILE,
)
CHECKPOINT_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model.onnx")
CONTINUE_HINT = "continue with resume=True (--resume), or start again with force=True (--force)"
OVERWRITE_HINT = "choose another output, or overwrite it with force=True (--force)"
# Files of runs in OUT/.scalepoint.
WORK_NAMES = re.compile(r"journal\.json|log\.txt|trial-\d+|(float(_plain)?|original)(\..*)?|inputs\.safetensors")


class Workspace(ABC):
    """An output folder.

        workspace.check()
        with workspace.open():
            workspace.write_text("notes.txt", text)

    Attributes:
        output: What the user chose.
        folder: The folder of the report and of the list of written files.
        work: The folder of unfinished work. It is locked during a run, and deleted when the run ends without an error.
        resume: An interrupted run may be continued.
        force: Existing files may be overwritten.
    """

    unfinished_state = "contains an unfinished run"

    def __init__(
        self,
        output: Path,
        folder: Path,
        work: Path,
        names: Iterable[str],
        *,
        replaced: Iterable[str],
        resume: bool,
        force: bool,
    ) -> None:
        """Set the paths; nothing is created.

        Args:
            output, folder, work, resume, force: See the attributes.
            names: The files and folders that may be written into `folder`.
            replaced: Those of them that every run writes: the user's files with these names would be lost.
        """
        self.output, self.folder, self.work, self.resume, self.force = output, folder, work, resume, force
        self._names = (LIST_FILE, *names)
        self._replaced = tuple(replaced)
        self._file_names: list[str] = []

    @abstractmethod
    def is_unfinished(self) -> bool:
        """Whether there is an interrupted run that resume=True continues."""

    @abstractmethod
    def _describe_existing(self) -> str:
        """Say which existing files only force=True may overwrite, such as "out is not empty"; "" if there are none."""

    @abstractmethod
    def _list_work(self) -> Iterable[Path]:
        """Return our files and folders in the work folder. Other files there are never deleted."""

    def check(self, inputs: Mapping[str, Path] | None = None) -> None:
        """Check that the output may be written to. Nothing is created.

        Args:
            inputs: Description -> file or folder that the run reads. The output must not contain it.

        Raises:
            UsageError: The output is not empty, is a file instead of a folder, contains an input or lies inside one, or
                has a symbolic link or a file of the user in the place of one of our files.
        """
        distributed.run_on_main("looking at the output", lambda: self._check(inputs or {}))

    def _check(self, inputs: Mapping[str, Path]) -> None:
        check_path(self.output)
        check_inputs(self.output, inputs)
        if self.folder == self.output and self.output.exists() and not self.output.is_dir():
            raise UsageError(f"output={str(self.output)!r} is a file: choose a folder")
        check_links(self.folder, self._names)
        check_links(self.work.parent, [self.work.name])
        if self.force:
            self._check_replaced()
        elif self.is_unfinished():
            if not self.resume:
                raise UsageError(f"{self.output} {self.unfinished_state}: {CONTINUE_HINT}")
        elif existing := self._describe_existing():
            no_run = " and contains no unfinished run" if self.resume else ""
            raise UsageError(f"{existing}{no_run}: {OVERWRITE_HINT}")

    def _check_replaced(self) -> None:
        """Refuse to replace files that scalepoint did not write."""
        own_files = WrittenFiles(self.folder).records
        for name in self._replaced:
            is_ours = name in own_files or any(file.startswith(f"{name}/") for file in own_files)
            if os.path.lexists(self.folder / name) and not is_ours:
                raise UsageError(
                    f"{self.folder / name} was not written by scalepoint, and force=True (--force) overwrites only "
                    "files of earlier runs: move it away, or choose another output"
                )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the output, and delete what killed runs left. After an error only finished work stays.

        Raises:
            StoreError: Another process is writing into the output.
        """
        if not distributed.is_main():
            yield
            return
        existed = self.output.exists()
        with folder_locked(self.work):
            _remove_temporary_files(self.work)
            if self.folder.is_dir():
                remove_leftovers(self.folder, self._names)
            remove_leftover_folders()
            try:
                yield
            except BaseException as error:
                if not self.can_resume_after(error):
                    self._remove_work()
                if not existed:
                    with suppress(OSError):  # not empty: it has finished work, or the user's metric wrote files there
                        self.output.rmdir()
                raise
            self._remove_work()

    def can_resume_after(self, error: BaseException) -> bool:
        """Whether finished work stays after an error, and resume=True continues from there."""
        return self.is_unfinished()

    def _remove_work(self) -> None:
        with suppress(OSError):
            for path in (*self._list_work(), self.work / LOCK_FILE):
                remove_path(path)
            self.work.rmdir()

    def write_text(self, name: str, text: str) -> None:
        replace_text(self.folder / name, text)
        self.record([self.folder / name])

    def write_unless_foreign(self, name: str, text: str) -> None:
        """Write a file, unless there is one that scalepoint did not write, or that was edited since."""
        path = self.folder / name
        if os.path.lexists(path) and name not in WrittenFiles(self.folder):
            message = f"{path} is not ours, or was edited: it stays as it is, and ours is not written"
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())
            return
        self.write_text(name, text)

    def hashes(self) -> dict[str, str]:
        """Return the sha256 of every file that this run wrote, by name."""
        records = WrittenFiles(self.folder).records
        return {name: records[name].sha256 for name in dict.fromkeys(self._file_names)}

    def write_report(self, report: Report) -> None:
        """Write report.json and report.html."""
        write(report, self.folder)
        self.record(self.folder / name for name in REPORT_FILES)

    def record(self, paths: Iterable[Path], root: Path | None = None) -> None:
        """Add files and folders of this run to the list of written files. See `WrittenFiles.add`."""
        self._file_names += WrittenFiles(self.folder).add(paths, root)


class DeployWorkspace(Workspace):
    """The output folder of deploy.

    Attributes:
        cache: The finished stages. With resume=True those of the interrupted run, once the folder is open.
    """

    def __init__(
        self, output: Path, *, suffix: str = "", is_smoke: bool = False, resume: bool = False, force: bool = False
    ) -> None:
        """Set the paths; nothing is created.

        Args:
            output: The folder to write.
            suffix: Suffix of the files of the target's format.
            is_smoke: Whether the run is a quick one, which writes no float file.
            resume, force: See Workspace.
        """
        files = [f"{stem}{suffix}" for stem in (FILE_STEM, FLOAT_STEM, PLAIN_STEM, SOURCE_STEM)]
        super().__init__(
            output,
            output,
            output / WORK_FOLDER,
            (*OUTPUT_NAMES, *files),
            replaced=(*REPORT_FILES, CONFIG_FILE, LOG_FILE, *files[: 1 if is_smoke else 2]),
            resume=resume,
            force=force,
        )
        self.cache = StageCache(self.work)

    def is_unfinished(self) -> bool:
        return bool(list_finished_stages(self.output))

    def _describe_existing(self) -> str:
        is_empty = not self.output.exists() or all(path.name == WORK_FOLDER for path in self.output.iterdir())
        return "" if is_empty else f"{self.output} is not empty"

    def _list_work(self) -> Iterable[Path]:
        return [path for path in self.work.iterdir() if WORK_NAMES.fullmatch(path.name)]

    @contextmanager
    def open(self) -> Iterator[None]:
        with super().open():
            if distributed.is_main():
                if self.resume:
                    self.cache = StageCache.read(self.work)
                if not self.cache.stages:
                    for path in self._list_work():
                        remove_path(path)
            try:
                yield
            except StoreError as error:
                if is_disk_full(error) and self.is_unfinished():
                    message = f"{error.args[0]}; finished stages are kept: continue with resume=True"
                    raise StoreError(message) from error
                raise

    def log(self, event: Event) -> None:
        """Append finished phases, metrics and written files to the log, with UTC timestamps. A progress listener."""
        if event.kind not in ("start", "advance"):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with (self.work / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(f"{now} {event.kind} {event}\n")

    def copy(self, sources: Iterable[Path]) -> None:
        """Copy files and folders into the output folder. Each one is replaced atomically."""
        for source in sources:
            path = self.output / source.name
            self.record([source], source.parent)  # before the copy: a file without a record counts as the user's
            copy_path(source, path)
            send_event(Event("file", str(path)))

    def write_folder(self, name: str, write_files: Callable[[Path], Sequence[Path]]) -> Sequence[Path]:
        """Call `write_files` with the path of a folder. Record the files that it returns, and return them."""
        paths = write_files(self.output / name)
        self.record(paths)
        return paths

    def finish(self) -> None:
        """Copy the log, and delete the files of earlier runs."""
        if (self.work / LOG_FILE).is_file():
            self.write_text(LOG_FILE, (self.work / LOG_FILE).read_text(encoding="utf-8"))
        WrittenFiles(self.output).remove_all_but(self._file_names)


class CheckpointWorkspace(Workspace):
    """The output of deploy_checkpoint.

    The work folder is next to the output and not inside it, because the output may be a single file. After an error it
    stays if it has finished blocks, which resume=True reuses.

    Attributes:
        path: The file or folder that the runtime reads.
        is_folder: Whether the format is a folder.
        tuning_folder: Codes of finished blocks, in the work folder.
    """

    def __init__(
        self, output: Path, *, name: str = "", suffix: str = "", resume: bool = False, force: bool = False
    ) -> None:
        """Set the paths; nothing is created.

        Args:
            output: The file or folder that the user chose.
            name: Name of the file in a folder, without suffix.
            suffix: Suffix of the format's file; "" for a format that is a folder.
            resume, force: See Workspace.
        """
        self.is_folder = not suffix
        self.path = output if self.is_folder or output.suffix == suffix else output / f"{name}{suffix}"
        base = output if output.name not in ("", "..") else output.resolve()
        work = base.with_name(f".{base.name}.work")
        folder = output if self.is_folder else self.path.parent
        names = (*REPORT_FILES, *(CHECKPOINT_FILES if self.is_folder else (self.path.name,)))
        replaced = names if self.is_folder else REPORT_FILES
        super().__init__(output, folder, work, names, replaced=replaced, resume=resume, force=force)
        self.tuning_folder = work / "tuning"
        self._staging = work / "written"

    def is_unfinished(self) -> bool:
        return any(self.tuning_folder.glob("piece-*.safetensors"))

    def _describe_existing(self) -> str:
        if self.output.is_dir() and any(self.output.iterdir()):
            return f"{self.output} is not empty"
        if self.output.is_file():
            return f"{self.output} already exists"
        ours = WrittenFiles(self.folder)
        reports = [name for name in REPORT_FILES if (self.folder / name).exists() and name not in ours]
        return f"{self.folder / reports[0]} already exists" if reports else ""

    def _list_work(self) -> Iterable[Path]:
        return self._staging, self.tuning_folder

    def can_resume_after(self, error: BaseException) -> bool:
        """Whether finished blocks stay. Not after NaN: the same weights and data would give NaN again."""
        return self.is_unfinished() and not isinstance(error, NonFiniteError)

    def write(self, write_files: Callable[[Path], object]) -> None:
        """Call `write_files` with a path and record the files. A folder is moved to its place when it is complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_folder:
            write_files(self.path)
            self.record([self.path])
            return
        remove_path(self._staging)
        write_files(self._staging)
        move_into(self._staging, self.path)


class SweepWorkspace(Workspace):
    """The output folder of sweep. Finished runs are always kept, so resume=True continues in any folder."""

    unfinished_state = "is not empty"

    def __init__(self, output: Path, *, resume: bool = False, force: bool = False) -> None:
        """Set the paths; nothing is created."""
        names = (SWEEP_FILE, PAGE_FILE)
        super().__init__(output, output, output / WORK_FOLDER, names, replaced=names, resume=resume, force=force)

    def is_unfinished(self) -> bool:
        return self.output.exists() and any(path.name != WORK_FOLDER for path in self.output.iterdir())

    def _describe_existing(self) -> str:
        return ""

    def _list_work(self) -> Iterable[Path]:
        return ()

    def run_folder(self, name: str) -> Path:
        """Return the output folder of a run."""
        check_links(self.output, (name,))
        return self.output / name


def list_finished_stages(output: Path) -> list[str]:
    """Return the finished stages of an unfinished run of deploy, in order; [] if there is no such run."""
    if not (output / WORK_FOLDER).is_dir():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StageCache.read(output / WORK_FOLDER).stages


def _remove_temporary_files(work: Path) -> None:
    """Delete partly written files of a killed run, in the work folder and in its subfolders."""
    for folder in (work, *(path.parent for path in work.rglob(f"{TEMPORARY_PREFIX}*"))):
        if folder.is_dir():
            remove_leftovers(folder)
