"""quantize(): turns a float model into a calibrated one in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from scalepoint.errors import UsageError
from scalepoint.patterns import Pattern
from scalepoint.quantize.batches import Data
from scalepoint.quantize.calibrate import calibrate
from scalepoint.quantize.config import FLOAT, QuantConfig
from scalepoint.quantize.insert import insert_qdq
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.targets import Target
from scalepoint.transformation import transform


def quantize(
    model: nn.Module,
    args: Any = None,
    config: QuantConfig | Mapping[str, object] | None = None,
    *,
    forward_loop: Data | None = None,
    freeze_weights: bool = True,
    target: str | Target | None = None,
    patterns: Sequence[Pattern] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    dynamic_axes: Any = None,
    strict: bool = False,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> fx.GraphModule:
    """Quantize a model in one call: transform, insert_qdq, smooth, calibrate, freeze. The result can still be trained.

    Args:
        model: The float model.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs.
        config: What to quantize and how; the target's default if not given.
        forward_loop: Calibration data or a function, as for `calibrate`. Not needed if only weights are quantized.
        freeze_weights: Make the scales of the weights constants.
        target: A target or its name.
        patterns: The patterns to look for; those of the target by default.
        kwargs: Keyword inputs of the model.
        leave: Names of submodules that are called as they are and not quantized.
        dynamic_axes: Axes that stay free besides the batch, such as {"x": {2: "height", 3: "width"}}.
        strict: Raise an error if an operation would stay float without being asked to.
        max_batches: Stop calibration after this many batches.
        progress: Show a progress bar. None shows it on a terminal only.

    Returns:
        The quantized model.
    """
    result = transform(model, args, patterns, target, kwargs=kwargs, leave=leave, dynamic_axes=dynamic_axes)
    quantized = insert_qdq(result.model, result.matches, config, strict=strict, copy=False)
    if forward_loop is not None:
        calibrate(quantized, forward_loop, max_batches=max_batches, progress=progress, freeze_weights=freeze_weights)
    elif QuantConfig.build(config).migrations:
        raise UsageError("migrations are chosen and checked with data: pass forward_loop=, or omit migrate=")
    elif any(isinstance(module, QuantStub) for module in quantized.modules()):
        raise UsageError(
            f"ranges of activations must be measured on data: pass forward_loop=, or quantize only weights with "
            f"QuantConfig(activation={FLOAT!r})"
        )
    else:
        calibrate(quantized, [], freeze_weights=freeze_weights)
    return quantized
