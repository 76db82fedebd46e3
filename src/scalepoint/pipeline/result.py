"""Results: Trial (one file and what was measured), Limits (what a file must hold), Deployment (what deploy returns)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from torch import fx

from scalepoint.errors import UsageError
from scalepoint.quantize import Coverage, QuantConfig, coverage
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Report, notebook_snippet
from scalepoint.results import PrecisionAllocation, PrecisionChange, Score, TrialSummary, TuneReport, is_within
from scalepoint.verification import Verification


@dataclass(frozen=True)
class Limits:
    """What a file must hold; None is no limit.

    Attributes:
        float_score: The metric of the float model.
        max_drop: How far the score may fall below it.
        min_speed: How many times as fast as the float file a file must be.
    """

    float_score: float | None
    max_drop: float | None
    min_speed: float | None = None

    def drop(self, score: float | None) -> float:
        """How far a score is below the float model's; NaN counts as infinitely far."""
        if self.float_score is None or score is None:
            return 0.0
        return math.inf if math.isnan(score) else self.float_score - score

    def allows_score(self, score: float | None) -> bool:
        if self.max_drop is None or self.float_score is None or score is None:
            return True
        return is_within(self.float_score, score, self.max_drop)

    def allows_speed(self, speed: float | None) -> bool:
        return self.min_speed is None or speed is None or speed >= self.min_speed


@dataclass(frozen=True)
class TrialPlan:
    """What the next trial makes.

    Attributes:
        config: Its config.
        precision_changes: How the config differs from that of trial `start`.
        start: Index of the trial that this one starts from; None for the first.
        chosen: Layer -> chosen precision, if an allocation made the config.
        cost: What was added for accuracy, in shares of the float model's size and time.
    """

    config: QuantConfig
    precision_changes: tuple[PrecisionChange, ...] = ()
    start: int | None = None
    chosen: Mapping[str, str] | None = None
    cost: float = 0.0


@dataclass(frozen=True)
class Trial:
    """One file, and what was measured of it. See TrialPlan for the last fields.

    Attributes:
        config: Its config.
        quantized: The quantized model; None unless this is the best trial so far, to save memory.
        file: The file; None once the run has ended, unless this is the best trial.
        float_file: The float file; None once a smoke run has ended.
        verification: What the runtime did with the file.
        score: The user's metric.
        is_judged_in_runtime: Whether the metric ran on the file in its runtime, instead of on the simulation.
        tuned: What tuning did.
    """

    config: QuantConfig
    quantized: fx.GraphModule | None = field(repr=False)
    file: Path | None
    float_file: Path | None
    verification: Verification | None
    score: float | None
    is_judged_in_runtime: bool = False
    precision_changes: tuple[PrecisionChange, ...] = ()
    start: int | None = None
    tuned: TuneReport | None = None
    chosen: Mapping[str, str] | None = None
    cost: float = 0.0

    @property
    def model(self) -> fx.GraphModule:
        if self.quantized is None:
            raise UsageError("only the best trial keeps its model: load it, or deploy its config")
        return self.quantized

    @property
    def path(self) -> Path:
        if self.file is None:
            raise UsageError("only the best trial keeps its file: deploy its config to make it again")
        return self.file

    @property
    def float_layers(self) -> tuple[str, ...]:
        """Layers that the config leaves in float by name."""
        return tuple(each.name for each in self.config.overrides if each.name and each.weight == FLOAT)

    @property
    def speed(self) -> float | None:
        """Speed relative to the float file; None if it was not measured."""
        verification = self.verification
        return None if verification is None or verification.latency is None else verification.latency.ratio

    @property
    def comparable_score(self) -> float:
        """The score for comparisons; NaN and no score are the worst."""
        return -math.inf if self.score is None or math.isnan(self.score) else self.score

    def summary(self, *, is_best: bool) -> TrialSummary:
        """The row of this trial in the report."""
        return TrialSummary(self.score, self.precision_changes, self.start, is_best, self.speed)

    def without_model(self) -> "Trial":
        return replace(self, quantized=None)

    def without_files(self) -> "Trial":
        verification = self.verification
        if verification is not None:
            verification = replace(verification, path=Path(verification.path).name)
        return replace(self, file=None, verification=verification)


def best_trial(trials: Sequence[Trial], limits: Limits) -> Trial:
    """The trial to keep.

    With `min_speed`: the first that is fast enough, or the fastest. With `max_drop`: the cheapest that holds it. Else,
    or if none holds it: the highest score. Among equals the earlier one, which raised less.
    """
    if limits.min_speed is not None:
        fast = [trial for trial in trials if limits.allows_speed(trial.speed)]
        return fast[0] if fast else max(trials, key=lambda trial: trial.speed or 0.0)
    holding = [trial for trial in trials if limits.allows_score(trial.score)]
    if limits.max_drop is None or not holding:
        return max(trials, key=lambda trial: trial.comparable_score)
    return min(holding, key=lambda trial: (trial.cost, -trial.comparable_score))


def drop_models(trials: Sequence[Trial], limits: Limits) -> list[Trial]:
    """The same trials; only the best keeps its model."""
    best = best_trial(trials, limits)
    return [trial if trial is best else trial.without_model() for trial in trials]


@dataclass(frozen=True)
class Deployment:
    """What deploy and deploy_checkpoint return.

    Attributes:
        model: The quantized model: the simulation of the file.
        path: The file, or the folder of a checkpoint.
        float_path: The float file; None after smoke=True, which writes none.
        coverage: What became of every operation.
        verification: What the runtime did with the file; None if no runtime of the target is known.
        report: All of it as plain data; print it, or open report.html.
        trials: All files that were made. Only the best keeps its model and its file.
        tuned: What tuning did.
        allocation: Which layer got which precision, for a budget or max_drop.
    """

    model: fx.GraphModule = field(repr=False)  # its repr shows class names as they are, with control characters
    path: Path
    float_path: Path | None
    coverage: Coverage
    verification: Verification | None
    report: Report
    trials: tuple[Trial, ...] = field(default=(), repr=False)
    tuned: TuneReport | None = field(default=None, repr=False)
    allocation: PrecisionAllocation | None = field(default=None, repr=False)

    @classmethod
    def from_trials(cls, best: Trial, report: Report, trials: Sequence[Trial]) -> Self:
        best.model.eval()  # the file computes in eval mode, whatever mode the float model was in
        return cls(
            model=best.model,
            path=best.path,
            float_path=best.float_file,
            coverage=coverage(best.model),
            verification=best.verification,
            report=report,
            trials=tuple(trials),
            tuned=best.tuned,
            allocation=report.allocation,
        )

    @property
    def _score(self) -> Score | None:
        return self.report.accuracy[0] if self.report.accuracy else None

    @property
    def score(self) -> float | None:
        """The metric of the file; None if it was not measured."""
        return None if self._score is None else self._score.value

    @property
    def float_score(self) -> float | None:
        """The metric of the float model."""
        return None if self._score is None else self._score.float_value

    @property
    def higher_is_better(self) -> bool:
        """The direction of the scores: True for a metric of `evaluate`, False for perplexity."""
        return self._score is None or self._score.higher_is_better

    @property
    def drop(self) -> float | None:
        """How much worse the score is than the float model's; negative if it is better."""
        return None if self._score is None else self._score.drop

    def checked(self) -> Self:
        """Return itself if the file matches the simulation.

        Raises:
            VerificationError: The runtime cannot run the file, or computes something else.
        """
        if self.verification is not None:
            self.verification.check()
        if self.report.language is not None:
            self.report.language.check(str(self.path))
        return self

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return notebook_snippet(self.report)
