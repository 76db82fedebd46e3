"""inspect: what a target would quantize of a model and what not, before any data."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from scalepoint.covered import Coverage
from scalepoint.errors import ScalepointWarning
from scalepoint.graph.capture import Model
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.insert import decisions_for
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
    """The coverage that insert_qdq would give. The model is captured over its own parameters, and stays as it is.

    Without example inputs torch.fx records what it can, and MACs are not known. A model of which nothing would be
    quantized is told of by a warning, with the reasons in the coverage. One that is quantized already has its own.
    """
    if isinstance(model, nn.Module) and has_record(model):
        return coverage(model)
    inputs = () if example_inputs is None and kwargs else example_inputs
    result = transform(model, inputs, target=target, kwargs=kwargs, leave=leave, dynamic_axes=dynamic_axes, copy=False)
    _, _, found = decisions_for(result.model, result.matches, QuantConfig.build(config), find_target(target))
    if found.is_empty:
        warnings.warn(ScalepointWarning(found.why_empty()), stacklevel=2)
    return found
