"""Where Q/DQ stand: the points of the matched patterns, what the user's config says of them, what the target can run.

match -> Site: its fused node, the operand of each declared point, the part with a weight
Site x config x target -> Decision: specs by point and for the weight, or the reason to leave it float
A pass takes all decisions and returns all decisions, some of them replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import ConfigError, NonFiniteError, PatternError, did_you_mean
from scalepoint.graph import WEIGHTED, Operation
from scalepoint.graph.kinds import OPAQUE, VALUE_PRESERVING, WEIGHTLESS_PRODUCTS
from scalepoint.graph.nodes import find_constant_nodes, get_fake_tensor, module_path
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

COVERED_KINDS = (*WEIGHTED, *WEIGHTLESS_PRODUCTS, "attention", OPAQUE)
CONSTANT_REASON = "made of constants alone: a runtime computes it once, when it loads the file"


@dataclass
class QuantizationSite:
    """One fused group in the graph."""

    match: PatternMatch
    node: fx.Node
    fused: Fused
    role: str | None  # of the part with a weight
    kind: str
    operands: list[tuple[Point, fx.Node]]
    inside: tuple[str, ...] = ()  # the classes of the modules around it
    unsupported_reason: str = ""  # why a product has no weight that could be quantized
    is_constant: bool = False

    @property
    def part(self) -> nn.Module | None:
        return None if self.role is None else self.fused.parts[self.role]

    @property
    def name(self) -> str:
        """As the user knows it: the path of its module."""
        return self.match.name or self.match.fused

    @property
    def names(self) -> tuple[str, ...]:
        return (self.match.name, self.match.fused)

    @property
    def types(self) -> set[str]:
        parts = self.fused.parts.values()
        return {
            self.match.pattern.name,
            type(self.fused).__name__,
            self.kind,
            *(type(part).__name__ for part in parts),
            *({"Linear"} if self.kind == "linear" else set()),
            *self.inside,
        }


@dataclass(frozen=True)
class Decision:
    """What is inserted at a site."""

    site: QuantizationSite
    weight: QuantizationSpec | None = None
    points: tuple[tuple[Point, fx.Node, QuantizationSpec], ...] = ()
    state: OperationState = OperationState.FLOAT
    reason: str = ""
    is_requested_float: bool = False  # by the config
    is_target_default: bool = False  # the target runs operations of its kind in float
    saves: float | None = None  # seconds that float wins, where it stays float for speed
    seconds: tuple[float, float] | None = None  # in float and in int8, where those are the reason


@dataclass(frozen=True)
class PlacementContext:
    """What every pass over the decisions can read."""

    model: fx.GraphModule
    config: QuantConfig
    target: Target | None


def find_sites(model: fx.GraphModule, matches: Sequence[PatternMatch]) -> list[QuantizationSite]:
    """The groups of the matches, in graph order."""
    by_target: dict[str, list[fx.Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module":
            by_target.setdefault(str(node.target), []).append(node)
    sites = []
    fixed = find_constant_nodes(model.graph)
    for match in matches:
        nodes = by_target.get(match.fused)
        if not nodes:
            raise PatternError(
                f"{match.pattern.name} at {match.fused or match.name} is not in this model: pass the model and the "
                "matches of one transform"
            )
        fused = model.get_submodule(match.fused)
        assert isinstance(fused, Fused)  # noqa: S101  # a pattern makes nothing else
        inside = _get_enclosing_classes(model, match.name)
        sites += [_make_site(match, node, fused, inside, node in fixed) for node in nodes]
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    return sorted(sites, key=lambda site: order[site.node])


def _get_enclosing_classes(model: fx.GraphModule, name: str) -> tuple[str, ...]:
    """The classes of the modules that a path leads through: nn.MultiheadAttention for its projections."""
    classes, module = [], model
    for leaf in name.split(".")[:-1]:
        child = module._modules.get(leaf)
        if child is None:
            break
        classes.append(type(child).__name__)
        module = child  # type: ignore[assignment]
    return tuple(classes)


def _make_site(
    match: PatternMatch, node: fx.Node, fused: Fused, inside: tuple[str, ...], is_constant: bool
) -> QuantizationSite:
    kinds = {role: get_part_kind(part) for role, part in fused.parts.items()}
    role = next((role for role, kind in kinds.items() if kind in WEIGHT_PRODUCTS or kind == EMBEDDING), None)
    kind = kinds[role] if role else next(iter(kinds.values()))
    unfit = explain_unsupported_weight(fused.parts[role], kind) if role is not None else ""
    operands = find_operands(match, node, fused)
    return QuantizationSite(match, node, fused, None if unfit else role, kind, operands, inside, unfit, is_constant)


def explain_unsupported_weight(part: nn.Module, kind: str) -> str:
    """Why the weight of a product cannot be quantized and stored; "" if it can."""
    if not isinstance(getattr(part, "weight", None), Tensor):
        return "its weight is computed from the data, not stored"
    axes = len(get_weight_shape(part))
    settings = part.arguments if isinstance(part, Operation) else vars(part)
    if kind == EMBEDDING and settings.get("max_norm") is not None:
        return "it scales its rows when it looks them up (max_norm)"
    if kind in ("linear", EMBEDDING) and axes != 2:
        return f"its weight has {axes} axes, that of {'a linear layer' if kind == 'linear' else 'a table'} has two"
    slots = (
        [value for value in part.arguments.values() if isinstance(value, Slot)] if isinstance(part, Operation) else []
    )
    return "its bias is computed from the data, not stored" if len(slots) > 1 else ""


def find_operands(match: PatternMatch, node: fx.Node, fused: Fused) -> list[tuple[Point, fx.Node]]:
    """The tensor of each point that the pattern declares.

    INPUT, KEY_INPUT and VALUE_INPUT are the first three inputs of the first part (or, where attention is written out,
    the value is what the last part joins); RESIDUAL_INPUT is what a join takes from elsewhere, or the second input of
    an add. The INPUT of a concat are all its inputs.
    """
    joins = [
        next(index for index in sources if index is not None)
        for sources in fused.wiring[1:]
        if any(index is not None for index in sources)
    ]
    first = _order_inputs(next(iter(fused.parts.values())), fused.wiring[0])
    is_concat = get_part_kind(next(iter(fused.parts.values()))) == "cat"
    places: dict[Point, list[int]] = {
        Point.INPUT: list(range(len(node.args))) if is_concat else first[:1],
        Point.KEY_INPUT: first[1:2],
        Point.VALUE_INPUT: first[2:3] or joins[-1:],
        Point.RESIDUAL_INPUT: joins[:1] or first[1:2],
    }
    operands: list[tuple[Point, fx.Node]] = []
    for point in match.pattern.qdq_points:
        tensors = [node] if point == Point.OUTPUT else [node.args[place] for place in places[point]]
        operands += [(point, tensor) for tensor in tensors if isinstance(tensor, fx.Node) and _is_float(tensor)]
    return operands


def _order_inputs(part: nn.Module, sources: Sequence[int | None]) -> list[int]:
    """The inputs of a part as its arguments name them: a tensor given twice is there twice."""
    if isinstance(part, Operation):
        slots = [value.index for value in part.arguments.values() if isinstance(value, Slot)]
        chosen = [sources[slot] for slot in slots if slot < len(sources)]
    else:
        chosen = list(sources)
    return [source for source in chosen if source is not None]


def _is_float(node: fx.Node) -> bool:
    value = get_fake_tensor(node)
    return value is None or value.is_floating_point()


def get_operation_facts(site: QuantizationSite, config: QuantConfig, target: Target | None) -> OperationFacts:
    activation = _choose_spec(site, "input", config, target)
    if isinstance(site.fused, FusedAttention):
        return OperationFacts(
            site.name, "attention", site.match.pattern.name, activation=activation, **_get_attention_facts(site)
        )
    part = site.part
    shape = get_weight_shape(part)
    if isinstance(part, Operation) and part.has_transposed_weight:
        shape = shape[::-1]
    groups: Any = part.arguments.get("groups", 1) if isinstance(part, Operation) else getattr(part, "groups", 1)
    is_first = any(operand.op == "placeholder" for _, operand in site.operands)
    weight = None if part is None else _choose_spec(site, "weight", config, target)
    return OperationFacts(
        site.name, site.kind, site.match.pattern.name, shape, int(groups), is_first, activation, weight
    )


def _get_point_role(point: Point) -> str:
    return "output" if point == Point.OUTPUT else "input"


def _get_attention_facts(site: QuantizationSite) -> dict[str, Any]:
    """Whether a mask is computed, and how many tokens there are."""
    operands = [operand for _, operand in site.operands]
    others = [each for each in site.node.args if isinstance(each, fx.Node) and each not in operands]
    first = next(iter(site.fused.parts.values()))
    is_causal = isinstance(first, Operation) and bool(first.arguments.get("is_causal"))
    sizes = [
        value.shape[-2] for operand in operands if (value := get_fake_tensor(operand)) is not None and value.ndim > 1
    ]
    return {
        "is_masked": is_causal or any(map(_depends_on_inputs, others)),
        "tokens": max((size for size in sizes if isinstance(size, int)), default=0),
    }


def _depends_on_inputs(node: fx.Node) -> bool:
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if each.op == "placeholder":
            return True
        behind = [source for source in each.all_input_nodes if source not in seen]
        seen.update(behind)
        pending += behind
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
    """Operations that appear in the coverage and are in no group, in graph order."""
    taken = {site.node for site in sites}
    fixed = find_constant_nodes(model.graph)
    return [
        UnmatchedOperation(
            node,
            model.get_submodule(str(node.target)) if node.op == "call_module" else None,
            get_kind(node),
            get_layer_name(node),
            node in fixed,
        )
        for node in model.graph.nodes
        if node not in taken and get_kind(node) in (*COVERED_KINDS, "fused") and not _is_unary_einsum(node)
    ]


def _is_unary_einsum(node: fx.Node) -> bool:
    """An einsum of one tensor transposes or adds up."""
    return get_kind(node) == "einsum" and len(node.all_input_nodes) < 2


def decide(site: QuantizationSite, config: QuantConfig, target: Target | None) -> Decision:
    """What is inserted at a site, and why not when nothing is."""
    if not site.match.pattern.qdq_points or site.is_constant:
        reason = CONSTANT_REASON if site.match.pattern.qdq_points else explain_float_pattern(site, target)
        return Decision(site, reason=reason, is_target_default=True)
    if site.unsupported_reason:
        return Decision(site, reason=site.unsupported_reason)
    is_overridden = any(override.matches(site.names, site.types) for override in config.overrides)
    why = (
        target.why_float(get_operation_facts(site, config, target))
        if target is not None and not is_overridden
        else None
    )
    if why:
        return Decision(site, reason=why)
    specs = [
        (point, tensor, _resolve_spec(site, _get_point_role(point), config, target))
        for point, tensor in _get_points(site, config, target)
    ]
    points = tuple((point, tensor, spec) for point, tensor, spec in specs if spec is not None)
    weight = None if site.role is None else _resolve_spec(site, "weight", config, target)
    float_roles = [_get_point_role(point) for point, _, spec in specs if spec is None]
    float_roles += ["weight"] if site.role is not None and weight is None else []
    if points or weight:
        floats = f"{' and '.join(dict.fromkeys(float_roles))} float: asked for by the config" if float_roles else ""
        dense = explain_dense_weight(site, _choose_spec(site, "weight", config, target)) if weight else ""
        return Decision(
            site, weight, points, OperationState.QUANTIZED, "; ".join(text for text in (floats, dense) if text)
        )
    if float_roles:
        return Decision(site, reason="asked for by the config", is_requested_float=True)
    return Decision(site, reason="its inputs are not float tensors")


def explain_float_pattern(site: QuantizationSite, target: Target | None) -> str:
    """Why a group whose pattern has no points stays as it is, in the pattern's own words where it has some."""
    where = "here" if target is None else f"on {target.name}"
    return site.match.pattern.why_float or f"a {site.kind} runs in float {where}"


