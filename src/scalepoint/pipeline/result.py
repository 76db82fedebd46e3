"""Results: Trial (one file and its measurements), Limits (of score and speed), Deployment (what deploy returns)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from torch import fx

from scalepoint.errors import UsageError, VerificationError
from scalepoint.quantize import Coverage, QuantConfig, coverage
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Report, notebook_snippet
from scalepoint.report.headline import short_repr
from scalepoint.results import PrecisionAllocation, PrecisionChange, Score, TrialSummary, TuneReport, is_within
from scalepoint.targets.local_times import LocalTimes
from scalepoint.verification import Verification


@dataclass(frozen=True)
class Limits:
    """Limits for the file; None means no limit.

    Attributes:
        float_score: The metric of the float model.
        max_drop: Largest allowed difference between `float_score` and the score of the file.
        min_speed: Smallest allowed speed relative to the float file.
    """

    float_score: float | None
    max_drop: float | None
    min_speed: float | None = None

    def drop(self, score: float | None) -> float:
        """Return the drop from the float score. A NaN score counts as an infinite drop."""
        if self.float_score is None or score is None:
            return 0.0
        return math.inf if math.isnan(score) else self.float_score - score

    def allows_score(self, score: float | None) -> bool:
        if self.max_drop is None or self.float_score is None or score is None:
            return True
        return is_within(self.float_score, score, self.max_drop)

    def allows_speed(self, verification: Verification | None) -> bool:
        """Whether a file is fast enough. A file that was not timed is."""
        latency = None if verification is None else verification.latency
        return self.min_speed is None or latency is None or latency.reaches(self.min_speed)


@dataclass(frozen=True)
class TrialPlan:
    """What the next trial will try.

    Attributes:
        config: The config to quantize with.
        precision_changes: How the config differs from that of trial `start`.
        start: Index of the trial that this one starts from; None for the first.
        chosen: Layer -> chosen precision, if an allocation made the config.
        cost: Added size plus added time for more accuracy, as shares of the float model's size and time.
        local_times: Times measured on this machine, which decide what stays float for speed; None for shipped tables.
    """

    config: QuantConfig
    precision_changes: tuple[PrecisionChange, ...] = ()
    start: int | None = None
    chosen: Mapping[str, str] | None = None
    cost: float = 0.0
    local_times: LocalTimes | None = None


@dataclass(frozen=True)
class Trial:
    """One file and its measurements.

    Attributes:
        config: The config that the model was quantized with.
        quantized: The quantized model; None unless this is the best trial so far, to save memory.
        file: The file; None once the run has ended, unless this is the best trial.
        float_file: The float file; None once a smoke run has ended.
        verification: The result of verify; None if the target has no runtime.
        score: The user's metric of the file.
        is_judged_in_runtime: Whether the metric ran on the file in its runtime, instead of on the simulation.
        tuned: The result of tune; None if the model was not tuned.
        precision_changes, start, chosen, cost, local_times: See TrialPlan.
        number: Counts the trials of a run.
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
    local_times: LocalTimes | None = None
    number: int = 0

    @property
    def model(self) -> fx.GraphModule:
        if self.quantized is None:
            raise UsageError("only the best trial has its model in memory: deploy with the config of this trial")
        return self.quantized

    @property
    def path(self) -> Path:
        if self.file is None:
            raise UsageError("only the best trial has its file: deploy with the config of this trial")
        return self.file

    @property
    def float_layers(self) -> tuple[str, ...]:
        """Names of the layers that the config leaves in float by name."""
        overrides = self.config.overrides
        return tuple(override.name for override in overrides if override.name and override.weight == FLOAT)

    @property
    def speed(self) -> float | None:
        """Speed relative to the float file; None if it was not measured."""
        verification = self.verification
        return None if verification is None or verification.latency is None else verification.latency.ratio

    @property
    def comparable_score(self) -> float:
        """The score for comparisons. NaN and a missing score are the worst."""
        return -math.inf if self.score is None or math.isnan(self.score) else self.score

    def summary(self, *, is_best: bool) -> TrialSummary:
        """Return the row of this trial in the report."""
        return TrialSummary(self.score, self.precision_changes, self.start, is_best, self.speed)

    def without_model(self) -> "Trial":
        return replace(self, quantized=None)

    def without_files(self) -> "Trial":
        verification = self.verification
        if verification is not None:
            verification = replace(verification, path=Path(verification.path).name)
        return replace(self, file=None, verification=verification)


