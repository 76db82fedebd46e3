"""The steps of tuning. Importing this package registers them."""

from scalepoint.tuning.steps import descend, gptq, learned_scales, ranges, scale, sign_round, target
from scalepoint.tuning.steps.registry import (
    INTERCEPT,
    LayerStep,
    PieceStep,
    StubStep,
    TuningStep,
    find_step,
    register,
    step_names,
)

__all__ = [
    "INTERCEPT",
    "LayerStep",
    "PieceStep",
    "StubStep",
    "TuningStep",
    "descend",
    "find_step",
    "gptq",
    "learned_scales",
    "ranges",
    "register",
    "scale",
    "sign_round",
    "step_names",
    "target",
]
