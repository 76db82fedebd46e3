"""The operations of a transformed model to which quantizers can be added.

match of a pattern -> QuantizationSite: the fused node, the tensor of each point of the pattern, the weighted part
other operation with weights or a product -> UnmatchedOperation: appears in the coverage and stays float
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from scalepoint.errors import ConfigError, PatternError, did_you_mean
from scalepoint.graph import WEIGHTED, Operation
from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.kinds import OPAQUE, WEIGHTLESS_PRODUCTS
from scalepoint.graph.nodes import get_fake_tensor, module_path
from scalepoint.graph.operations import Slot
from scalepoint.patterns import Fused, PatternMatch, Point, get_kind
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.config import FLOAT, QuantConfig
from scalepoint.quantize.operations import EMBEDDING, WEIGHT_PRODUCTS, get_part_kind, get_weight_shape

COVERED_KINDS = (*WEIGHTED, *WEIGHTLESS_PRODUCTS, "attention", OPAQUE)
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