def best_trial(trials: Sequence[Trial], limits: Limits) -> Trial:
    """Choose the trial whose file is written. Ties go to the earlier trial, which has fewer changes.

    Without limits: the last trial. With `min_speed`: the first trial that is fast enough, or the fastest. With
    `max_drop`: the cheapest trial within the limit, or the trial with the highest score if none is.
    """
    if limits.min_speed is not None:
        fast = [trial for trial in trials if limits.allows_speed(trial.verification)]
        return fast[0] if fast else max(trials, key=lambda trial: trial.speed or 0.0)
    if limits.max_drop is None:
        return trials[-1]
    within_limit = [trial for trial in trials if limits.allows_score(trial.score)]
    if not within_limit:
        return max(trials, key=lambda trial: trial.comparable_score)
    return min(within_limit, key=lambda trial: (trial.cost, -trial.comparable_score))


def drop_models(trials: Sequence[Trial], limits: Limits) -> list[Trial]:
    """Return the trials with the model of all but the best removed, to save memory."""
    best = best_trial(trials, limits)
    return [trial if trial is best else trial.without_model() for trial in trials]


@dataclass(frozen=True, repr=False)
class Deployment:
    """The result of deploy and deploy_checkpoint. Print it for a summary.

    Attributes:
        model: The quantized model, which simulates the file.
        path: The file, or the folder of a checkpoint.
        float_path: The float file, or the folder of the float checkpoint; None after smoke=True, which writes none.
        coverage: The precision of every operation, and the reason if it stays float.
        verification: The result of running the file in its runtime; None if the target has no runtime, and for a
            checkpoint (see `report.language`).
        report: All results as plain data; print it, or open report.html.
        trials: All files that were tried. Only the best has its model and its file.
        tuned: The result of tune; None if the model was not tuned.
        allocation: The precision of every layer, if `budget` or `max_drop` chose it.
    """

    model: fx.GraphModule
    path: Path
    float_path: Path | None
    coverage: Coverage
    verification: Verification | None
    report: Report
    trials: tuple[Trial, ...] = ()
    tuned: TuneReport | None = None
    allocation: PrecisionAllocation | None = None

    @classmethod
    def from_trials(cls, best: Trial, report: Report, trials: Sequence[Trial]) -> Self:
        """Make the result of a deploy from its trials, the best one chosen."""
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
        """The metric of the file: of `evaluate`, or perplexity. None if it was not measured."""
        return None if self._score is None else self._score.value

    @property
    def float_score(self) -> float | None:
        """The metric of the float model."""
        return None if self._score is None else self._score.float_value

    @property
    def higher_is_better(self) -> bool:
        """Direction of the scores: True for a metric of `evaluate`, False for perplexity."""
        return self._score is None or self._score.higher_is_better

    @property
    def drop(self) -> float | None:
        """Difference to the float score in the worse direction; negative if the quantized model is better."""
        return None if self._score is None else self._score.drop

    def checked(self) -> Self:
        """Return this deployment if the file matches the simulation.

        Raises:
            VerificationError: The runtime cannot run the file, or computes other values. The error has this deployment
                as `deployment`.
        """
        try:
            if self.verification is not None:
                self.verification.check()
            if self.report.language is not None:
                self.report.language.check(str(self.path))
        except VerificationError as error:
            error.deployment = self
            raise
        return self

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        return f"Deployment({short_repr(self.report, self.path)})"

    def _repr_html_(self) -> str:
        """Render the report as HTML for a notebook."""
        return notebook_snippet(self.report)
