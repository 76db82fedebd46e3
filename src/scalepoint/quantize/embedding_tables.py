"""Stores embedding tables as codes with one scale per row, on targets that look up rows of codes.

    y = codes[x] * scale[x]        only the rows that are read are dequantized

The file shrinks by the table's share. Nothing is multiplied, so speed hardly changes. A language head that multiplies
by the same matrix has one scale per output channel, which is a row of the table: then both use the codes of the head.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.errors import TargetError
from scalepoint.operation_coverage import OperationState
from scalepoint.quantize.config import FLOAT, QuantConfig
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.placement import (
    CONSTANT_REASON,
    REQUESTED_REASON,
    Decision,
    PlacementContext,
    check_weights_are_finite,
    explain_float_pattern,
    get_operation_facts,
)
from scalepoint.quantize.sites import QuantizationSite
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.targets import Target


def is_embedding_table(site: QuantizationSite) -> bool:
    return site.kind == EMBEDDING


def decide_embedding_table(site: QuantizationSite, config: QuantConfig, target: Target | None) -> Decision:
    """Decide whether a table is stored as codes: if the config asks for it, otherwise if the target recommends it."""
    if site.is_constant:
        return Decision(site, reason=CONSTANT_REASON, is_target_default=True)
    if target is None or target.table is None or site.unsupported_reason:
        reason = site.unsupported_reason or explain_float_pattern(site, target)
        return Decision(site, reason=reason, is_target_default=True)
    requested = _get_requested_spec(site, config)
    if requested == FLOAT:
        return Decision(site, reason=REQUESTED_REASON, is_requested_float=True, is_target_default=True)
    if requested is None:
        float_reason = target.why_float(get_operation_facts(site, config, target))
        if float_reason:
            return Decision(site, reason=float_reason, is_target_default=True)
    spec = requested if isinstance(requested, QuantizationSpec) else target.table
    target.check(spec, "weight", site.kind, site.name)
    if not target.is_language:
        _check_table_spec(spec, site.name)
    check_weights_are_finite(site)
    spec = spec.replace(granularity=spec.granularity.resolve(torch.nn.Conv2d))
    return Decision(site, spec, state=OperationState.QUANTIZED)


def _get_requested_spec(site: QuantizationSite, config: QuantConfig) -> QuantizationSpec | str | None:
    """Return the spec of an override for this table; without one the config only decides whether it stays float."""
    has_override = any(
        override.matches(site.names, site.types) and override.weight is not None for override in config.overrides
    )
    spec = config.spec_for("weight", site.names, site.types)
    return spec if has_override or spec == FLOAT else None


def _check_table_spec(spec: QuantizationSpec, name: str) -> None:
    is_along_rows = not isinstance(spec.granularity, PerBlockGranularity) or spec.granularity.axis in (None, 1, -1)
    if spec.qscheme == QuantizationScheme.ASYMMETRIC or spec.qformulation != "zp" or not is_along_rows:
        raise TargetError(
            f"{name}: rows of a table must have scales without zero points: use int8, symmetric, per channel, or leave "
            "it float with Override(name=..., weight='float')"
        )


def share_codes_with_heads(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Give a table the spec of the linear layer that multiplies by the same matrix, so that both share its codes."""
    del context
    head_specs = {
        _get_weight_address(decision.site): decision.weight
        for decision in decisions
        if decision.site.kind == "linear" and decision.weight is not None and _has_row_scales(decision.weight)
    }
    result = []
    for decision in decisions:
        is_stored_table = is_embedding_table(decision.site) and decision.weight is not None
        head_spec = head_specs.get(_get_weight_address(decision.site)) if is_stored_table else None
        result.append(decision if head_spec is None else replace(decision, weight=head_spec))
    return result


def _has_row_scales(spec: QuantizationSpec) -> bool:
    granularity = spec.granularity
    is_per_row = isinstance(granularity, PerChannelGranularity) and granularity.axis == 0
    return is_per_row and spec.dtype == torch.int8 and spec.qscheme != QuantizationScheme.ASYMMETRIC


def _get_weight_address(site: QuantizationSite) -> tuple[int, tuple[int, ...]] | None:
    weight = getattr(site.part, "weight", None)
    return (weight.data_ptr(), tuple(weight.shape)) if isinstance(weight, Tensor) and not weight.is_meta else None
