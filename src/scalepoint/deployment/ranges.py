"""Ranges by the other method: free at run time, so it is what `max_drop` tries first, and the metric decides."""

from typing import Any

from scalepoint.quantize import Override, QuantConfig
from scalepoint.quantize.config import FLOAT, TensorQuantConfig
from scalepoint.spec import QParamsCalculatorBase as Calculators
from scalepoint.spec import QuantizationSpec, RangeCalculatorBase
from scalepoint.targets import Target

RANGES = "other ranges"
CLIPPING = ("histogram_mse", "histogram_percentile", "histogram_entropy", "moving_average")


def other_ranges(config: QuantConfig, target: Target) -> QuantConfig:
    """The same config with ranges by the other method: min-max where values are clipped, least squared error where they
    are not; ranges of 8-bit weights stay."""
    update: dict[str, Any] = {
        "activation": _other(config.activation or (None if target.activations else target.activation), "activation"),
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
