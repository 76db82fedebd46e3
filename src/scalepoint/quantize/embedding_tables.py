"""Embedding tables as codes with a scale a row, where the target looks rows up so.

    y = codes[x] * scale[x]        only the rows that are read are dequantized

A file shrinks by the table's share; nothing is multiplied, so speed hardly changes. A head that multiplies by the same
matrix has a scale an output channel, which is a row of the table: then both take the head's codes.
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
    Decision,
    PlacementContext,
    QuantizationSite,
    check_weights_are_finite,
    explain_float_pattern,
    get_operation_facts,
)
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.targets import Target


def is_embedding_table(site: QuantizationSite) -> bool:
    return site.kind == EMBEDDING


def decide_embedding_table(site: QuantizationSite, config: QuantConfig, target: Target | None) -> Decision:
    """Whether a table is stored as codes: as the config asks, else where the target says that it pays."""
    if target is None or target.table is None or site.is_constant or site.unsupported_reason:
        reason = CONSTANT_REASON if site.is_constant else site.unsupported_reason or explain_float_pattern(site, target)
        return Decision(site, reason=reason, is_target_default=True)
    requested = _requested_spec(site, config)
    if requested == FLOAT:
        return Decision(site, reason="asked for by the config", is_requested_float=True, is_target_default=True)
    spec = requested if isinstance(requested, QuantizationSpec) else target.table
    why = None if requested is not None else target.why_float(get_operation_facts(site, config, target))
    if why:
        return Decision(site, reason=why, is_target_default=True)
    target.check(spec, "weight", site.kind, site.name)
    if not target.is_language:
        _check_table_spec(spec, site.name)
    check_weights_are_finite(site)
    spec = spec.replace(granularity=spec.granularity.resolve(torch.nn.Conv2d))
    return Decision(site, spec, state=OperationState.QUANTIZED)


def _requested_spec(site: QuantizationSite, config: QuantConfig) -> QuantizationSpec | str | None:
    """The spec of an override for this table. Without an override the config only decides whether it stays float."""
    fits = any(each.matches(site.names, site.types) and each.weight is not None for each in config.overrides)
    spec = config.spec_for("weight", site.names, site.types)
    return spec if fits or spec == FLOAT else None


def _check_table_spec(spec: QuantizationSpec, name: str) -> None:
    is_along_rows = not isinstance(spec.granularity, PerBlockGranularity) or spec.granularity.axis in (None, 1, -1)
    if spec.qscheme == QuantizationScheme.ASYMMETRIC or spec.qformulation != "zp" or not is_along_rows:
        raise TargetError(
            f"{name}: the rows of a table have scales and no zero point: int8, symmetric, per channel; or leave it "
            "float, Override(name=..., weight='float')"
        )


def share_codes_with_heads(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Give a table whose matrix a linear layer multiplies by the spec of that layer, and with it its codes."""
    del context
    heads = {
        _get_weight_address(each.site): each.weight
        for each in decisions
        if each.site.kind == "linear" and each.weight is not None and _has_row_scales(each.weight)
    }
    return [
        replace(decision, weight=heads.get(_get_weight_address(decision.site)) or decision.weight)
        if is_embedding_table(decision.site) and decision.weight
        else decision
        for decision in decisions
    ]


def _has_row_scales(spec: QuantizationSpec) -> bool:
    granularity = spec.granularity
    is_rows = isinstance(granularity, PerChannelGranularity) and granularity.axis == 0
    return is_rows and spec.dtype == torch.int8 and spec.qscheme != QuantizationScheme.ASYMMETRIC


def _get_weight_address(site: QuantizationSite) -> tuple[int, tuple[int, ...]] | None:
    weight = getattr(site.part, "weight", None)
    return (weight.data_ptr(), tuple(weight.shape)) if isinstance(weight, Tensor) and not weight.is_meta else None
