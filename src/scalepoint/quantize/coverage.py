"""From decisions to the coverage: one row for every operation with weights or a matrix product."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from scalepoint.covered import Operation, State
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.cost import batch_share, macs_of
from scalepoint.quantize.placement import COUNTED, Decision, Left, Site
from scalepoint.spec import QuantizationGranularity, QuantizationSpec


def coverage_rows(
    model: fx.GraphModule,
    decisions: Sequence[Decision],
    left: Sequence[Left],
    config: QuantConfig,
    refusals: Iterable[Any],
) -> dict[fx.Node, Operation]:
    """One row a decision that concerns weights or products, and one for each such operation that no pattern took; in
    graph order."""
    why = {refusal.name: refusal.reason for refusal in refusals if refusal.reason}
    rows = {decision.site.node: _row(decision) for decision in decisions if _counts(decision.site)}
    rows |= {each.node: _left_row(each, config, why) for each in left}
    share = batch_share(model)
    ordered = [(node, rows[node]) for node in model.graph.nodes if node in rows]
    return {node: replace(row, macs=None if row.macs is None else int(row.macs * share)) for node, row in ordered}


def _counts(site: Site) -> bool:
    return site.role is not None or site.kind in COUNTED or _parameters(site.fused.parts.values()) > 0


def _row(decision: Decision) -> Operation:
    site = decision.site
    operands = [argument for argument in site.node.args if isinstance(argument, fx.Node)]
    kind = "attention" if site.match.pattern.name.startswith("Attention") else site.kind
    macs = macs_of(kind, site.part or next(iter(site.fused.parts.values())), site.node, operands)
    words = [f"w {describe(decision.weight)}"] if decision.weight else []
    inputs = {describe(spec) for _, _, spec in decision.points}
    words += [f"x {' / '.join(sorted(inputs))}"] if inputs else []
    parameters = _parameters(site.fused.parts.values())
    how = ", ".join(words)
    whose = (decision.is_asked, decision.is_meant)
    return Operation(site.name, kind, decision.state, how, decision.reason, parameters, macs, *whose)


def _left_row(each: Left, config: QuantConfig, why: dict[str, str]) -> Operation:
    asked = any(override.fits(each.names, each.types) for override in config.overrides)
    reason = why.get(each.name) or f"no low-precision form of a {each.kind} is known for this target"
    parameters = _parameters([each.module] if each.module is not None else [])
    macs = macs_of(each.kind, each.module, each.node, list(each.node.all_input_nodes))
    return Operation(
        each.name, each.kind, State.FLOAT, "", "asked for by the config" if asked else reason, parameters, macs, asked
    )


def _parameters(parts: Iterable[nn.Module]) -> int:
    """Elements of the weights that parts hold or refer to; a weight that two read counts once."""
    held: dict[int, int] = {}
    for part in parts:
        references = getattr(part, "references", None)
        tensors = [reference.value for reference in references().values()] if callable(references) else []
        tensors += list(part.parameters())
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and not tensors:
            tensors = [weight]
        for tensor in tensors:
            if tensor.ndim > 0:
                held[tensor.data_ptr()] = tensor.numel()
    return sum(held.values())


def describe(spec: QuantizationSpec) -> str:
    """int8 per_channel"""
    key = QuantizationGranularity.key_of(type(spec.granularity))
    dtype: str = spec.to_dict()["dtype"]
    return dtype if key == "per_tensor" else f"{dtype} {key}"
