"""Accuracy first: when a file loses too much, the layers that cause it are found and left float, worst first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from scalepoint.analysis import sensitivity
from scalepoint.quantize import Override, QuantConfig
from scalepoint.verification import Verification

BATCHES = 4  # of the calibration data: enough to rank layers


@dataclass(frozen=True)
class Trial:
    """One config and what became of it."""

    config: QuantConfig
    model: fx.GraphModule
    path: Path
    float_path: Path
    verification: Verification | None
    score: float | None
    is_judged_in_runtime: bool = False

    @property
    def left_float(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.config.overrides if each.name and each.weight == "float")


def next_config(trial: Trial, number: int, data: Any) -> QuantConfig | None:
    """The same with more layers left float: 1, 2, 4, .. of those that gain most for what they cost; None when none is
    left."""
    ranked = [row.name for row in sensitivity(trial.model, data, how="proxy", max_batches=BATCHES, progress=False)]
    chosen = [name for name in ranked if name not in trial.left_float][: 2 ** (number - 1)]
    if not chosen:
        return None
    more = tuple(Override(name=name, weight="float", activation="float") for name in chosen)
    return trial.config.model_copy(update={"overrides": (*trial.config.overrides, *more)})
