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

    model: fx.GraphModule
    path: Path
    float_path: Path
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
    def drop(self) -> float | None:
        return None if self.float_score is None or self.score is None else self.float_score - self.score

    def checked(self) -> Self:
        """Itself, where the file does as the simulation; else an error."""
        if self.verification is not None:
            self.verification.check()
        return self

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return notebook_snippet(self.report)
