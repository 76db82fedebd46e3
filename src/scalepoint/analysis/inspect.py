"""inspect: what a target would quantize of a model and what not, before any data."""

import warnings
from collections.abc import Mapping
from typing import Any

from scalepoint.errors import CoverageError, ScalepointWarning
from scalepoint.graph.capture import Model
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.coverage import KEY, Coverage, coverage, make_coverage
from scalepoint.quantize.insert import insert_qdq
from scalepoint.quantize.placement import decide, left_of, sites_of
from scalepoint.targets import Target, find_target
from scalepoint.transformation import transform


def inspect(
    model: Model,
    example_inputs: Any = None,
    *,
    target: str | Target = "onnxruntime",
    config: QuantConfig | Mapping[str, object] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Coverage:
    """The coverage that insert_qdq would give. The model is captured over its own parameters, and stays as it is.

    Without example inputs torch.fx records what it can, and MACs are not known. A model of which nothing would be
    quantized is told of by a warning, with the reasons in the coverage. One that is quantized already has its own.
    """
    if KEY in getattr(model, "meta", {}):
        return coverage(model)  # type: ignore[arg-type]  # what has a meta is a graph module
    inputs = () if example_inputs is None and kwargs else example_inputs
    result = transform(model, inputs, target=target, kwargs=kwargs, copy=False)
    try:
        return coverage(insert_qdq(result.model, result.matches, config, copy=False))
    except CoverageError:  # nothing to quantize: the answer is the reasons
        pass
    chosen = config if isinstance(config, QuantConfig) else QuantConfig.from_dict(dict(config or {}))
    sites = sites_of(result.model, result.matches)
    decisions = [decide(site, chosen, find_target(target)) for site in sites]
    found = make_coverage(result.model, decisions, left_of(result.model, sites), chosen, result.report.refusals)
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in found.operations[:4]) or "it has no weights"
    warnings.warn(ScalepointWarning(f"nothing of this model would be quantized: {reasons}"), stacklevel=2)
    return found
