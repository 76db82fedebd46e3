"""Builds the rows of the coverage: operations with weights or a product, and all other parameters that are read."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from scalepoint.graph.nodes import get_kind
from scalepoint.graph.weight_readers import get_weights, iterate_weight_readers
from scalepoint.operation_coverage import CoverageRow, OperationState
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.macs import count_macs, get_example_share
from scalepoint.quantize.placement import CONSTANT_REASON, REQUESTED_REASON, Decision
from scalepoint.quantize.sites import COVERED_KINDS, QuantizationSite, UnmatchedOperation
from scalepoint.spec import QuantizationGranularity, QuantizationSpec
from scalepoint.spec.extended import get_sparsity
from scalepoint.spec.palette import is_palette


def build_coverage_rows(
    model: fx.GraphModule,
    decisions: Sequence[Decision],
    unmatched: Sequence[UnmatchedOperation],
    config: QuantConfig,
    refusals: Iterable[Any],
) -> dict[fx.Node, CoverageRow]:
    """Build a row for each decision and each unmatched operation that has weights or a product, in graph order."""
    refusal_reasons = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    rows = {decision.site.node: _make_row(decision) for decision in decisions if _has_row(decision.site)}
    rows |= {operation.node: _make_unmatched_row(operation, config, refusal_reasons) for operation in unmatched}
    return _add_parameter_counts(model, _order_and_scale_macs(model, rows))


def _order_and_scale_macs(model: fx.GraphModule, rows: dict[fx.Node, CoverageRow]) -> dict[fx.Node, CoverageRow]:
    """Put the rows into graph order, and scale the MACs to the batch size of the example."""
    share = get_example_share(model)
    ordered = [(node, rows[node]) for node in model.graph.nodes if node in rows]
    rows = {}
    for node, row in ordered:
        rows[node] = row if row.macs is None else replace(row, macs=int(row.macs * share))
    return rows


def _has_row(site: QuantizationSite) -> bool:
    return bool(site.role or site.unsupported_reason or site.kind in COVERED_KINDS or site.fused.tensors())


def _make_row(decision: Decision) -> CoverageRow:
    site = decision.site
    kind = "attention" if site.match.pattern.name.startswith("Attention") else site.kind
    part = site.part or next(iter(site.fused.parts.values()))
    macs = 0 if site.is_constant else count_macs(kind, part, site.node, _get_operands(site, kind))
    weight = describe_spec(decision.weight) if decision.weight else ""
    is_only_stored = decision.state == OperationState.FLOAT
    precisions = [f"w {weight}"] if weight and not is_only_stored else []
    inputs = {describe_spec(spec) for _, _, spec in decision.points}
    precisions += [f"x {' / '.join(sorted(inputs))}"] if inputs else []
    return CoverageRow(
        site.name,
        kind,
        decision.state,
        ", ".join(precisions),
        decision.reason,
        parameters=0,
        macs=macs,
        is_asked=decision.is_requested_float,
        is_meant=decision.is_target_default,
        saves=decision.float_saves_seconds,
        seconds=decision.predicted_seconds,
        stored=weight if is_only_stored else "",
    )


def _get_operands(site: QuantizationSite, kind: str) -> list[fx.Node]:
    """Return the inputs of the first part, one for each of its slots; for attention all inputs of the group."""
    arguments = list(site.node.args)
    if kind != "attention":
        arguments = [arguments[index] for index in site.fused.wiring[0] if index is not None]
    return [operand for operand in arguments if isinstance(operand, fx.Node)]


def _make_unmatched_row(
    operation: UnmatchedOperation, config: QuantConfig, refusal_reasons: dict[str, str]
) -> CoverageRow:
    kind, node = operation.kind, operation.node
    is_requested = any(override.matches(operation.names, operation.types) for override in config.overrides)
    if is_requested:
        reason = REQUESTED_REASON
    elif operation.is_constant:
        reason = CONSTANT_REASON
    else:
        reason = refusal_reasons.get(operation.name) or f"no low-precision form of a {kind} is known for this target"
    macs = 0 if operation.is_constant else count_macs(kind, operation.module, node, list(node.all_input_nodes))
    return CoverageRow(
        operation.name, kind, OperationState.FLOAT, "", reason, 0, macs, is_requested, operation.is_constant
    )


def _add_parameter_counts(model: fx.GraphModule, rows: dict[fx.Node, CoverageRow]) -> dict[fx.Node, CoverageRow]:
    """Set the number of weights each row reads; `shared` counts those of an earlier row in the same precision."""
    weights = get_weights(model)
    counted: set[tuple[int, str]] = set()  # weight, precision
    result = dict(rows)
    for node, keys in iterate_weight_readers(model, rows.__contains__):
        if node not in rows:
            continue
        precision = rows[node].precision
        parameters = sum(weights[key][1] for key in keys)
        shared = sum(weights[key][1] for key in keys if (key, precision) in counted)
        counted |= {(key, precision) for key in keys}
        result[node] = replace(rows[node], parameters=parameters, shared=shared)
    return result


def build_parameter_rows(model: fx.GraphModule, rows: Container[fx.Node], refusals: Iterable[Any]) -> list[CoverageRow]:
    """Build a row for every parameter that the graph reads and no row contains: a position embedding, a scale."""
    refusal_reasons = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    weights = get_weights(model)
    readers = list(iterate_weight_readers(model, rows.__contains__))
    listed = {key for node, keys in readers if node in rows for key in keys}
    parameter_rows = {}
    for node, keys in readers:
        for key in sorted(keys - listed, key=lambda key: weights[key]):
            listed.add(key)
            name, size = weights[key]
            refusal = refusal_reasons.get(get_layer_name(node))
            reason = refusal or f"no product: read by {get_kind(node)}"
            parameter_rows[name] = CoverageRow(
                name, "parameter", OperationState.FLOAT, "", reason, size, 0, is_meant=not refusal
            )
    return list(parameter_rows.values())


def describe_spec(spec: QuantizationSpec) -> str:
    """Describe a spec in two or three words, such as "int8 per_channel"."""
    sparsity = get_sparsity(spec)
    sparsity_text = "" if sparsity is None else f" {sparsity}"
    if is_palette(spec):
        return f"palette{spec.n_bits}{sparsity_text}"
    granularity = QuantizationGranularity.key_of(type(spec.granularity))
    granularity_text = "" if granularity == "per_tensor" else f" {granularity}"
    return f"{spec.to_dict()['dtype']}{granularity_text}{sparsity_text}"
