"""The steps of tuning, one file each."""

from scalepoint.tuning.steps import ada_round, clip, descend, gptq, ranges, scale, sign_round, target
from scalepoint.tuning.steps.registry import (
    INTERCEPT,
    LayerStep,
    PieceStep,
    Step,
    StubStep,
    find_step,
    register,
    step_names,
)

__all__ = [
    "INTERCEPT",
    "LayerStep",
    "PieceStep",
    "Step",
    "StubStep",
    "ada_round",
    "clip",
    "descend",
    "find_step",
    "gptq",
    "ranges",
    "register",
    "scale",
    "sign_round",
    "step_names",
    "target",
]
