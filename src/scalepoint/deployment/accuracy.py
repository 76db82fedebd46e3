"""How much is done for accuracy: `accuracy=` of deploy.

    fast        calibration, and biases that take up what the means of the outputs lack
    balanced    codes, scales and biases chosen by closed forms from the calibration data; activations of fewer than 8
                bits get searched ranges
    best        also by gradients, by blocks and then of the whole net, where held-out samples agree

Nothing is asked for: weights of fewer than 8 bits get `balanced` where there is data, others are rounded to nearest.
"""

from typing import Literal

from torch import fx

from scalepoint.errors import UsageError
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize
from scalepoint.tuning import TuneConfig

Accuracy = Literal["fast", "balanced", "best"]
CLOSED = TuneConfig().steps
PRESETS: dict[str, TuneConfig] = {
    "fast": TuneConfig(steps=("intercept",)),
    "balanced": TuneConfig(),
    "best": TuneConfig(steps=("ranges", *CLOSED, "sign_round", "clip", "end_to_end")),
}


def tuning_for(model: fx.GraphModule, accuracy: Accuracy | None, *, has_data: bool) -> TuneConfig | None:
    """What is tuned; None when nothing is."""
    if accuracy is not None and not has_data:
        raise UsageError(
            f"accuracy={accuracy!r} reads the calibration data once more, and there is none, or an iterator gives it "
            "only once: pass a list, a loader or a function"
        )
    if accuracy is None:
        accuracy = "balanced" if has_data and _is_narrow(model) else None
    if accuracy == "balanced" and _has_narrow_activations(model):
        return TuneConfig(steps=("ranges", *CLOSED))
    return None if accuracy is None else PRESETS[accuracy]


def check_accuracy(accuracy: str | None) -> None:
    if accuracy is not None and accuracy not in PRESETS:
        raise UsageError(f"accuracy={accuracy!r}: one of {', '.join(PRESETS)}")


def _has_narrow_activations(model: fx.GraphModule) -> bool:
    stubs = [each for each in model.modules() if isinstance(each, QuantStub) and each.enabled]
    return any(each.spec.n_bits < 8 and not each.quantizer.grid.format.is_float for each in stubs)


def _is_narrow(model: fx.GraphModule) -> bool:
    weights = [each for each in model.modules() if isinstance(each, WeightFakeQuantize)]
    return any(each.spec.n_bits < 8 and not each.quantizer.grid.format.is_float for each in weights)
