"""inspect: what a target would quantize of a model, and what not. Needs no data."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.capture import Model
from scalepoint.operation_coverage import Coverage
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.insert import make_decisions
from scalepoint.quantize.record import coverage, has_record
from scalepoint.targets import Target, find_target
from scalepoint.transformation import transform


def inspect(
    model: Model,
    example_inputs: Any = None,
    *,
    target: str | Target = "onnxruntime",
    config: QuantConfig | Mapping[str, object] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    dynamic_axes: Any = None,
) -> Coverage:
    """List which operations of a model would be quantized for a target, and why others would not.

    The model stays unchanged. A warning is given if nothing would be quantized. A model that already has quantizers is
    not analysed again: the result is its own coverage, and all other arguments are ignored.

    Args:
        model: A module, an ExportedProgram, or the path of an .onnx or .pt2 file.
        example_inputs: A tensor, a tuple, or a dict of keyword inputs. Without them torch.fx records what it can, and
            the number of MACs is not known.
        target: A target or its name.
        config: What to quantize and how.
        kwargs: Keyword inputs of the model.
        leave: Names of submodules that are called as they are and not quantized.
        dynamic_axes: Axes that stay free besides the batch, such as {"x": {2: "height", 3: "width"}}.

    Returns:
        One row per operation.
    """
    if isinstance(model, nn.Module) and has_record(model):  # insert_qdq returned it
        return coverage(model)
    # To `transform`, None means "no example": torch.fx records the model. () means "only keyword inputs".
    inputs = () if example_inputs is None and kwargs else example_inputs
    # copy=False: the graph shares its parameters with the model, and decisions do not write to them.
    result = transform(model, inputs, target=target, kwargs=kwargs, leave=leave, dynamic_axes=dynamic_axes, copy=False)
    _, _, predicted = make_decisions(result.model, result.matches, QuantConfig.build(config), find_target(target))
    if predicted.is_empty:
        warnings.warn(ScalepointWarning(predicted.describe_empty()), stacklevel=2)
    return predicted
