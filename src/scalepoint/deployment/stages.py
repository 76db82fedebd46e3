"""The stages of the road with what they share: the model, its inputs, the target, the data, the clock, the journal.

Each stage is done, or taken from the journal of a run that did not end.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from torch import fx, nn

import scalepoint
from scalepoint.deployment.journal import Journal, Marks
from scalepoint.deployment.marks import (
    Seen,
    mark,
    mark_of_code,
    mark_of_data,
    mark_of_model,
    mark_of_target,
    mark_of_values,
    watched,
)
from scalepoint.deployment.scoring import judged_as
from scalepoint.deployment.trials import Step, Trial, next_step
from scalepoint.errors import ScalepointError
from scalepoint.files import digest, replace_file
from scalepoint.formats import export, find_format
from scalepoint.graph.modes import evaluating
from scalepoint.quantize import QuantConfig, calibrate, freeze, insert_qdq, load, save
from scalepoint.report import Raised
from scalepoint.runtimes import find_runtime
from scalepoint.targets import Target
from scalepoint.transformation import transform
from scalepoint.verification import RuntimeModel, Status, Verification, verify

Evaluate = Callable[[Any], float]
VERSIONS = {"scalepoint": scalepoint.__version__, "torch": str(torch.__version__)}
FILE, FLOAT_FILE, MODEL = "model", "float", "quantized"
FLOAT_SCORE = "the float model evaluated"
SMOKE_BATCHES = 2


@dataclass
class Road:
    """One run, stage by stage."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    data: Any
    target: Target
    journal: Journal
    evaluate: Evaluate | None
    leave: tuple[str, ...]
    strict: bool
    threads: int
    max_batches: int | None
    smoke: bool
    progress: bool | None
    float_dtype: str | None = None
    on_nan: Literal["error", "skip"] = "error"
    timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quiet = not (self.progress if self.progress is not None else Console(stderr=True).is_terminal)
        self.console = Console(stderr=True, quiet=quiet)
        self.format = find_format(self.target.format)
        self.model_mark = mark_of_model(self.model)
        self.data_mark: str | None = None
        if self.smoke:
            self.max_batches = min(self.max_batches or SMOKE_BATCHES, SMOKE_BATCHES)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(f"{stage} ..."):
            yield
        taken = time.perf_counter() - start
        self.timings[stage] = self.timings.get(stage, 0.0) + taken
        self.console.print(f"{stage}: {taken:.1f} s")

    def _saved(self, stage: str, marks: Marks) -> dict[str, Any] | None:
        """What a stage gave in the run that is resumed."""
        found = self.journal.find(stage, marks)
        if found is not None:
            self.console.print(f"{stage}: as saved")
        return found

    def attempt(self, number: int, step: Step) -> Trial:
        """One file: quantized, exported, verified, evaluated."""
        folder = self.journal.folder / f"trial-{number}"
        model = self._quantized(folder, step.config)
        path, float_path = self._exported(folder, model)
        found = self._verified(path, float_path, model)
        score, in_runtime = None, False
        if self.evaluate is not None:
            in_runtime = found is not None and found.status == Status.OK
            score = self.score(
                f"{folder.name} evaluated", {"the file": digest(path)}, self._runner(path, model, in_runtime)
            )
        return Trial(step.config, model, path, float_path, found, score, in_runtime, step.raised, step.start)

    def _quantized(self, folder: Path, config: QuantConfig) -> fx.GraphModule:
        """Transform, insert, calibrate and freeze."""
        stage, place = f"{folder.name} quantized", folder / MODEL
        marks: dict[str, str | None] = {
            **VERSIONS,
            "the model": self.model_mark,
            "the example inputs": mark_of_values(self.inputs),
            "the target": mark_of_target(self.target),
            "the config": mark(config.to_dict()),
            "leave": mark(self.leave),
            "strict": str(self.strict),
            "max_batches": str(self.max_batches),
            "on_nan": self.on_nan,
        }
        args, kwargs = self.inputs
        if self.journal.has(stage):
            self.data_mark = marks["the calibration data"] = mark_of_data(self.data)
            if self._saved(stage, marks) is not None:
                try:
                    with self.clock("loading what was quantized"):
                        return load(place, self.model, args, kwargs=kwargs, target=self.target)
                except ScalepointError as error:
                    self.journal.drop(stage, error)
        with self.clock("capturing"):
            result = transform(self.model, args, target=self.target, kwargs=kwargs, leave=self.leave)
            quantized = insert_qdq(result.model, result.matches, config, strict=self.strict, copy=False)
        start = time.perf_counter()
        data = watched(self.data)
        calibrate(quantized, data, max_batches=self.max_batches, on_nan=self.on_nan, progress=self.progress)
        freeze(quantized)
        self.timings["calibrating"] = self.timings.get("calibrating", 0.0) + time.perf_counter() - start
        self.data_mark = marks["the calibration data"] = data.mark if isinstance(data, Seen) else mark_of_data(data)
        with self.clock("saving"):
            shutil.rmtree(place, ignore_errors=True)
            save(quantized, place)
        self.journal.keep(stage, marks, {}, [place / "scalepoint.json"])
        return quantized

    def _exported(self, folder: Path, model: fx.GraphModule) -> tuple[Path, Path]:
        """The file, and once for all trials the float one."""
        path, float_path = self._file(folder, FILE), self._file(self.journal.folder, FLOAT_FILE)
        args, kwargs = self.inputs
        versions: dict[str, str | None] = {name: package_version(name) for name in ("onnx", "onnxscript")}
        versions["float_dtype"] = self.float_dtype or "float32"  # None would mean: not known, so do it again
        own = {"the quantized model": digest(folder / MODEL / "scalepoint.json"), **VERSIONS, **versions}
        base = {
            "the model": self.model_mark,
            "the target": mark_of_target(self.target),
            "leave": mark(self.leave),
            **VERSIONS,
            **versions,
        }
        is_there = self._saved(f"{folder.name} exported", own) is not None
        has_float = self._saved("the float model exported", base) is not None
        if is_there and has_float:
            return path, float_path
        with self.clock("exporting"):
            plain = None if has_float else float_path
            export(model, path, args, kwargs=kwargs, float_path=plain, float_dtype=self.float_dtype)
        self.journal.keep(f"{folder.name} exported", own, {}, self.format.files(path))
        if not has_float:
            self.journal.keep("the float model exported", base, {}, self.format.files(float_path))
        return path, float_path

    def _verified(self, path: Path, float_path: Path, model: fx.GraphModule) -> Verification | None:
        runtime = self.target.runtime
        if runtime is None:
            return None
        stage = f"{path.parent.name} verified"
        args, kwargs = self.inputs
        marks = {
            "the file": digest(path),
            "the float file": digest(float_path),
            "the example inputs": mark_of_values(self.inputs),
            "threads": str(self.threads),
            "smoke": str(self.smoke),
            "scalepoint": VERSIONS["scalepoint"],
            runtime: package_version(find_runtime(runtime).package),
        }
        saved = self._saved(stage, marks)
        if saved is not None:
            try:
                return TypeAdapter(Verification).validate_python(saved)
            except ValidationError as error:
                self.journal.drop(stage, str(error).splitlines()[0])
        with self.clock("verifying in the runtime"):
            compared = None if self.smoke else float_path
            found = verify(path, model, args, kwargs=kwargs, runtime=runtime, float_path=compared, threads=self.threads)
        if self.smoke:
            found = replace(found, float_size=self.format.about(float_path).size)
        if found.status == Status.OK:  # what went wrong is tried again
            self.journal.keep(stage, marks, vars(found))
        return found

    def score(self, stage: str, marks: Mapping[str, str], run: Callable[[], Any]) -> float:
        """The user's metric, without gradients; a model is in eval mode meanwhile."""
        assert self.evaluate is not None  # noqa: S101  # who asks for a score has a metric
        known = {**marks, "the metric": mark_of_code(self.evaluate)}
        saved = self._saved(stage, known)
        if saved is not None:
            return float(saved["score"])
        with self.clock("evaluating the float model" if stage == FLOAT_SCORE else "evaluating the file"):
            judged = run()
            with evaluating(judged), torch.no_grad():
                score = judged_as(self.evaluate(judged), is_float=stage == FLOAT_SCORE)
        self.journal.keep(stage, known, {"score": score})
        return score

    def float_score(self) -> float | None:
        if self.evaluate is None:
            return None
        return self.score(FLOAT_SCORE, {"the model": self.model_mark, **VERSIONS}, lambda: self.model)

    def _runner(self, path: Path, model: fx.GraphModule, in_runtime: bool) -> Callable[[], Any]:
        """What is judged: the file in its runtime where it runs there, else the simulation."""
        runtime = self.target.runtime
        if not in_runtime or runtime is None:
            return lambda: model
        return lambda: RuntimeModel(path, self.model, self.inputs, runtime=runtime, threads=self.threads)

    def _file(self, folder: Path, name: str) -> Path:
        return folder / f"{name}{self.format.suffix}"

    def next_step(self, trials: list[Trial], drop: float, max_drop: float) -> Step | None:
        """What to try after these trials."""
        stage = f"step {len(trials)}"
        marks = {
            "the files": mark([digest(trial.path) for trial in trials]),
            "the drop": mark(drop),
            "max_drop": mark(max_drop),
            **VERSIONS,
        }
        saved = self._saved(stage, marks)
        if saved is not None:
            return _step_of(saved)
        with self.clock("finding what to raise"):
            has_none = isinstance(self.data, Sized) and not len(self.data)  # weights alone need no data
            data = self.example() if has_none else self.data
            step = next_step(trials, drop, max_drop, self.target, data)
        if step is not None:
            kept = {"config": step.config.to_dict(), "raised": step.raised, "start": step.start}
            self.journal.keep(stage, marks, kept)
        return step

    def place(self, best: Trial, output: Path) -> Trial:
        """The files of the best trial in the output folder; each appears whole."""
        sources = (*self.format.files(best.float_path), *self.format.files(best.path))
        path, float_path = self._file(output, FILE), self._file(output, FLOAT_FILE)
        old = {each.name for each in (*self.format.files(path), *self.format.files(float_path))}
        for source in sources:
            replace_file(output / source.name, partial(_copy, source))
        for name in old - {source.name for source in sources}:
            (output / name).unlink(missing_ok=True)
        save(best.model, output / MODEL)
        found = best.verification and replace(best.verification, path=str(path))
        return replace(best, path=path, float_path=float_path, verification=found)

    def example(self) -> list[Any]:
        """The example as one batch of data."""
        args, kwargs = self.inputs
        return [kwargs if kwargs and not args else tuple(args)]


def _step_of(saved: Mapping[str, Any]) -> Step:
    raised = TypeAdapter(tuple[Raised, ...]).validate_python(saved["raised"])
    return Step(QuantConfig.from_dict(saved["config"]), raised, saved["start"])


def _copy(source: Path, target: Path) -> None:
    """Another name for the same bytes where the disk allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def package_version(package: str) -> str | None:
    """Of what is installed; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
