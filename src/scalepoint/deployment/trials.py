"""Accuracy first: when a file loses too much, the next one gets more precision where that wins most for its cost.

    ranges   of all tensors by another method: free at run time, so it is tried first, and the metric decides
    int8     weights of fewer than 8 bits get 8: the file grows
    float    a layer is left as it is: slower and larger

    gain = the noise to signal that the layer is expected to put on the output (sensitivity by proxy)
    cost = the share of the model's MACs or weights that becomes dearer

Layers are raised in the order of gain per cost until the noise that is left is as much smaller as the drop has to be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter
from torch import fx

from scalepoint.analysis import Sensitivity, sensitivity
from scalepoint.errors import UsageError
from scalepoint.numerics import format_of
from scalepoint.quantize import Override, QuantConfig
from scalepoint.quantize.config import FLOAT, TensorQuantConfig
from scalepoint.quantize.stubs import WeightFakeQuantize
from scalepoint.report import Raised, is_within
from scalepoint.spec import QParamsCalculatorBase as Calculators
from scalepoint.spec import QuantizationSpec, RangeCalculatorBase
from scalepoint.targets import Target
from scalepoint.tuning import TuneReport
from scalepoint.verification import Verification

BATCHES = 4  # of the calibration data: enough to rank layers
LEAST, MOST = 0.1, 0.5  # how much of the noise may stay after one step
BROKEN = 1e12  # the gain of a layer that breaks the model
RANGES, INT8 = "other ranges", "int8 weights"
CLIPPING = ("histogram_mse", "histogram_percentile", "histogram_entropy", "moving_average")


@dataclass(frozen=True)
class Trial:
    """One config and what became of it."""

    config: QuantConfig
    kept: fx.GraphModule | None  # the model, of the best so far; the others need no memory
    file: Path | None  # of the best; the others are gone when the run ends
    float_file: Path
    verification: Verification | None
    score: float | None
    is_judged_in_runtime: bool = False
    raised: tuple[Raised, ...] = ()
    start: int | None = None  # the trial whose config was raised
    tuned: TuneReport | None = None

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
    def rank(self) -> float:
        """Of its score; not a number is worst of all."""
        return -math.inf if self.score is None or math.isnan(self.score) else self.score


@dataclass(frozen=True)
class Step:
    """What the next trial is: a config, and how it differs from that of the trial it starts from."""

    config: QuantConfig
    raised: tuple[Raised, ...] = ()
    start: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "raised": self.raised, "start": self.start}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        raised = TypeAdapter(tuple[Raised, ...]).validate_python(saved["raised"])
        return cls(QuantConfig.from_dict(saved["config"]), raised, saved["start"])


def best_of(trials: Sequence[Trial]) -> Trial:
    """The highest score; the earlier, which raised less, of equals."""
    return max(trials, key=lambda trial: trial.rank)


def slimmed(trials: Sequence[Trial]) -> list[Trial]:
    """Only the best keeps its model."""
    best = best_of(trials)
    return [trial if trial is best else replace(trial, kept=None) for trial in trials]


def closed(trial: Trial) -> Trial:
    """A trial whose files are not kept."""
    found = trial.verification and replace(trial.verification, path=Path(trial.verification.path).name)
    return replace(trial, file=None, verification=found)


def too_much(float_score: float | None, trials: Sequence[Trial], max_drop: float | None) -> float | None:
    """How far the best trial falls below the float model, when that is more than is allowed."""
    score = best_of(trials).score
    if max_drop is None or float_score is None or score is None or is_within(float_score, score, max_drop):
        return None
    return float_score - score


def next_step(trials: Sequence[Trial], drop: float, max_drop: float, target: Target, data: Any) -> Step | None:
    """What to try after these trials; None when nothing can be raised any more."""
    if len(trials) == 1:
        config = other_ranges(trials[0].config, target)
        if config != trials[0].config:
            return Step(config, (Raised("", RANGES),), 0)
    start = best_of(trials)
    index = next(index for index, trial in enumerate(trials) if trial is start)
    repeats = 1 + sum(trial.start == index and _has_layers(trial) for trial in trials)
    share = min(max(max_drop / drop if drop > 0 else MOST, LEAST), MOST)
    rows = sensitivity(start.model, data, how="proxy", max_batches=BATCHES, progress=False)
    narrow = _narrow_layers(start.model)
    chosen = _chosen(rows, {name: spec.n_bits for name, spec in narrow.items()}, share**repeats)
    if not chosen:
        return None
    kinds = {row.name: row.kind for row in rows}
    more = tuple(
        Override(name=each.layer, weight=_eight_bits(narrow[each.layer], target, kinds[each.layer]))
        if each.to == INT8
        else Override(name=each.layer, weight=FLOAT, activation=FLOAT)
        for each in chosen
    )
    config = start.config.model_copy(update={"overrides": (*start.config.overrides, *more)})
    return Step(config, tuple(chosen), index)


def _has_layers(trial: Trial) -> bool:
    return any(each.layer for each in trial.raised)


def _chosen(rows: Sequence[Sensitivity], bits: dict[str, int], share: float) -> list[Raised]:
    """Steps by gain per cost, until no more than this share of the noise is left."""
    steps = sorted((_step(row, bits.get(row.name)) for row in rows if not row.score <= 0), key=_gain_per_cost)
    left = allowed = sum(each.gain or 0.0 for each in steps)
    chosen: list[Raised] = []
    for each in steps:
        if left <= allowed * share and chosen:
            break
        chosen.append(each)
        left -= each.gain or 0.0
    return _sparing(chosen, {row.name for row in rows if row.parameters})


def _sparing(chosen: list[Raised], weighted: set[str]) -> list[Raised]:
    """At least one layer with weights stays quantized: otherwise there is nothing to deploy."""
    floats = [each for each in chosen if each.to == FLOAT and each.layer in weighted]
    return [each for each in chosen if each is not floats[-1]] if len(floats) == len(weighted) and floats else chosen


def _step(row: Sensitivity, bits: int | None) -> Raised:
    gain = row.score if math.isfinite(row.score) else BROKEN
    if bits is None:
        return Raised(row.name, FLOAT, gain, row.cost)
    return Raised(row.name, INT8, gain * (1 - 4.0 ** (bits - 8)), row.cost * (8 - bits) / (32 - bits))


def _gain_per_cost(each: Raised) -> float:
    return -(each.gain or 0.0) / each.cost


def _narrow_layers(model: fx.GraphModule) -> dict[str, QuantizationSpec]:
    """The layers whose weights have fewer than 8 bits."""
    found = [each for each in model.modules() if isinstance(each, WeightFakeQuantize) and each.enabled]
    return {name: each.spec for each in found if each.spec.n_bits < 8 for name in each.consumers}


def _eight_bits(spec: QuantizationSpec, target: Target, kind: str) -> QuantizationSpec:
    """The same spec with 8 bits where the target runs that, else the target's own."""
    if format_of(spec.dtype).is_float:
        return target.weight
    try:
        wide = spec.replace(dtype=torch.int8)
        target.check(wide, "weight", kind, "")
    except ValueError:
        return target.weight
    return wide


