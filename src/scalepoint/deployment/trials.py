"""Trials: the files of one search, and which of them is kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import fx

from scalepoint.errors import UsageError
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Raised, is_within
from scalepoint.tuning import TuneReport
from scalepoint.verification import Verification


@dataclass(frozen=True)
class Bar:
    """How far a score may fall below the float model's, and how fast a file has to be; None: as it likes."""

    float_score: float | None
    max_drop: float | None
    min_speed: float | None = None

    def drop(self, score: float | None) -> float:
        """How far it falls; not a number falls without end."""
        if self.float_score is None or score is None:
            return 0.0
        return math.inf if math.isnan(score) else self.float_score - score

    def holds(self, score: float | None) -> bool:
        if self.max_drop is None or self.float_score is None or score is None:
            return True
        return is_within(self.float_score, score, self.max_drop)

    def is_fast(self, speed: float | None) -> bool:
        return self.min_speed is None or speed is None or speed >= self.min_speed


@dataclass(frozen=True)
class Trial:
    """One config and what became of it."""

    config: QuantConfig
    kept: fx.GraphModule | None = field(repr=False)  # the model, of the best so far; the others need no memory
    file: Path | None  # of the best; the others are gone when the run ends
    float_file: Path | None  # None once a smoke run has ended: it writes none
    verification: Verification | None
    score: float | None
    is_judged_in_runtime: bool = False
    raised: tuple[Raised, ...] = ()
    start: int | None = None  # the trial whose config was raised
    tuned: TuneReport | None = None
    chosen: Mapping[str, str] | None = None  # of a trial that was allocated: the width of every layer
    cost: float = 0.0  # what was added for accuracy, in shares of the float model's size and time

    @property
    def model(self) -> fx.GraphModule:
        if self.kept is None:
            raise UsageError("only the best trial keeps its model: load it, or deploy its config")
        return self.kept

    @property
    def path(self) -> Path:
        if self.file is None:
            raise UsageError("only the best trial keeps its file: deploy its config to make it again")
        return self.file

    @property
    def left_float(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.config.overrides if each.name and each.weight == FLOAT)

    @property
    def speed(self) -> float | None:
        """Times the float file's; None where it was not measured."""
        found = self.verification
        return None if found is None or found.latency is None else found.latency.ratio

    @property
    def rank(self) -> float:
        """Of its score; not a number is worst of all."""
        return -math.inf if self.score is None or math.isnan(self.score) else self.score


@dataclass(frozen=True)
class Step:
    """What the next trial is: a config, and how it differs from that of the trial it starts from."""

    config: QuantConfig
    raised: tuple[Raised, ...] = ()
    start: int | None = None
    chosen: Mapping[str, str] | None = None
    cost: float = 0.0


def best_of(trials: Sequence[Trial], bar: Bar) -> Trial:
    """The cheapest that holds the bar; where none does, or there is none, the highest score. Of equals the earlier,
    which raised less. For speed the first that is fast enough, or the fastest."""
    if bar.min_speed is not None:
        fast = [trial for trial in trials if bar.is_fast(trial.speed)]
        return fast[0] if fast else max(trials, key=lambda trial: trial.speed or 0.0)
    holding = [trial for trial in trials if bar.holds(trial.score)]
    if bar.max_drop is None or not holding:
        return max(trials, key=lambda trial: trial.rank)
    return min(holding, key=lambda trial: (trial.cost, -trial.rank))


def slimmed(trials: Sequence[Trial], bar: Bar) -> list[Trial]:
    """Only the best keeps its model."""
    best = best_of(trials, bar)
    return [trial if trial is best else replace(trial, kept=None) for trial in trials]


def closed(trial: Trial) -> Trial:
    """A trial whose files are not kept."""
    found = trial.verification and replace(trial.verification, path=Path(trial.verification.path).name)
    return replace(trial, file=None, verification=found)
