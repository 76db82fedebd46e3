"""What the user's metric gave: a number, or a word about what is wrong with it."""

import math
import warnings
from typing import Any

from scalepoint.errors import NonFiniteError, ScalepointWarning, UsageError, shown


def judged_as(value: Any, *, is_float: bool) -> float:
    """The score. Of the float model it must be a number, as everything is measured against it; of a file that gives
    none there is a warning, and it is ranked last."""
    try:
        score = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements is a RuntimeError
        raise UsageError(f"evaluate returned {shown(value)}: it must return one number, higher is better") from error
    if math.isnan(score) and is_float:
        raise NonFiniteError(
            "evaluate gave NaN for the float model, so no file can be judged by it: look for an empty data set, a "
            "division by zero or NaN in the model's output"
        )
    if math.isnan(score):
        warnings.warn(
            ScalepointWarning(
                "evaluate gave NaN for the quantized file, a number for the float model: its output holds NaN, or the "
                "metric divides by zero; it is ranked last, and its score says nothing"
            ),
            stacklevel=2,
        )
    return score
