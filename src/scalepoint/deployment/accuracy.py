"""How much is done for accuracy: `accuracy=` of deploy.

    fast        calibration, and biases that take up what the means of the outputs lack
    balanced    codes, scales and biases chosen by closed forms from the calibration data

Nothing is asked for: weights of fewer than 8 bits get `balanced` where there is data, others are rounded to nearest.
"""

from typing import Literal

from torch import fx

from scalepoint.errors import UsageError
from scalepoint.quantize.stubs import WeightFakeQuantize
from scalepoint.tuning import TuneConfig

Accuracy = Literal["fast", "balanced"]
PRESETS: dict[str, TuneConfig] = {"fast": TuneConfig(steps=("intercept",)), "balanced": TuneConfig()}


def tuning_for(model: fx.GraphModule, accuracy: Accuracy | None, *, has_data: bool) -> TuneConfig | None:
    """What is tuned; None when nothing is."""
    if accuracy is not None and not has_data:
        raise UsageError(
            f"accuracy={accuracy!r} reads the calibration data once more, and there is none, or an iterator gives it "
            "only once: pass a list, a loader or a function"
        )
    if accuracy is None:
        accuracy = "balanced" if has_data and _is_narrow(model) else None
    return None if accuracy is None else PRESETS[accuracy]


def check_accuracy(accuracy: str | None) -> None:
    if accuracy is not None and accuracy not in PRESETS:
        raise UsageError(f"accuracy={accuracy!r}: one of {', '.join(PRESETS)}")


def _is_narrow(model: fx.GraphModule) -> bool:
    weights = [each for each in model.modules() if isinstance(each, WeightFakeQuantize)]
    return any(each.spec.n_bits < 8 and not each.quantizer.grid.format.is_float for each in weights)
