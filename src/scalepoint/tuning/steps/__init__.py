"""The steps of tuning, one file each."""

from scalepoint.tuning.steps import descend, gptq, scale, target
from scalepoint.tuning.steps.registry import INTERCEPT, Step, find_step, register, step_names

__all__ = ["INTERCEPT", "Step", "descend", "find_step", "gptq", "register", "scale", "step_names", "target"]
