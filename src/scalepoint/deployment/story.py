"""The whole road in one call: a float model in, the file that its target runs out, with the proof beside it.

    capture, transform -> insert Q/DQ -> calibrate -> export -> verify in the runtime -> evaluate -> report

Each step is a public function of its own; this file only calls them in order.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import fx, nn

from scalepoint.deployment.reporting import make_report
from scalepoint.deployment.trials import Trial, next_config
from scalepoint.errors import UsageError
from scalepoint.exporting import export
from scalepoint.exporting.saving import remove
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.modes import evaluating
from scalepoint.quantize import Coverage, QuantConfig, calibrate, coverage, freeze, insert_qdq, save
from scalepoint.report import Report, write
from scalepoint.targets import Target, find_target
from scalepoint.transformation import transform
from scalepoint.verification import Status, Verification, verify
from scalepoint.verification.runner import RuntimeModel

Evaluate = Callable[[Any], float]


@dataclass(frozen=True)
class Deployment:
    """What deploy made."""

    model: fx.GraphModule
    path: Path
    float_path: Path
    coverage: Coverage
    verification: Verification | None
    report: Report
    float_score: float | None = None
    score: float | None = None
    trials: tuple[Trial, ...] = field(default=(), repr=False)

    @property
    def drop(self) -> float | None:
        return None if self.float_score is None or self.score is None else self.float_score - self.score

    def __str__(self) -> str:
        return str(self.report)


def deploy(
    model: nn.Module,
    example_inputs: Any,
    calibration_data: Any,
    *,
    target: str | Target = "onnxruntime",
    config: QuantConfig | Mapping[str, object] | None = None,
    output: str | Path | None = None,
    evaluate: Evaluate | None = None,
    max_drop: float | None = None,
    max_trials: int = 6,
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    strict: bool = False,
    allow_departure: bool = False,
    threads: int = 1,
    progress: bool | None = None,
) -> Deployment:
    """Quantize a model for a target, write the file into the folder `output`, and prove that it runs as it should.

    `evaluate(run)` is your metric, higher is better; `run` is called as the model is. With `max_drop`, layers are left
    float, the most harmful first, until the runtime's score is at most that much below the float model's, or
    `max_trials` is reached; the best file found is kept. A file that departs from the simulation is an error unless
    allow_departure=True.
    """
    if max_drop is not None and evaluate is None:
        raise UsageError("max_drop= needs evaluate=: the metric that must not drop")
    if max_drop is not None and isinstance(calibration_data, Iterator):
        raise UsageError(
            "max_drop= calibrates several times, an iterator gives its data once: pass a list or a function"
        )
    road = _Road(model, as_inputs(example_inputs, kwargs), find_target(target), Path(output or "out"), progress)
    road.options = {"leave": leave, "strict": strict, "threads": threads}
    float_score = None if evaluate is None else road.score("evaluating the float model", evaluate, model)
    trials: list[Trial] = []
    wanted = QuantConfig.build(config)
    best: Trial | None = None
    while True:
        trial = road.attempt(wanted, calibration_data, evaluate, len(trials))
        trials.append(trial)
        if best is None or (trial.score or 0.0) > (best.score or 0.0):
            best = trial
        if max_drop is None or float_score is None or trial.score is None or float_score - trial.score <= max_drop:
            break
        following = None if len(trials) >= max_trials else next_config(trial, len(trials), calibration_data)
        if following is None:
            break
        wanted = following
    return road.finish(best, tuple(trials), float_score, allow_departure)


@dataclass
class _Road:
    """The stages with what they share: the model, its inputs, the target, the folder and the clock."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    target: Target
    folder: Path
    progress: bool | None
    options: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quiet = not (self.progress if self.progress is not None else Console(stderr=True).is_terminal)
        self.console = Console(stderr=True, quiet=quiet)

    def score(self, stage: str, evaluate: Evaluate, run: Any) -> float:
        """The user's metric, without gradients; a model is in eval mode meanwhile."""
        with self._stage(stage), evaluating(run), torch.no_grad():
            return float(evaluate(run))

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(f"{stage} ..."):
            yield
        taken = time.perf_counter() - start
        self.timings[stage] = self.timings.get(stage, 0.0) + taken
        self.console.print(f"{stage}: {taken:.1f} s")

    def attempt(self, config: QuantConfig, data: Any, evaluate: Evaluate | None, number: int) -> Trial:
        """One file: transform, insert, calibrate, export, verify, evaluate."""
        args, kwargs = self.inputs
        with self._stage("capturing"):
            result = transform(self.model, args, target=self.target, kwargs=kwargs, leave=self.options["leave"])
            quantized = insert_qdq(result.model, result.matches, config, strict=self.options["strict"], copy=False)
        start = time.perf_counter()
        calibrate(quantized, data, progress=self.progress)
        freeze(quantized)
        self.timings["calibrating"] = self.timings.get("calibrating", 0.0) + time.perf_counter() - start
        suffix = f"-{number}" if number else ""
        path, float_path = self.folder / f"model{suffix}.onnx", self.folder / "float.onnx"
        with self._stage("exporting"):
            export(
                quantized, path, args, kwargs=kwargs, float_path=None if float_path.exists() and number else float_path
            )
        verification = None
        if self.target.runtime is not None:
            with self._stage("verifying in the runtime"):
                verification = verify(
                    path,
                    quantized,
                    args,
                    kwargs=kwargs,
                    runtime=self.target.runtime,
                    float_path=float_path,
                    threads=self.options["threads"],
                )
        if evaluate is None:
            return Trial(config, quantized, path, float_path, verification, None)
        run = self._runner(path, quantized, verification)
        score = self.score("evaluating the file", evaluate, run)
        return Trial(config, quantized, path, float_path, verification, score, isinstance(run, RuntimeModel))

    def _runner(self, path: Path, quantized: fx.GraphModule, verification: Verification | None) -> Any:
        """What is judged: the file in ONNX Runtime where it runs there, else the simulation."""
        is_there = verification is not None and verification.status == Status.OK
        if is_there and self.target.runtime == "onnxruntime":
            return RuntimeModel(path, self.model, self.inputs, threads=self.options["threads"])
        return quantized

    def _example(self) -> list[Any]:
        """The example as one batch of data."""
        args, kwargs = self.inputs
        return [kwargs if kwargs and not args else tuple(args)]

    def finish(
        self, best: Trial, trials: tuple[Trial, ...], float_score: float | None, allow_departure: bool
    ) -> Deployment:
        final = self.folder / "model.onnx"
        for trial in trials:
            if trial is not best and trial.path != best.path:
                remove(trial.path)
        if best.path != final:
            best.path.replace(final)
            best = replace(
                best, path=final, verification=best.verification and replace(best.verification, path=str(final))
            )
        with self._stage("saving and reporting"):
            save(best.model, self.folder / "quantized")
            report = make_report(self.model, best, trials, float_score, self.target, self._example(), self.timings)
            write(report, self.folder)
        if best.verification is not None and not allow_departure:
            best.verification.check()
        return Deployment(
            best.model,
            best.path,
            best.float_path,
            coverage(best.model),
            best.verification,
            report,
            float_score,
            best.score,
            trials,
        )
