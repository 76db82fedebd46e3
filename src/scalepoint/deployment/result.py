"""What deploy returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from torch import fx

from scalepoint.deployment.trials import Trial
from scalepoint.quantize import Coverage, coverage
from scalepoint.report import Allocated, Report, notebook_snippet
from scalepoint.tuning import TuneReport
from scalepoint.verification import Verification


@dataclass(frozen=True)
class Deployment:
    """What deploy made. Of the trials only the best keeps its model and its files."""

    model: fx.GraphModule = field(repr=False)  # torch shows the names of classes as they are, controls too
    path: Path
    float_path: Path | None  # None after smoke=True, which writes no float file
    coverage: Coverage
    verification: Verification | None
    report: Report
    float_score: float | None = None
    score: float | None = None
    trials: tuple[Trial, ...] = field(default=(), repr=False)
    tuned: TuneReport | None = field(default=None, repr=False)
    allocation: Allocated | None = field(default=None, repr=False)

    @classmethod
    def of(cls, best: Trial, report: Report, float_score: float | None, trials: Sequence[Trial]) -> Self:
        best.model.eval()  # as the file computes, in whatever mode the float model was given
        found = (best.verification, report, float_score, best.score, tuple(trials), best.tuned, report.allocation)
        return cls(best.model, best.path, best.float_file, coverage(best.model), *found)

    @property
    def higher_is_better(self) -> bool:
        """The direction of the scores: True for a metric of `evaluate`, False for perplexity."""
        return all(metric.higher_is_better for metric in self.report.accuracy[:1])

    @property
    def drop(self) -> float | None:
        """How much worse the score is than the float model's; below 0: it is better."""
        if self.float_score is None or self.score is None:
            return None
        change = self.score - self.float_score
        return -change if self.higher_is_better else change

    def checked(self) -> Self:
        """Return itself where the file does as the simulation.

        Raises:
            VerificationError: the runtime cannot run the file, or computes something else.
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
