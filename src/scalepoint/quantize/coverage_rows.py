"""The rows of the coverage: operations with weights or a matrix product, and every other parameter that is read."""

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
from scalepoint.quantize.placement import CONSTANT_REASON, COVERED_KINDS, Decision, QuantizationSite, UnmatchedOperation
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
    """One row a decision that concerns weights or products, and one for each such operation that no pattern took; in
    graph order."""
    why = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    rows = {decision.site.node: _make_row(decision) for decision in decisions if _has_row(decision.site)}
    rows |= {each.node: _make_unmatched_row(each, config, why) for each in unmatched}
    return _add_parameter_counts(model, _order_and_scale_macs(model, rows))


def _order_and_scale_macs(model: fx.GraphModule, rows: dict[fx.Node, CoverageRow]) -> dict[fx.Node, CoverageRow]:
    """In graph order, with the MACs of the example that was given."""
    share = get_example_share(model)
    ordered = [(node, rows[node]) for node in model.graph.nodes if node in rows]
    return {node: replace(row, macs=None if row.macs is None else int(row.macs * share)) for node, row in ordered}


def _has_row(site: QuantizationSite) -> bool:
    return bool(site.role or site.unsupported_reason or site.kind in COVERED_KINDS or site.fused.tensors())


def _make_row(decision: Decision) -> CoverageRow:
    site = decision.site
    kind = "attention" if site.match.pattern.name.startswith("Attention") else site.kind
    part = site.part or next(iter(site.fused.parts.values()))
    macs = 0 if site.is_constant else count_macs(kind, part, site.node, _get_operands(site, kind))
    stored = describe_spec(decision.weight) if decision.weight and decision.state == OperationState.FLOAT else ""
    words = [f"w {describe_spec(decision.weight)}"] if decision.weight and not stored else []
    inputs = {describe_spec(spec) for _, _, spec in decision.points}
    words += [f"x {' / '.join(sorted(inputs))}"] if inputs else []
    return CoverageRow(
        site.name,
        kind,
        decision.state,
        ", ".join(words),
        decision.reason,
        parameters=0,
        macs=macs,
        is_asked=decision.is_requested_float,
        is_meant=decision.is_target_default,
        saves=decision.saves,
        seconds=decision.seconds,
        stored=stored,
    )


def _get_operands(site: QuantizationSite, kind: str) -> list[fx.Node]:
    """What the first part takes, one for each of its slots; of attention all that the group takes."""
    given = list(site.node.args)
    chosen = given if kind == "attention" else [given[place] for place in site.fused.wiring[0] if place is not None]
    return [operand for operand in chosen if isinstance(operand, fx.Node)]


def _make_unmatched_row(each: UnmatchedOperation, config: QuantConfig, why: dict[str, str]) -> CoverageRow:
    asked = any(override.matches(each.names, each.types) for override in config.overrides)
    reason = why.get(each.name) or f"no low-precision form of a {each.kind} is known for this target"
    reason = "asked for by the config" if asked else CONSTANT_REASON if each.is_constant else reason
    macs = 0 if each.is_constant else count_macs(each.kind, each.module, each.node, list(each.node.all_input_nodes))
    return CoverageRow(each.name, each.kind, OperationState.FLOAT, "", reason, 0, macs, asked, each.is_constant)


def _add_parameter_counts(model: fx.GraphModule, rows: dict[fx.Node, CoverageRow]) -> dict[fx.Node, CoverageRow]:
    """The rows with the weights that each reads; `shared` are those that an earlier row in the same precision has."""
    known = get_weights(model)
    counted: set[tuple[int, str]] = set()
    found = dict(rows)
    for node, keys in iterate_weight_readers(model, rows.__contains__):
        if node not in rows:
            continue
        again = [key for key in keys if (key, rows[node].precision) in counted]
        counted |= {(key, rows[node].precision) for key in keys}
        sizes, shared = (sum(known[key][1] for key in some) for some in (keys, again))
        found[node] = replace(rows[node], parameters=sizes, shared=shared)
    return found


def build_parameter_rows(model: fx.GraphModule, rows: Container[fx.Node], refusals: Iterable[Any]) -> list[CoverageRow]:
    """A row for every parameter that the graph reads and no row has: a position, a token, a scale."""
    why = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    known = get_weights(model)
    found = list(iterate_weight_readers(model, rows.__contains__))
    told = {key for node, keys in found if node in rows for key in keys}
    made = {}
    for node, keys in found:
        for key in sorted(keys - told, key=lambda key: known[key]):
            told.add(key)
            name, size = known[key]
            reason = why.get(get_layer_name(node))
            words = reason or f"no product: read by {get_kind(node)}"
            made[name] = CoverageRow(name, "parameter", OperationState.FLOAT, "", words, size, 0, is_meant=not reason)
    return list(made.values())


def describe_spec(spec: QuantizationSpec) -> str:
    """int8 per_channel"""
    sparsity = get_sparsity(spec)
    pruned = "" if sparsity is None else f" {sparsity}"
    if is_palette(spec):
        return f"palette{spec.n_bits}{pruned}"
    key = QuantizationGranularity.key_of(type(spec.granularity))
    dtype: str = spec.to_dict()["dtype"]
    return f"{dtype}{pruned}" if key == "per_tensor" else f"{dtype} {key}{pruned}"
