"""The `accuracy` option: which steps of tuning a run gets.

    fast        biases that correct the mean of each layer's output
    balanced    codes, scales and biases chosen in closed form from the calibration data; activations of fewer than 8
                bits also get searched ranges
    best        also gradient steps, per block and then over the whole net, where held-out samples agree

If the option is not given, weights of fewer than 8 bits get "balanced" where there is data; others are rounded to
nearest.
"""

from typing import TYPE_CHECKING

from torch import fx

from scalepoint.errors import UsageError
from scalepoint.options import Accuracy
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize

if TYPE_CHECKING:
    from scalepoint.tuning import TuneConfig

CLOSED_FORM = ("intercept", "target", "scale", "gptq", "descend")  # the default of TuneConfig
PRESETS: dict[str, tuple[str, ...]] = {
    "fast": ("intercept",),
    "balanced": CLOSED_FORM,
    "best": ("ranges", *CLOSED_FORM, "sign_round", "clip", "end_to_end"),
}


def choose_tuning(model: fx.GraphModule, accuracy: Accuracy | None, *, has_data: bool) -> "TuneConfig | None":
    """The steps to run; None if nothing is tuned."""
    if accuracy is None:
        accuracy = "balanced" if has_data and _has_narrow_weights(model) else None
    if accuracy is None:
        return None
    from scalepoint.tuning import TuneConfig  # noqa: PLC0415  # most runs do not tune

    has_ranges = accuracy == "balanced" and _has_narrow_activations(model)
    return TuneConfig(steps=("ranges", *CLOSED_FORM) if has_ranges else PRESETS[accuracy])


def check_accuracy(accuracy: str | None) -> None:
    if accuracy is not None and accuracy not in PRESETS:
        raise UsageError(f"accuracy={accuracy!r}: one of {', '.join(PRESETS)}")


def _has_narrow_activations(model: fx.GraphModule) -> bool:
    stubs = [each for each in model.modules() if isinstance(each, QuantStub) and each.enabled]
    return any(each.spec.n_bits < 8 and not each.quantizer.grid.format.is_float for each in stubs)


def _has_narrow_weights(model: fx.GraphModule) -> bool:
    weights = [each for each in model.modules() if isinstance(each, WeightFakeQuantize)]
    return any(each.spec.n_bits < 8 and not each.quantizer.grid.format.is_float for each in weights)
