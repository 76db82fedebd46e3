"""The `accuracy` option: the tuning steps of a run.

    fast        correct the mean of each layer's output by its bias
    balanced    also choose codes, scales and biases in closed form from the calibration data; for activations below
                8 bits also search their ranges
    best        also gradient steps, per block and then over the whole model, kept only if held-out samples improve

If the option is not given, weights of fewer than 8 bits get "balanced" where there is data; others are rounded to
nearest.
"""

from typing import TYPE_CHECKING

from torch import fx

from scalepoint.options import Accuracy
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize

if TYPE_CHECKING:
    from scalepoint.tuning import TuneConfig

CLOSED_FORM = ("intercept", "target", "scale", "gptq", "descend")  # the default of TuneConfig
PRESETS: dict[str, tuple[str, ...]] = {
    "fast": ("intercept",),
    "balanced": CLOSED_FORM,
    "best": ("ranges", *CLOSED_FORM, "sign_round", "clip", "end_to_end"),
}


def choose_tuning(model: fx.GraphModule, accuracy: Accuracy | None, *, has_data: bool) -> "TuneConfig | None":
    """Return the tuning steps of a quantized model; None if nothing is tuned.

    Args:
        model: The quantized model, before tuning.
        accuracy: The option of deploy.
        has_data: Whether there is data that can be read more than once.
    """
    if accuracy is None:
        accuracy = "balanced" if has_data and _has_narrow_weights(model) else None
    if accuracy is None:
        return None
    from scalepoint.tuning import TuneConfig  # noqa: PLC0415  # most runs do not tune

    has_ranges = accuracy == "balanced" and _has_narrow_activations(model)
    return TuneConfig(steps=("ranges", *CLOSED_FORM) if has_ranges else PRESETS[accuracy])


def _has_narrow_activations(model: fx.GraphModule) -> bool:
    stubs = [module for module in model.modules() if isinstance(module, QuantStub) and module.enabled]
    return any(_is_narrow(stub) for stub in stubs)


def _has_narrow_weights(model: fx.GraphModule) -> bool:
    return any(_is_narrow(module) for module in model.modules() if isinstance(module, WeightFakeQuantize))


def _is_narrow(quantizer: QuantStub | WeightFakeQuantize) -> bool:
    """Whether the codes are integers of fewer than 8 bits."""
    return quantizer.spec.n_bits < 8 and not quantizer.quantizer.grid.format.is_float
