"""Decides where quantizers go: the points of the matched patterns, the user's config, and what the target can run.

match -> QuantizationSite: the fused node, the tensor of each point of the pattern, the part with a weight
site x config x target -> Decision: specs for the points and the weight, or the reason to leave the site float

Passes take all decisions and return all decisions, some of them replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import ConfigError, NonFiniteError, PatternError, did_you_mean
from scalepoint.graph import WEIGHTED, Operation
from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.kinds import OPAQUE, VALUE_PRESERVING, WEIGHTLESS_PRODUCTS
from scalepoint.graph.nodes import get_fake_tensor, module_path
from scalepoint.graph.operations import Slot, get_tensors
from scalepoint.operation_coverage import OperationState
from scalepoint.patterns import Fused, PatternMatch, Point, get_kind
from scalepoint.patterns.fused import FusedAttention
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.config import FLOAT, QuantConfig
from scalepoint.quantize.operations import EMBEDDING, WEIGHT_PRODUCTS, get_part_kind, get_weight_shape
from scalepoint.spec import (
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationScheme,
    QuantizationSpec,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)
from scalepoint.spec.dynamic import DynamicQParamsCalculator
from scalepoint.spec.extended import get_sparsity
from scalepoint.targets import OperationFacts, Target
from scalepoint.targets.local_times import LocalTimes

COVERED_KINDS = (*WEIGHTED, *WEIGHTLESS_PRODUCTS, "attention", OPAQUE)
CONSTANT_REASON = "computed from constants only: the runtime computes it once, when it loads the file"
REQUESTED_REASON = "asked for by the config"
MAX_SUGGESTION_LENGTH = 400  # characters


@dataclass
class QuantizationSite:
    """One fused group in the graph.

    Attributes:
        match: The pattern match that made the group.
        node: The node that calls the group.
        fused: The module of the group.
        role: Role of the part with a weight that can be quantized; None if there is none.
        kind: Kind of that part, otherwise of the first part.
        operands: The tensor of each point that the pattern declares.
        enclosing_classes: Class names of the modules that contain the group.
        unsupported_reason: Why the weight of a product cannot be quantized; "" if it can.
        is_constant: Whether the group reads constants only.
    """

    match: PatternMatch
    node: fx.Node
    fused: Fused
    role: str | None
    kind: str
    operands: list[tuple[Point, fx.Node]]
    enclosing_classes: tuple[str, ...] = ()
    unsupported_reason: str = ""
    is_constant: bool = False

    @property
    def part(self) -> nn.Module | None:
        return None if self.role is None else self.fused.parts[self.role]

    @property
    def name(self) -> str:
        """The path of the user's module."""
        return self.match.name or self.match.fused

    @property
    def names(self) -> tuple[str, ...]:
        """Names that an override can use."""
        return (self.match.name, self.match.fused)

    @property
    def types(self) -> set[str]:
        """Types that an override can use: classes, kinds and pattern names."""
        parts = self.fused.parts.values()
        return {
            self.match.pattern.name,
            type(self.fused).__name__,
            self.kind,
            *(type(part).__name__ for part in parts),
            *({"Linear"} if self.kind == "linear" else set()),
            *self.enclosing_classes,
        }


@dataclass(frozen=True)
class Decision:
    """What to insert at a site.

    Attributes:
        site: The fused group.
        weight: Spec of the weight; None leaves it float.
        points: Point of the pattern, tensor, and spec of its quantizer.
        state: Whether the operation runs quantized.
        reason: Why it, or a part of it, stays float.
        is_requested_float: The config asks for float.
        is_target_default: The target runs operations of this kind in float.
        float_saves_seconds: Predicted gain of an operation that stays float for speed.
        predicted_seconds: Times in float and in int8, if they are the reason.
    """

    site: QuantizationSite
    weight: QuantizationSpec | None = None
    points: tuple[tuple[Point, fx.Node, QuantizationSpec], ...] = ()
    state: OperationState = OperationState.FLOAT
    reason: str = ""
    is_requested_float: bool = False
    is_target_default: bool = False
    float_saves_seconds: float | None = None
    predicted_seconds: tuple[float, float] | None = None


@dataclass(frozen=True)
class PlacementContext:
    """Inputs of the passes over the decisions."""

    model: fx.GraphModule
    config: QuantConfig
    target: Target | None
    local_times: LocalTimes


