"""The settings of `tune`.

A piece is a part of the graph that is tuned and compared as one (see pieces.py). A step improves the codes of a layer,
the range of an activation quantizer, or a piece (see steps/registry.py).
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from scalepoint.errors import ConfigError
from scalepoint.support.validation_errors import Config
from scalepoint.tuning.pieces import Unit
from scalepoint.tuning.steps import INTERCEPT, find_step, step_names

_BYTES_PER_UNIT = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _parse_bytes(value: Any) -> Any:
    """Convert a size with a unit, such as "2GB", to bytes; anything else is left to pydantic.

    float() raises ValueError for a text such as "xGB", which pydantic reports as an error of this field.
    """
    text = str(value).strip().upper().replace(" ", "")
    for unit, size in _BYTES_PER_UNIT.items():
        if text.endswith(unit):
            count = float(text.removesuffix(unit)) * size
            return int(count) if math.isfinite(count) else value  # int(inf) raises OverflowError
    return value


class TuneConfig(Config):
    """Settings of `tune`.

    Attributes:
        steps: Names of the steps, in order.
        unit: The size of a piece: "layer", "block" or "model".
        rows: Rows of data used per layer.
        ridge: Regularization of the step "target", as a share of the mean diagonal of H, the covariance of a layer's
            inputs. "auto" compares several on held-out rows.
        holdout: Share of the samples that are only used to compare results.
        iterations: Iterations of the gradient steps.
        memory: Bytes of memory for activations between layers, or a text such as "2GB"; more goes to disk.
    """

    steps: tuple[str, ...] = (INTERCEPT, "target", "scale", "gptq", "descend")
    unit: Unit = "block"
    rows: Annotated[int, Field(ge=64)] = 16_384
    ridge: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    iterations: Annotated[int, Field(ge=1)] = 200
    memory: Annotated[int, BeforeValidator(_parse_bytes), Field(ge=1_000_000)] = 2_000_000_000

    def check(self, *, has_weight_provider: bool = False) -> None:
        """Check the names of the steps. With a weight provider there may be none: codes are rounded to nearest."""
        for name in self.steps:
            if name != INTERCEPT:  # not registered: it shifts biases while layers are solved
                find_step(name)
        if not self.steps and not has_weight_provider:
            raise ConfigError(f"steps=() tunes nothing: choose from {', '.join(step_names())}")