def other_ranges(config: QuantConfig, target: Target) -> QuantConfig:
    """The same config with ranges by the other method: min-max where values are clipped, least squared error where they
    are not; ranges of 8-bit weights stay."""
    update: dict[str, Any] = {
        "activation": _other(config.activation or target.activation, "activation"),
        "weight": _other(config.weight or target.weight, "weight"),
        "overrides": tuple(_other_override(each) for each in config.overrides),
    }
    kept = {"activation": target.activation, "weight": target.weight}
    return config.model_copy(
        update={name: value for name, value in update.items() if value != (getattr(config, name) or kept.get(name, ()))}
    )


def _other_override(override: Override) -> Override:
    roles = ("activation", "input", "output", "weight")
    return override.model_copy(update={role: _other(getattr(override, role), role) for role in roles})


def _other(said: Any, role: str) -> Any:
    if said is None or said == FLOAT:
        return said
    spec: QuantizationSpec = said
    if isinstance(said, TensorQuantConfig):
        spec = said.weight_spec() if role == "weight" else said.activation_spec()
    if role == "weight":
        key = RangeCalculatorBase.key_of(spec.range_calculator_cls)
        if key in ("mse", "percentile", "entropy"):
            return spec.replace(range_calculator_cls="minmax")
        return spec.replace(range_calculator_cls="mse") if key == "minmax" and spec.n_bits < 8 else said
    key = Calculators.key_of(spec.qparam_calculator_cls)
    if key in CLIPPING:
        return spec.replace(qparam_calculator_cls="global_minmax")
    return spec.replace(qparam_calculator_cls="histogram_mse") if key == "global_minmax" else said
