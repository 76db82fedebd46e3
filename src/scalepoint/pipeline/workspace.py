"""The only code that creates, replaces or deletes files in output folders. It also locks them.

    Workspace, of deploy:
    OUT/                        the results, and a list of the files that were written (support/output_folder.py)
    OUT/.scalepoint/            during a run: the cache of stages, the log, and the files of trials

    CheckpointWorkspace, of deploy_checkpoint:
    OUT                         a folder, or a file such as OUT.gguf
    .OUT.work/                  during a run: codes of finished blocks, and the folder while it is being written

A folder that is not empty is refused unless `resume` or `force` is set. Only files in the list are ever deleted.
Only rank 0 opens the folder; on other ranks a Workspace has only the paths.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from scalepoint import distributed
from scalepoint.errors import NonFiniteError, StoreError, UsageError
from scalepoint.pipeline.cache import StageCache
from scalepoint.report.html import HTML_FILE, JSON_FILE
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
from scalepoint.support.output_folder import LIST_FILE as LIST
from scalepoint.support.output_folder import WrittenFiles, check_links, check_path, move_into
from scalepoint.support.progress import Event, send_event
from scalepoint.verification.inputs import INPUTS_FILE

WORK_FOLDER = ".scalepoint"
LOG_FILE, CONFIG_FILE, BEST_CONFIG_FILE, SCRIPT_FILE, FAILING_FOLDER, QUANTIZED_FOLDER = (
    "log.txt",
    "config.yaml",
    "kept.yaml",
    "reproduce.py",
    "failing",
    "quantized",
)
FILE_STEM, FLOAT_STEM, PLAIN_STEM = "model", "float", "float_plain"  # names without the suffix of the format
REPORT_FILES = (JSON_FILE, HTML_FILE)
OUTPUT_NAMES = (
    QUANTIZED_FOLDER,
    FAILING_FOLDER,
    CONFIG_FILE,
    LOG_FILE,
    JSON_FILE,
    HTML_FILE,
    INPUTS_FILE,
    BEST_CONFIG_FILE,
    SCRIPT_FILE,
)
CONTINUE_HINT = "continue it with resume=True (--resume), or start again with force=True (--force)"
OVERWRITE_HINT = "choose another output, or overwrite it with force=True (--force)"
WORK_NAMES = re.compile(
    r"journal\.json|log\.txt|trial-\d+|float(_plain)?(\..*)?|inputs\.safetensors"
)  # files of runs in OUT/.scalepoint


class Workspace:
    """The output folder during a run.

    Attributes:
        output: The folder that the user chose.
        work: Folder for the cache and for files of trials; deleted when the run ends without an error.
        cache: The finished stages.
    """

    def __init__(self, output: Path, cache: StageCache) -> None:
        self.output = output
        self.work = output / WORK_FOLDER
        self.cache = cache
        self._written_paths: list[Path] = []

    @classmethod
    @contextmanager
    def open(cls, output: Path, *, suffix: str, resume: bool, force: bool) -> Iterator["Workspace"]:
        """Check, lock and clean up the folder. Delete the work folder when the block ends without an error.

        Args:
            output: The folder to write.
            suffix: Suffix of the files of the target's format.
            resume: Reuse finished stages of an interrupted run.
            force: Overwrite existing files.

        Raises:
            UsageError: The folder is not empty, or is not a folder.
            StoreError: Another process is writing into it.
        """
        names = (*OUTPUT_NAMES, *(f"{name}{suffix}" for name in (FILE_STEM, FLOAT_STEM, PLAIN_STEM)))
        distributed.run_on_main(
            "looking at the output", lambda: check_output(output, force=force, resume=resume, names=names)
        )
        work = output / WORK_FOLDER
        if not distributed.is_main():
            yield cls(output, StageCache(work))
            return
        existed = output.exists()
        with folder_locked(work):
            _remove_temporary_files(work)
            workspace = cls(output, StageCache.read(work) if resume else StageCache(work))
            if not workspace.cache.stages:
                _remove_run_files(work)
            remove_leftovers(output, (LIST, *names))
            remove_leftover_folders()
            try:
                yield workspace
            except BaseException as error:
                workspace._clean_up_after(error, existed=existed)
                raise
            _remove_work_folder(work)

    def _clean_up_after(self, error: BaseException, *, existed: bool) -> None:
        """After an error keep the finished stages. Without finished stages remove the folders that were created."""
        if not self.cache.stages:
            _remove_work_folder(self.work)
            if not existed:
                with suppress(OSError):  # not empty: the user's metric may have written files there
                    self.output.rmdir()
        elif isinstance(error, StoreError) and is_disk_full(error):
            message = f"{error.args[0]}; finished stages are kept: continue with resume=True"
            raise StoreError(message) from error

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
            copy_path(source, path)
            self.add([path])
            send_event(Event("file", str(path)))

    def write_text(self, name: str, text: str) -> None:
        replace_text(self.output / name, text)
        self.add([self.output / name])

    def add(self, paths: Iterable[Path]) -> None:
        """Record that this run wrote these files or folders."""
        self._written_paths += paths

    def finish(self) -> None:
        """Copy the log, record all files of this run in the list, and delete the files of earlier runs."""
        if (self.work / LOG_FILE).is_file():
            self.write_text(LOG_FILE, (self.work / LOG_FILE).read_text(encoding="utf-8"))
        file_list = WrittenFiles(self.output)
        file_list.remove_all_but(file_list.add(self._written_paths))


class CheckpointWorkspace:
    """The output of deploy_checkpoint.

    The work folder is next to the output and not inside it, because the output may be a single file. After an error it
    stays if it has finished blocks, which resume=True reuses.

    Attributes:
        output: The file or folder that the user chose.
        path: The file or folder that the runtime reads.
        report_folder: The folder of the report: that of the file, or the output folder itself.
        work: The work folder.
        tuning_folder: Codes of finished blocks, in the work folder.
    """

    def __init__(self, output: Path, *, name: str = "", suffix: str = "") -> None:
        """Set the paths; nothing is created.

        Args:
            output: The file or folder that the user chose.
            name: Name of the file in a folder, without suffix.
            suffix: Suffix of the format's file; "" for a format that is a folder.
        """
        is_path = not suffix or output.suffix == suffix
        self.output = output
        self.path = output if is_path else output / f"{name}{suffix}"
        self.report_folder = self.path.parent if suffix else self.path
        self.is_folder = not suffix
        base = output if output.name not in ("", "..") else output.resolve()
        self.work = base.with_name(f".{base.name}.work")
        self.tuning_folder = self.work / "tuning"
        self._staging = self.work / "written"

    @property
    def has_finished_blocks(self) -> bool:
        """Whether there is an interrupted run that can be continued."""
        return any(self.tuning_folder.glob("piece-*.safetensors"))

    def check(self, *, force: bool, resume: bool) -> None:
        """Raise UsageError if the output is not empty, unless `force` is set or an interrupted run is continued."""
        check_links(self.work.parent, [self.work.name])
        names = [] if self.path == self.report_folder else [self.path.name]
        check_links(self.report_folder, (LIST, *REPORT_FILES, *names))
        if force or (resume and self.has_finished_blocks):
            return
        if self.has_finished_blocks:
            raise UsageError(f"{self.output} contains an unfinished run: {CONTINUE_HINT}")
        if self.output.is_dir() and any(self.output.iterdir()):
            raise UsageError(f"{self.output} is not empty: {OVERWRITE_HINT}")
        file_list = WrittenFiles(self.report_folder)
        reports = [name for name in REPORT_FILES if (self.report_folder / name).exists() and name not in file_list]
        existing = [self.output.name] if self.output.is_file() else reports
        if existing:
            raise UsageError(f"{self.report_folder / existing[0]} already exists: {OVERWRITE_HINT}")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock and clean up the output. Delete the work folder at the end, except finished blocks after an error.

        Does nothing on ranks other than 0.
        """
        if not distributed.is_main():
            yield
            return
        existed = self.output.exists()
        with folder_locked(self.work):
            remove_leftovers(self.work)
            remove_leftover_folders()
            if self.report_folder.is_dir():
                remove_leftovers(self.report_folder, (LIST, *REPORT_FILES, self.path.name))
            try:
                yield
            except BaseException as error:
                if not self.can_resume_after(error):
                    self._remove_work()
                if self.path.parent == self.output and not existed:
                    with suppress(OSError):  # not empty
                        self.output.rmdir()
                raise
            self._remove_work()

    def can_resume_after(self, error: BaseException) -> bool:
        """Whether finished blocks are kept. Not after NaN: the same weights and data would give NaN again."""
        return self.has_finished_blocks and not isinstance(error, NonFiniteError)

    def write(self, write_files: Callable[[Path], object]) -> None:
        """Call `write_files` with a path and record the files. A folder is moved to its place when it is complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_folder:
            write_files(self.path)
            WrittenFiles(self.path.parent).add([self.path])
            return
        remove_path(self._staging)
        write_files(self._staging)
        move_into(self._staging, self.path)

    def record_report(self) -> None:
        """Record that this run wrote the report."""
        WrittenFiles(self.report_folder).add(self.report_folder / name for name in REPORT_FILES)

    def _remove_work(self) -> None:
        """Delete the files of this program in the work folder. Other files stay."""
        for path in (self._staging, self.tuning_folder, self.work / LOCK_FILE):
            with suppress(OSError):
                remove_path(path)
        with suppress(OSError):
            self.work.rmdir()


def check_output(folder: Path, *, force: bool, resume: bool, names: Iterable[str] = ()) -> None:
    """Raise UsageError if the output folder may not be written to.

    Args:
        folder: The output folder.
        force: Existing files may be overwritten.
        resume: An unfinished run may be continued.
        names: Files and folders that will be written; a symbolic link with such a name is refused.
    """
    check_path(folder)
    check_links(folder, (WORK_FOLDER, LIST, *names))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output={str(folder)!r} is a file: choose a folder")
    if force or not folder.exists():
        return
    is_unfinished = bool(list_finished_stages(folder))
    is_empty = all(path.name == WORK_FOLDER for path in folder.iterdir())
    if resume and (is_unfinished or is_empty):
        return
    if resume:
        raise UsageError(f"{folder} contains no unfinished run: to start again, overwrite it with force=True (--force)")
    if is_unfinished:
        raise UsageError(f"{folder} contains an unfinished run: {CONTINUE_HINT}")
    if not is_empty:
        raise UsageError(f"{folder} is not empty: {OVERWRITE_HINT}")


def list_finished_stages(output: Path) -> list[str]:
    """Return the finished stages of an unfinished run, in order; [] if there is no such run."""
    if not (output / WORK_FOLDER).is_dir():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StageCache.read(output / WORK_FOLDER).stages


def _remove_temporary_files(work: Path) -> None:
    """Delete partly written files of a killed run, in the work folder and in its trials."""
    for folder in (work, *(path.parent for path in work.rglob(f"{TEMPORARY_PREFIX}*"))):
        if folder.is_dir():
            remove_leftovers(folder)


def _remove_run_files(work: Path) -> None:
    """Delete the files of runs in the work folder, except the lock. Other files stay."""
    for path in work.iterdir():
        if WORK_NAMES.fullmatch(path.name):
            remove_path(path)


def _remove_work_folder(work: Path) -> None:
    with suppress(OSError):
        _remove_run_files(work)
        (work / LOCK_FILE).unlink()
        work.rmdir()