def find_sites(model: fx.GraphModule, matches: Sequence[PatternMatch]) -> list[QuantizationSite]:
    """Return the sites of the matches, in graph order."""
    nodes_by_target: dict[str, list[fx.Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module":
            nodes_by_target.setdefault(str(node.target), []).append(node)
    sites = []
    constant_nodes = find_constant_nodes(model.graph)
    for match in matches:
        nodes = nodes_by_target.get(match.fused)
        if not nodes:
            raise PatternError(
                f"{match.pattern.name} at {match.fused or match.name} is not in this model: pass the model and the "
                "matches of the same transform"
            )
        fused = model.get_submodule(match.fused)
        assert isinstance(fused, Fused)  # noqa: S101  # patterns only make these
        classes = _get_enclosing_classes(model, match.name)
        sites += [_make_site(match, node, fused, classes, node in constant_nodes) for node in nodes]
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    return sorted(sites, key=lambda site: order[site.node])


def _get_enclosing_classes(model: fx.GraphModule, name: str) -> tuple[str, ...]:
    """Return the classes of the modules on a path, such as MultiheadAttention for its projections."""
    classes, module = [], model
    for child_name in name.split(".")[:-1]:
        child = module._modules.get(child_name)
        if child is None:
            break
        classes.append(type(child).__name__)
        module = child  # type: ignore[assignment]
    return tuple(classes)


def _make_site(
    match: PatternMatch, node: fx.Node, fused: Fused, enclosing_classes: tuple[str, ...], is_constant: bool
) -> QuantizationSite:
    kinds = {role: get_part_kind(part) for role, part in fused.parts.items()}
    role = next((role for role, kind in kinds.items() if kind in WEIGHT_PRODUCTS or kind == EMBEDDING), None)
    kind = kinds[role] if role else next(iter(kinds.values()))
    reason = explain_unsupported_weight(fused.parts[role], kind) if role is not None else ""
    operands = find_operands(match, node, fused)
    return QuantizationSite(
        match=match,
        node=node,
        fused=fused,
        role=None if reason else role,
        kind=kind,
        operands=operands,
        enclosing_classes=enclosing_classes,
        unsupported_reason=reason,
        is_constant=is_constant,
    )


def explain_unsupported_weight(part: nn.Module, kind: str) -> str:
    """Say why the weight of a product cannot be quantized and stored; "" if it can."""
    if not isinstance(getattr(part, "weight", None), Tensor):
        return "its weight is computed from the data, not stored"
    axes = len(get_weight_shape(part))
    settings = part.arguments if isinstance(part, Operation) else vars(part)
    if kind == EMBEDDING and settings.get("max_norm") is not None:
        return "it scales its rows when it looks them up (max_norm)"
    if kind in ("linear", EMBEDDING) and axes != 2:
        return f"its weight has {axes} axes, but {'a linear layer' if kind == 'linear' else 'a table'} has two"
    if isinstance(part, Operation):
        slots = [value for value in part.arguments.values() if isinstance(value, Slot)]
        if len(slots) > 1:
            return "its bias is computed from the data, not stored"
    return ""


def find_operands(match: PatternMatch, node: fx.Node, fused: Fused) -> list[tuple[Point, fx.Node]]:
    """Return the tensor of each point that the pattern declares.

    INPUT, KEY_INPUT and VALUE_INPUT are the first three inputs of the first part; for attention of separate matmuls the
    value is the further input of the last part. RESIDUAL_INPUT is the further input of a later part, such as an add
    after a convolution, otherwise the second input of the first part. INPUT of a concat is each of its inputs.
    """
    later_inputs = []  # for each part after the first that takes an input of the group: the index of that input
    for sources in fused.wiring[1:]:
        later_inputs += [index for index in sources if index is not None][:1]
    first_part = next(iter(fused.parts.values()))
    first_inputs = _order_inputs(first_part, fused.wiring[0])
    is_concat = get_part_kind(first_part) == "cat"
    # Slices, because a part may lack the input: then the point has no tensor.
    input_indices: dict[Point, list[int]] = {
        Point.INPUT: list(range(len(node.args))) if is_concat else first_inputs[:1],
        Point.KEY_INPUT: first_inputs[1:2],
        Point.VALUE_INPUT: first_inputs[2:3] or later_inputs[-1:],
        Point.RESIDUAL_INPUT: later_inputs[:1] or first_inputs[1:2],
    }
    operands: list[tuple[Point, fx.Node]] = []
    for point in match.pattern.qdq_points:
        tensors = [node] if point == Point.OUTPUT else [node.args[index] for index in input_indices[point]]
        operands += [(point, tensor) for tensor in tensors if isinstance(tensor, fx.Node) and _is_float(tensor)]
    return operands


def _order_inputs(part: nn.Module, sources: Sequence[int | None]) -> list[int]:
    """Return the inputs of a part in the order of its arguments. A tensor that is passed twice is listed twice."""
    if isinstance(part, Operation):
        slots = [value.index for value in part.arguments.values() if isinstance(value, Slot)]
        sources = [sources[slot] for slot in slots if slot < len(sources)]
    return [source for source in sources if source is not None]


def _is_float(node: fx.Node) -> bool:
    value = get_fake_tensor(node)
    return value is None or value.is_floating_point()


def get_operation_facts(site: QuantizationSite, config: QuantConfig, target: Target | None) -> OperationFacts:
    """Return the properties of an operation that the rules of a target can use."""
    activation = _choose_spec(site, "input", config, target)
    if isinstance(site.fused, FusedAttention):
        return OperationFacts(
            site.name, "attention", site.match.pattern.name, activation=activation, **_get_attention_facts(site)
        )
    part = site.part
    groups: Any = part.arguments.get("groups", 1) if isinstance(part, Operation) else getattr(part, "groups", 1)
    return OperationFacts(
        site.name,
        site.kind,
        site.match.pattern.name,
        _get_output_first_shape(part),
        int(groups),
        is_first=any(operand.op == "placeholder" for _, operand in site.operands),
        activation=activation,
        weight=None if part is None else _choose_spec(site, "weight", config, target),
    )


def _get_output_first_shape(part: nn.Module | None) -> tuple[int, ...]:
    """Return the weight shape as (out, in, ...), also if the operation stores (in, out)."""
    shape = get_weight_shape(part)
    return shape[::-1] if isinstance(part, Operation) and part.has_transposed_weight else shape


def _get_point_role(point: Point) -> str:
    return "output" if point == Point.OUTPUT else "input"


def _get_attention_facts(site: QuantizationSite) -> dict[str, Any]:
    """Return whether a mask depends on the inputs, and the number of tokens (0 if it is not fixed)."""
    operands = [operand for _, operand in site.operands]
    further_inputs = [node for node in site.node.args if isinstance(node, fx.Node) and node not in operands]
    first_part = next(iter(site.fused.parts.values()))
    is_causal = isinstance(first_part, Operation) and bool(first_part.arguments.get("is_causal"))
    fake_tensors = [get_fake_tensor(operand) for operand in operands]
    lengths = [tensor.shape[-2] for tensor in fake_tensors if tensor is not None and tensor.ndim > 1]
    return {
        "is_masked": is_causal or any(map(_depends_on_inputs, further_inputs)),
        "tokens": max((length for length in lengths if isinstance(length, int)), default=0),
    }


def _depends_on_inputs(node: fx.Node) -> bool:
    pending, visited = [node], {node}
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        sources = [source for source in current.all_input_nodes if source not in visited]
        visited.update(sources)
        pending += sources
    return False


@dataclass
class UnmatchedOperation:
    """An operation with weights or a matrix product that no pattern matched."""

    node: fx.Node
    module: nn.Module | None
    kind: str
    name: str
    is_constant: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, module_path(self.node) or self.name)

    @property
    def types(self) -> set[str]:
        return {self.kind, type(self.module).__name__}


def find_unmatched_operations(model: fx.GraphModule, sites: Sequence[QuantizationSite]) -> list[UnmatchedOperation]:
    """Return operations that appear in the coverage but are not in a fused group, in graph order."""
    matched = {site.node for site in sites}
    constant_nodes = find_constant_nodes(model.graph)
    return [
        UnmatchedOperation(
            node,
            model.get_submodule(str(node.target)) if node.op == "call_module" else None,
            get_kind(node),
            get_layer_name(node),
            node in constant_nodes,
        )
        for node in model.graph.nodes
        if node not in matched and get_kind(node) in (*COVERED_KINDS, "fused") and not _is_unary_einsum(node)
    ]


def _is_unary_einsum(node: fx.Node) -> bool:
    """Return whether an einsum has one tensor: it transposes or sums, but does not multiply."""
    return get_kind(node) == "einsum" and len(node.all_input_nodes) < 2


def decide(site: QuantizationSite, config: QuantConfig, target: Target | None) -> Decision:
    """Decide what to insert at a site, and why nothing if it stays float."""
    float_decision = _decide_float(site, config, target)
    if float_decision is not None:
        return float_decision
    specs = [
        (point, tensor, _resolve_spec(site, _get_point_role(point), config, target))
        for point, tensor in _get_points(site, config, target)
    ]
    points = tuple((point, tensor, spec) for point, tensor, spec in specs if spec is not None)
    weight = None if site.role is None else _resolve_spec(site, "weight", config, target)
    float_roles = [_get_point_role(point) for point, _, spec in specs if spec is None]
    if site.role is not None and weight is None:
        float_roles.append("weight")
    if not points and not weight:
        if float_roles:
            return Decision(site, reason=REQUESTED_REASON, is_requested_float=True)
        return Decision(site, reason="its inputs are not float tensors")
    reasons = []
    if float_roles:
        reasons.append(f"{' and '.join(dict.fromkeys(float_roles))} float: {REQUESTED_REASON}")
    if weight:
        reasons.append(explain_dense_weight(site, _choose_spec(site, "weight", config, target)))
    return Decision(site, weight, points, OperationState.QUANTIZED, "; ".join(filter(None, reasons)))


def _decide_float(site: QuantizationSite, config: QuantConfig, target: Target | None) -> Decision | None:
    """Return the decision for a site that stays float whatever its specs are; None otherwise."""
    if not site.match.pattern.qdq_points:
        return Decision(site, reason=explain_float_pattern(site, target), is_target_default=True)
    if site.is_constant:
        return Decision(site, reason=CONSTANT_REASON, is_target_default=True)
    if site.unsupported_reason:
        return Decision(site, reason=site.unsupported_reason)
    is_overridden = any(override.matches(site.names, site.types) for override in config.overrides)
    if target is None or is_overridden:
        return None
    reason = target.why_float(get_operation_facts(site, config, target))
    return Decision(site, reason=reason) if reason else None


def explain_float_pattern(site: QuantizationSite, target: Target | None) -> str:
    """Say why a group whose pattern has no points stays float."""
    where = "here" if target is None else f"on {target.name}"
    return site.match.pattern.why_float or f"a {site.kind} runs in float {where}"


def leave_inputs_of_float_layers_float(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Leave an operation without weights float if all layers that read it are float, on targets that gain nothing."""
    if context.target is None or not context.target.float_if_readers_are_float:
        return decisions
    readers: dict[fx.Node, list[Decision]] = {}
    for decision in decisions:
        if decision.site.role:
            for _, operand in decision.site.operands:
                readers.setdefault(_skip_value_preserving(operand), []).append(decision)
    # Readers have weights, and only decisions without weights are replaced: their order does not matter.
    return [_make_float_if_readers_are(decision, readers.get(decision.site.node, [])) for decision in decisions]


def _make_float_if_readers_are(decision: Decision, readers: Sequence[Decision]) -> Decision:
    has_output_point = any(point == Point.OUTPUT for point, _, _ in decision.points)
    is_read_as_float = bool(readers) and all(reader.state == OperationState.FLOAT for reader in readers)
    if decision.site.role is not None or not has_output_point or not is_read_as_float:
        return decision
    return replace(
        decision,
        points=(),
        state=OperationState.FLOAT,
        reason=f"{readers[0].site.name} reads it and stays float",
        is_requested_float=readers[0].is_requested_float,
        is_target_default=readers[0].is_target_default,
    )


def _skip_value_preserving(node: fx.Node) -> fx.Node:
    """Return the tensor before operations that only move values."""
    while get_kind(node) in VALUE_PRESERVING and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _choose_spec(
    site: QuantizationSite, role: str, config: QuantConfig, target: Target | None
) -> QuantizationSpec | None:
    """Return the spec of the config, otherwise of the target, otherwise the default; None for float."""
    spec = config.spec_for(role, site.names, site.types)
    if spec is None:
        is_weight = role == "weight"
        if target is not None:
            spec = target.weight if is_weight else target.activation_for(site.match.pattern.name)
        else:
            spec = default_weight_quantization_spec() if is_weight else default_activation_quantization_spec()
    return spec if isinstance(spec, QuantizationSpec) else None


def _resolve_spec(
    site: QuantizationSite, role: str, config: QuantConfig, target: Target | None
) -> QuantizationSpec | None:
    """Choose a spec, check it against the target, and fit a weight's spec to the layer."""
    spec = _choose_spec(site, role, config, target)
    if spec is None:
        return None
    if target is not None:
        target.check(spec, "weight" if role == "weight" else "activation", site.kind, site.name)
    if role != "weight" or site.part is None:
        return spec
    check_weights_are_finite(site)
    if target is not None:
        spec = target.weight_for(spec, get_operation_facts(site, config, target))
    spec = spec.replace(granularity=spec.granularity.resolve(_get_layer_class(site)))
    return spec.replace(sparsity=None) if explain_dense_weight(site, spec) else spec


def make_stored_weight_spec(site: QuantizationSite, config: QuantConfig, target: Target) -> QuantizationSpec | None:
    """Return the spec of a weight that is stored as int8 and multiplied as float.

    It is the spec the weight would have with float inputs. None if that has a zero point, blocks or another width.
    """
    spec = None if site.role is None else _choose_spec(site, "weight", config, target)
    if spec is None:
        return None
    facts = replace(get_operation_facts(site, config, target), activation=None)
    spec = target.weight_for(spec, facts)
    spec = spec.replace(granularity=spec.granularity.resolve(_get_layer_class(site)))
    has_plain_scales = isinstance(spec.granularity, PerTensorGranularity | PerChannelGranularity)
    is_symmetric = spec.qscheme != QuantizationScheme.ASYMMETRIC and spec.qformulation == "zp"
    can_store = spec.dtype == torch.int8 and has_plain_scales and is_symmetric and get_sparsity(spec) is None
    return spec if can_store else None


def explain_dense_weight(site: QuantizationSite, spec: QuantizationSpec | None) -> str:
    """Say why a weight cannot have the requested sparsity; "" if it can, or if none is requested."""
    sparsity = None if spec is None else get_sparsity(spec)
    if sparsity is None or site.part is None:
        return ""
    return sparsity.reason_unsupported(_get_output_first_shape(site.part), is_transposed=site.kind == "conv_transpose")


def _get_points(site: QuantizationSite, config: QuantConfig, target: Target | None) -> list[tuple[Point, fx.Node]]:
    """Return the points of the pattern. A dynamic spec has no OUTPUT point: each reader quantizes its own input."""
    spec = _choose_spec(site, "output", config, target)
    is_dynamic = spec is not None and issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator)
    return [(point, tensor) for point, tensor in site.operands if not (is_dynamic and point == Point.OUTPUT)]


def _get_layer_class(site: QuantizationSite) -> type[nn.Module]:
    """Return a class with the same weight layout, which granularities use to choose their default axis."""
    return nn.ConvTranspose2d if site.kind == "conv_transpose" else nn.Conv2d


def check_weights_are_finite(site: QuantizationSite) -> None:
    """Raise NonFiniteError if a weight contains NaN or infinity."""
    for role, part in site.fused.parts.items():
        candidates = (*get_tensors(part), *part.buffers(), getattr(part, "weight", None))
        tensors = {id(tensor): tensor for tensor in candidates if isinstance(tensor, Tensor)}
        for tensor in tensors.values():
            if tensor.is_floating_point() and not tensor.is_meta and not _is_finite(tensor):
                where = get_layer_name(site.match.nodes[role]) if role in site.match.nodes else site.name
                raise NonFiniteError(
                    f"{where}: its weight contains NaN or infinity: fix the model before quantizing it"
                )


def _is_finite(tensor: Tensor) -> bool:
    # A sum is several times as fast as isfinite on every value. A sum that is not finite may have overflowed.
    return bool(torch.isfinite(tensor.detach().sum())) or bool(torch.isfinite(tensor).all())


def check_formulations(config: QuantConfig, target: Target) -> None:
    """Raise TargetError for a formulation ('minval') that the target supports for no tensor. Needs no model."""
    specs: list[tuple[str, str, Any]] = [
        ("weight", "weight", config.weight),
        ("activation", "activation", config.activation),
    ]
    for override in config.overrides:
        where = f"override for {override.label}, "
        specs.append((f"{where}weight", "weight", override.weight))
        activations = {"activation": override.activation, "input": override.input, "output": override.output}
        specs += [(f"{where}{name}", "activation", spec) for name, spec in activations.items()]
    for where, role, spec in specs:
        if isinstance(spec, QuantizationSpec):
            target.check_formulation(spec, role, where)


def check_overrides(
    sites: Sequence[QuantizationSite], unmatched: Sequence[UnmatchedOperation], config: QuantConfig
) -> None:
    """Raise ConfigError for an override that matches nothing. One for an unmatched operation can only be "float"."""
    for override in config.overrides:
        if any(override.matches(site.names, site.types) for site in sites):
            continue
        settings = {override.weight, override.activation, override.input, override.output} - {None}
        is_unmatched = any(override.matches(operation.names, operation.types) for operation in unmatched)
        if settings == {FLOAT} and is_unmatched:
            continue
        name = override.type or override.name or ""
        known = {site.name for site in sites}
        if override.type:
            known = {site_type for site in sites for site_type in site.types}
        raise ConfigError(
            f"the override for {override.label} matches no operation of this model: {_suggest_name(name, known)}"
        )


def _suggest_name(name: str, known: set[str]) -> str:
    text = did_you_mean(name, known)
    if len(text) < MAX_SUGGESTION_LENGTH:
        return text
    return f"{text[:MAX_SUGGESTION_LENGTH]} ... ({len(known)} in all)"
