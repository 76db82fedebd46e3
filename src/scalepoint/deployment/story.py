"""The whole road in one call: a float model in, the file that its target runs out, with the proof beside it.

    capture, transform -> insert Q/DQ -> calibrate -> export -> verify in the runtime -> evaluate -> report

Each step is a public function of its own; this file only calls them in order (`stages.py` with what they share).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import fx, nn

from scalepoint.deployment.journal import Journal
from scalepoint.deployment.reporting import make_report
from scalepoint.deployment.stages import Road
from scalepoint.deployment.trials import Step, Trial, best_of, slimmed
from scalepoint.errors import UsageError
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import Coverage, QuantConfig, coverage
from scalepoint.report import Report, is_within, write
from scalepoint.targets import Target, find_target
from scalepoint.verification import Verification


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
    evaluate: Callable[[Any], float] | None = None,
    max_drop: float | None = None,
    max_trials: int = 6,
    max_batches: int | None = None,
    on_nan: Literal["error", "skip"] = "error",
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    strict: bool = False,
    allow_departure: bool = False,
    float_dtype: str | None = None,
    threads: int = 1,
    smoke: bool = False,
    resume: bool = False,
    progress: bool | None = None,
) -> Deployment:
    """Quantize a model for a target, write the file into the folder `output`, and prove that it runs as it should.

    `evaluate(run)` is your metric, higher is better; `run` is called as the model is. With `max_drop`, more precision
    goes where it wins most for its cost, until the score is at most that much below the float model's, or `max_trials`
    is reached; the best file found is kept. A file that departs from the simulation is an error unless
    allow_departure=True. on_nan="skip" calibrates without the batches that hold NaN or infinity. `float_dtype`
    ("float16", "bfloat16") types what is not quantized, where the target runs it. smoke=True goes through all stages
    fast: two batches, one trial, no latency. What a run that did not end has done stays in `output`; resume=True goes
    on from there, and does again what has changed since.
    """
    _check(calibration_data, evaluate, max_drop)
    inputs, found, folder = as_inputs(example_inputs, kwargs), find_target(target), Path(output or "out")
    found.check_float_dtype(float_dtype)
    wanted = QuantConfig.build(config)
    with Journal.opened(folder, resume=resume) as journal:
        road = Road(
            model, inputs, calibration_data, found, journal, evaluate, tuple(leave), strict, threads, max_batches,
            smoke, progress, float_dtype, on_nan,
        )  # fmt: skip
        float_score = road.float_score()
        trials = [road.attempt(0, Step(wanted))]
        while not smoke and len(trials) < max_trials and (drop := _too_much(float_score, trials, max_drop)) is not None:
            step = road.next_step(trials, drop, max_drop or 0.0)
            if step is None:
                break
            trials = slimmed([*trials, road.attempt(len(trials), step)])
        chosen = best_of(trials)
        best = road.place(chosen, folder)
        trials = [best if trial is chosen else trial for trial in trials]
        with road.clock("reporting"):
            report = make_report(road, best, trials, float_score, max_drop)
            write(report, folder)
    if best.verification is not None and not allow_departure:
        best.verification.check()
    counted = coverage(best.model)
    return Deployment(
        best.model, best.path, best.float_path, counted, best.verification, report, float_score, best.score,
        tuple(trials),
    )  # fmt: skip


def _check(data: Any, evaluate: Any, max_drop: float | None) -> None:
    if max_drop is not None and evaluate is None:
        raise UsageError("max_drop= needs evaluate=: the metric that must not drop")
    if max_drop is not None and isinstance(data, Iterator):
        raise UsageError(
            "max_drop= calibrates several times, an iterator gives its data once: pass a list or a function"
        )


def _too_much(float_score: float | None, trials: Sequence[Trial], max_drop: float | None) -> float | None:
    """How far the best trial falls below the float model, when that is more than is allowed."""
    score = best_of(trials).score
    if max_drop is None or float_score is None or score is None or is_within(float_score, score, max_drop):
        return None
    return float_score - score
