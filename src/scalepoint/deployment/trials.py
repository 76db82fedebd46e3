"""Accuracy first: when a file loses too much, the layers that cause it are found and left float, worst first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from scalepoint.analysis import compare
from scalepoint.quantize import Override, QuantConfig, coverage
from scalepoint.verify import Verification


@dataclass(frozen=True)
class Trial:
    """One config and what became of it."""

    config: QuantConfig
    model: fx.GraphModule
    path: Path
    float_path: Path
    verification: Verification | None
    score: float | None

    @property
    def left_float(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.config.overrides if each.name and each.weight == "float")


def next_config(trial: Trial, config: QuantConfig, number: int, data: Any) -> QuantConfig | None:
    """The same with more layers left float: 1, 2, 4, .. of those that lose most; None when all are."""
    ranked = [name for name in worst_layers(trial.model, data) if name not in trial.left_float]
    chosen = ranked[: 2 ** (number - 1)]
    if not chosen:
        return None
    more = tuple(Override(name=name, weight="float", activation="float") for name in chosen)
    return QuantConfig(
        **{
            **{name: getattr(config, name) for name in QuantConfig.model_fields},
            "overrides": (*config.overrides, *more),
        }
    )


def worst_layers(model: fx.GraphModule, data: Any) -> Sequence[str]:
    """Quantized layers by the error that they add themselves, most first; the cheap ones first among equals."""
    rows = compare(model, data, local=True).rows
    quantized = {row.name for row in coverage(model).in_state("quantized")}
    known = [row for row in rows if row.name in quantized]
    return [row.name for row in sorted(known, key=lambda row: row.local_sqnr_db)]
