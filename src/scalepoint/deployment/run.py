"""One run of deploy: what its steps share, how long each took, and the marks of what each was made from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from scalepoint import ranks
from scalepoint.deployment.accuracy import Accuracy
from scalepoint.deployment.journal import Journal, Stage
from scalepoint.deployment.marks import mark, mark_of_code, mark_of_model, mark_of_target, mark_of_values
from scalepoint.deployment.trials import Trial
from scalepoint.errors import UsageError
from scalepoint.files import copy_whole, digest
from scalepoint.formats import find_format
from scalepoint.graph.free import Axes
from scalepoint.progress import Event, say, tell, timed
from scalepoint.quantize import QuantConfig, save
from scalepoint.quantize.feeding import Data, length_of
from scalepoint.quantize.store import files_in
from scalepoint.runtimes import find_runtime
from scalepoint.targets import Target
from scalepoint.verification.inputs import save_inputs
from scalepoint.verification.result import PLAIN_BASELINE
from scalepoint.verification.simulation import feeds_of
from scalepoint.version import __version__

Evaluate = Callable[[Any], float]
Marks = dict[str, str | None]
VERSIONS = {"scalepoint": __version__, "torch": str(torch.__version__)}
FILE, FLOAT_FILE, PLAIN_FILE, MODEL = "model", "float", "float_plain", "quantized"
SMOKE_BATCHES = 2
MarksOf = TypeVar("MarksOf", bound=Callable[..., Marks])


def _of_first(make: MarksOf) -> MarksOf:
    """Of several ranks the first looks what a stage was made from; the others need not see the files."""
    return wraps(make)(lambda *args: make(*args) if ranks.is_main() else {})  # type: ignore[return-value]  # as make


@dataclass(kw_only=True)
class Run:
    """The model, its inputs, the data, the target, and what was asked for."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    data: Any
    target: Target
    journal: Journal
    evaluate: Evaluate | None
    leave: tuple[str, ...]
    dynamic_axes: Axes
    strict: bool
    threads: int
    max_batches: int | None
    on_nan: Literal["error", "skip"]
    float_dtype: str | None
    smoke: bool
    progress: bool | None
    accuracy: Accuracy | None
    seed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)  # that the file keeps
    data_mark: str | None = None
    baseline: str | None = None  # which float file the first trial was compared with: all others are too
    timings: dict[str, float] = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)  # what this run has put into the output folder

    def __post_init__(self) -> None:
        self.asked_batches = self.max_batches
        self.format = find_format(self.target.format)
        self.model_mark = mark_of_model(self.model)
        _check_same(self.model_mark)
        if self.smoke:
            self.max_batches = min(self.max_batches or SMOKE_BATCHES, SMOKE_BATCHES)

    def timed(self, doing: str, *, is_phase: bool = True) -> AbstractContextManager[None]:
        """A step that is shown while it runs; is_phase=False for one that shows itself."""
        return timed(self.timings, doing, show=self.progress, is_phase=is_phase)

    @contextmanager
    def stage(self, name: str, doing: str, marks: Marks, *, is_timed: bool = True) -> Iterator[Stage]:
        """A step that is taken from the journal where nothing it was made from has changed since; one that consists of
        timed steps is not timed itself."""
        with self.journal.stage(name, marks) as stage:
            if not stage.is_due and self.progress is not False:
                say(f"{doing}: as saved")
            with self.timed(doing) if stage.is_due and is_timed else nullcontext():
                yield stage

    def file(self, folder: Path, name: str) -> Path:
        """A file of the target's format."""
        return folder / f"{name}{self.format.suffix}"

    @property
    def has_data(self) -> bool:
        """Whether it can be read (again): weights alone need none, and an iterator gives it once."""
        return not isinstance(self.data, Iterator) and length_of(self.data) != 0

    def example(self) -> Data:
        """The example as data of one batch. A batch is a tuple or a dict: for an example that has both positional and
        keyword inputs, return a function that calls the model with them."""
        args, kwargs = self.inputs
        if args and kwargs:
            return lambda model: model(*args, **kwargs)
        return [kwargs or tuple(args)]

    @_of_first
    def marks_of_quantizing(self, config: QuantConfig) -> Marks:
        return {
            **VERSIONS,
            "the model": self.model_mark,
            "the example inputs": mark_of_values(self.inputs),
            "the target": mark_of_target(self.target),
            "the config": mark(config.to_dict()),
            "leave": mark(self.leave),
            "dynamic_axes": mark(self.dynamic_axes),
            "strict": str(self.strict),
            "max_batches": str(self.max_batches),
            "on_nan": self.on_nan,
            "accuracy": str(self.accuracy),
        }

    @_of_first
    def marks_of_exporting(self, quantized: Path | None) -> Marks:
        """Of the file of a quantized model, or, without one, of the float file."""
        source: Marks = {
            "the model": self.model_mark,
            "leave": mark(self.leave),
            "dynamic_axes": mark(self.dynamic_axes),
        }
        return {
            **(source if quantized is None else self._marks_of_quantized(quantized)),
            "the example inputs": mark_of_values(self.inputs),
            "the target": mark_of_target(self.target),
            "float_dtype": self.float_dtype or "float32",  # None would mean: not known, so do it again
            **VERSIONS,
            **{name: package_version(name) for name in ("onnx", "onnxscript")},
        }

    def _marks_of_quantized(self, quantized: Path) -> Marks:
        return {"the quantized model": digest(quantized / "scalepoint.json"), "metadata": mark(self.metadata)}

    @_of_first
    def marks_of_verifying(self, path: Path, float_path: Path) -> Marks:
        runtime = str(self.target.runtime)
        return {
            "the file": digest(path),
            "the float file": "none" if self.smoke else digest(float_path),
            "the plain export": digest(plain) if (plain := self.plain_path) else "none",
            "the baseline": str(self.baseline),
            "the example inputs": mark_of_values(self.inputs),
            "threads": str(self.threads),
            "smoke": str(self.smoke),
            "scalepoint": VERSIONS["scalepoint"],
            runtime: package_version(find_runtime(runtime).package),
        }

    @_of_first
    def marks_of_judging(self, path: Path | None) -> Marks:
        """Of the score of a file, or, without one, of the float model."""
        judged: Marks = {"the model": self.model_mark, **VERSIONS} if path is None else {"the file": digest(path)}
        return {**judged, "the metric": mark_of_code(self.evaluate)}

    @property
    def plain_path(self) -> Path | None:
        """The float model by torch.onnx.export, where it was written."""
        path = self.file(self.journal.folder, PLAIN_FILE)
        return path if path.is_file() else None

    def place(self, best: Trial, output: Path) -> Trial:
        """The files of the best trial in the output folder; each appears whole."""
        path, float_path = self.file(output, FILE), None if self.smoke else self.file(output, FLOAT_FILE)
        found = best.verification and replace(best.verification, path=str(path))
        placed = replace(best, file=path, float_file=float_path, verification=found)
        if not ranks.is_main():
            return placed
        plain = self.plain_path if self.baseline == PLAIN_BASELINE else None
        floats = [] if self.smoke else [each for each in (best.float_file, plain) if each is not None]
        sources = [file for each in (*floats, best.path) for file in self.format.files(each)]
        if found is not None and found.latency is not None:
            sources.append(save_inputs(self.journal.folder, feeds_of(best.model, self.inputs)))
        for source in sources:
            copy_whole(source, output / source.name)
            tell(Event("file", str(output / source.name)))
        save(best.model, output / MODEL, with_graph=None)  # where it has a form as data, load needs no float model
        self.written += (*(output / source.name for source in sources), *files_in(output / MODEL))
        return placed


def _check_same(model_mark: str) -> None:
    """Ranks that were given other weights would each quantize another model."""
    with ranks.agreed("the model") as told:
        told.mine = model_mark
    others = [index for index, each in enumerate(told.all) if each != told.all[0]]
    if others:
        raise UsageError(
            f"rank {others[0]} has another model than rank 0: load the same weights on every rank, or set the same "
            "seed where they are random"
        )


def package_version(package: str) -> str | None:
    """Of what is installed; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