def leave_inputs_of_float_layers_float(context: PlacementContext, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Leave an operation without weights float if all layers that read it are float, on targets that gain nothing."""
    if context.target is None or not context.target.float_if_readers_are_float:
        return decisions
    readers: dict[fx.Node, list[Decision]] = {}
    for decision in decisions:
        for _, operand in decision.site.operands if decision.site.role else ():
            readers.setdefault(_skip_value_preserving(operand), []).append(decision)
    # Readers have weights, and only decisions without weights are replaced: their order does not matter.
    return [_make_float_if_readers_are(decision, readers.get(decision.site.node, [])) for decision in decisions]


def _make_float_if_readers_are(decision: Decision, readers: Sequence[Decision]) -> Decision:
    has_output = any(point == Point.OUTPUT for point, _, _ in decision.points)
    is_read_as_float = bool(readers) and all(reader.state == OperationState.FLOAT for reader in readers)
    if decision.site.role is not None or not has_output or not is_read_as_float:
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
    while get_kind(node) in VALUE_PRESERVING and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _choose_spec(
    site: QuantizationSite, role: str, config: QuantConfig, target: Target | None
) -> QuantizationSpec | None:
    """What the config says, else the target's choice, else the default; None is float."""
    spec = config.spec_for(role, site.names, site.types)
    if spec is None:
        if target is not None:
            spec = target.weight if role == "weight" else target.activation_for(site.match.pattern.name)
        else:
            is_weight = role == "weight"
            spec = default_weight_quantization_spec() if is_weight else default_activation_quantization_spec()
    return spec if isinstance(spec, QuantizationSpec) else None


def _resolve_spec(
    site: QuantizationSite, role: str, config: QuantConfig, target: Target | None
) -> QuantizationSpec | None:
    spec = _choose_spec(site, role, config, target)
    kind = "weight" if role == "weight" else "activation"
    if spec is None:
        return None
    if target is not None:
        target.check(spec, kind, site.kind, site.name)
    if role == "weight" and site.part is not None:
        check_weights_are_finite(site)
        spec = spec if target is None else target.weight_for(spec, get_operation_facts(site, config, target))
        spec = spec.replace(granularity=spec.granularity.resolve(_get_layer_class(site)))
        spec = spec.replace(sparsity=None) if explain_dense_weight(site, spec) else spec
    return spec


def make_stored_weight_spec(site: QuantizationSite, config: QuantConfig, target: Target) -> QuantizationSpec | None:
    """Of a weight that is stored in int8 and multiplied as float: the one it would have were its inputs float; None
    where that has a zero point, blocks or another width."""
    spec = None if site.role is None else _choose_spec(site, "weight", config, target)
    if spec is None:
        return None
    spec = target.weight_for(spec, replace(get_operation_facts(site, config, target), activation=None))
    spec = spec.replace(granularity=spec.granularity.resolve(_get_layer_class(site)))
    is_plain = isinstance(spec.granularity, PerTensorGranularity | PerChannelGranularity) and spec.qformulation == "zp"
    is_symmetric = spec.qscheme != QuantizationScheme.ASYMMETRIC
    fits = spec.dtype == torch.int8 and is_plain and is_symmetric and get_sparsity(spec) is None
    return spec if fits else None


def explain_dense_weight(site: QuantizationSite, spec: QuantizationSpec | None) -> str:
    """Why a weight that is to be sparse cannot be; "" where it can, or need not."""
    sparsity = None if spec is None else get_sparsity(spec)
    if sparsity is None or site.part is None:
        return ""
    shape = get_weight_shape(site.part)
    if isinstance(site.part, Operation) and site.part.has_transposed_weight:
        shape = shape[::-1]
    return sparsity.reason_unsupported(shape, is_transposed=site.kind == "conv_transpose")


def _get_points(site: QuantizationSite, config: QuantConfig, target: Target | None) -> list[tuple[Point, fx.Node]]:
    """All that the pattern declares; an output whose parameters are made anew for every call is left to its readers."""
    spec = _choose_spec(site, "output", config, target)
    is_dynamic = spec is not None and issubclass(spec.qparam_calculator_cls, DynamicQParamsCalculator)
    return [each for each in site.operands if not (is_dynamic and each[0] == Point.OUTPUT)]


def _get_layer_class(site: QuantizationSite) -> type[nn.Module]:
    """The class whose layout the weight has, as granularities know it."""
    return nn.ConvTranspose2d if site.kind == "conv_transpose" else nn.Conv2d


def check_weights_are_finite(site: QuantizationSite) -> None:
    """Refuse weights that hold NaN or infinity."""
    for role, part in site.fused.parts.items():
        tensors = (*get_tensors(part), *part.buffers(), getattr(part, "weight", None))
        for tensor in {id(each): each for each in tensors if isinstance(each, Tensor)}.values():
            if tensor.is_floating_point() and not tensor.is_meta and not _is_finite(tensor):
                where = get_layer_name(site.match.nodes[role]) if role in site.match.nodes else site.name
                raise NonFiniteError(
                    f"{where}: its weight holds NaN or infinity. Mend the model before it is quantized"
                )


def _is_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and is found several times as fast; one that is not may have run over."""
    return bool(torch.isfinite(tensor.detach().sum())) or bool(torch.isfinite(tensor).all())


def check_formulations(config: QuantConfig, target: Target) -> None:
    """Raise TargetError for a formulation ('minval') that the target has for no tensor; no model is needed."""
    specs: list[tuple[str, str, Any]] = [
        ("weight", "weight", config.weight),
        ("activation", "activation", config.activation),
    ]
    for override in config.overrides:
        where = f"override for {override.label}, "
        specs.append((f"{where}weight", "weight", override.weight))
        inputs = {"activation": override.activation, "input": override.input, "output": override.output}
        specs += [(f"{where}{name}", "activation", spec) for name, spec in inputs.items()]
    for where, role, spec in specs:
        if isinstance(spec, QuantizationSpec):
            target.check_formulation(spec, role, where)


def check_overrides(
    sites: Sequence[QuantizationSite], unmatched: Sequence[UnmatchedOperation], config: QuantConfig
) -> None:
    """Raise ConfigError for an override that fits nothing; one for an unmatched operation can only be float."""
    for override in config.overrides:
        if any(override.matches(site.names, site.types) for site in sites):
            continue
        wishes = {override.weight, override.activation, override.input, override.output} - {None}
        if wishes == {FLOAT} and any(override.matches(each.names, each.types) for each in unmatched):
            continue
        known = {kind for site in sites for kind in site.types} if override.type else {site.name for site in sites}
        given = override.type or override.name or ""
        raise ConfigError(
            f"the override for {override.label} fits no operation of this model: {_shorten_suggestion(given, known)}"
        )


def _shorten_suggestion(given: str, known: set[str]) -> str:
    text = did_you_mean(given, known)
    return text if len(text) < 400 else text[:400] + f" ... ({len(known)} in all)"
