"""Where Q/DQ stand: the points of the matched patterns, what the user's config says of them, what the target can run.

match -> Site: its fused node, the operand of each declared point, the part with a weight
Site x config x target -> Decision: specs by point and for the weight, or the reason to leave it float
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import ConfigError, NonFiniteError, PatternError, nearest
from scalepoint.graph import Operation
from scalepoint.graph.lift import tensor_of
from scalepoint.graph.modules import Slot
from scalepoint.patterns import Fused, PatternMatch, Point
from scalepoint.quantize.config import FLOAT, QuantConfig
from scalepoint.quantize.weighted import MULTIPLIES, kind_of_part, weight_shape
from scalepoint.spec import QuantizationSpec, default_activation_quantization_spec, default_weight_quantization_spec
from scalepoint.targets import Facts, Target


class State(StrEnum):
    """What became of an operation."""

    QUANTIZED = "quantized"
    FLOAT = "float"
    REFUSED = "refused"


@dataclass
class Site:
    """One fused group in the graph."""

    match: PatternMatch
    node: fx.Node
    fused: Fused
    role: str | None  # of the part with a weight
    kind: str
    operands: list[tuple[Point, fx.Node]]

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
        }


@dataclass
class Decision:
    """What is inserted at a site."""

    site: Site
    weight: QuantizationSpec | None = None
    points: list[tuple[Point, fx.Node, QuantizationSpec]] = field(default_factory=list)
    state: State = State.FLOAT
    reason: str = ""
    is_asked: bool = False  # whether config or pattern wants it float


def sites_of(model: fx.GraphModule, matches: Sequence[PatternMatch]) -> list[Site]:
    """The groups of the matches, in graph order."""
    by_target: dict[str, list[fx.Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module":
            by_target.setdefault(str(node.target), []).append(node)
    sites = []
    for match in matches:
        nodes = by_target.get(match.fused)
        if not nodes:
            raise PatternError(
                f"{match.pattern.name} at {match.fused or match.name} is not in this model: pass the model and the "
                "matches of one transform"
            )
        fused = model.get_submodule(match.fused)
        assert isinstance(fused, Fused)  # noqa: S101  # a pattern makes nothing else
        sites += [_site(match, node, fused) for node in nodes]
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    return sorted(sites, key=lambda site: order[site.node])


def _site(match: PatternMatch, node: fx.Node, fused: Fused) -> Site:
    kinds = {role: kind_of_part(part) for role, part in fused.parts.items()}
    role = next((role for role, kind in kinds.items() if kind in MULTIPLIES), None)
    kind = kinds[role] if role else next(iter(kinds.values()))
    return Site(match, node, fused, role, kind, operands_of(match, node, fused))


def operands_of(match: PatternMatch, node: fx.Node, fused: Fused) -> list[tuple[Point, fx.Node]]:
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
    first = _ordered_inputs(next(iter(fused.parts.values())), fused.wiring[0])
    is_concat = kind_of_part(next(iter(fused.parts.values()))) == "cat"
    places: dict[Point, list[int]] = {
        Point.INPUT: list(range(len(node.args))) if is_concat else first[:1],
        Point.KEY_INPUT: first[1:2],
        Point.VALUE_INPUT: first[2:3] or joins[-1:],
        Point.RESIDUAL_INPUT: joins[:1] or first[1:2],
    }
    found: list[tuple[Point, fx.Node]] = []
    for point in match.pattern.qdq_points:
        operands = [node] if point == Point.OUTPUT else [node.args[place] for place in places[point]]
        found += [(point, each) for each in operands if isinstance(each, fx.Node) and _is_float(each)]
    return found


def _ordered_inputs(part: nn.Module, sources: Sequence[int | None]) -> list[int]:
    """The inputs of a part as its arguments name them: a tensor given twice is there twice."""
    if isinstance(part, Operation):
        slots = [value.index for value in part.arguments.values() if isinstance(value, Slot)]
        chosen = [sources[slot] for slot in slots if slot < len(sources)]
    else:
        chosen = list(sources)
    return [source for source in chosen if source is not None]


def _is_float(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is None or value.is_floating_point()


def facts_of(site: Site) -> Facts:
    part = site.part
    shape = weight_shape(part)
    if isinstance(part, Operation) and part.has_input_first:
        shape = shape[::-1]
    groups: Any = part.arguments.get("groups", 1) if isinstance(part, Operation) else getattr(part, "groups", 1)
    is_first = any(operand.op == "placeholder" for _, operand in site.operands)
    return Facts(site.name, site.kind, site.match.pattern.name, shape, int(groups), is_first)


def decide(sites: Iterable[Site], config: QuantConfig, target: Target | None) -> list[Decision]:
    """What is inserted at each site, and why not where nothing is."""
    sites = list(sites)
    _check_overrides(sites, config)
    return [_decide(site, config, target) for site in sites]


def _decide(site: Site, config: QuantConfig, target: Target | None) -> Decision:
    decision = Decision(site)
    if not site.match.pattern.qdq_points:
        decision.reason, decision.is_asked = f"{site.match.pattern.name} has no Q/DQ points on this target", True
        return decision
    asked = any(override.fits(site.names, site.types) for override in config.overrides)
    why = target.why_float(facts_of(site)) if target is not None and not asked else None
    if why:
        decision.reason = why
        return decision
    said: list[str] = []
    for point, operand in site.operands:
        role = "output" if point == Point.OUTPUT else "input"
        spec = _spec(site, role, config, target)
        if spec is None:
            said.append(role)
        else:
            decision.points.append((point, operand, spec))
    if site.role is not None:
        decision.weight = _spec(site, "weight", config, target)
        said += [] if decision.weight else ["weight"]
    if decision.points or decision.weight:
        decision.state = State.QUANTIZED
        decision.reason = f"{' and '.join(dict.fromkeys(said))} float: asked for by the config" if said else ""
    elif said:
        decision.reason, decision.is_asked = "asked for by the config", True
    else:
        decision.reason = "its inputs are not float tensors"
    return decision


def _spec(site: Site, role: str, config: QuantConfig, target: Target | None) -> QuantizationSpec | None:
    spec = config.spec_for(role, site.names, site.types)
    kind = "weight" if role == "weight" else "activation"
    if spec is None:
        if target is not None:
            spec = target.weight if role == "weight" else target.activation
        else:
            is_weight = role == "weight"
            spec = default_weight_quantization_spec() if is_weight else default_activation_quantization_spec()
    if spec == FLOAT or not isinstance(spec, QuantizationSpec):
        return None
    if target is not None:
        target.check(spec, kind, site.kind, site.name)
    if role == "weight" and site.part is not None:
        _check_weight(site)
        spec = spec if target is None else target.weight_for(spec, facts_of(site))
        spec = spec.replace(granularity=spec.granularity.resolve(_layer(site)))
    return spec


def _layer(site: Site) -> type[nn.Module]:
    """The class whose layout the weight has, as granularities know it."""
    return nn.ConvTranspose2d if site.kind == "conv_transpose" else nn.Conv2d


def _check_weight(site: Site) -> None:
    weight = getattr(site.part, "weight", None)
    if isinstance(weight, Tensor) and not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(f"{site.name}: its weight holds NaN or infinity. Mend the model before it is quantized")


def _check_overrides(sites: Sequence[Site], config: QuantConfig) -> None:
    """A name or type that fits nothing is a mistake, not a wish."""
    for override in config.overrides:
        if any(override.fits(site.names, site.types) for site in sites):
            continue
        known = {kind for site in sites for kind in site.types} if override.type else {site.name for site in sites}
        given = override.type or override.name or ""
        raise ConfigError(f"the override for {override.label} fits no operation of this model: {_short(given, known)}")


def _short(given: str, known: set[str]) -> str:
    text = nearest(given, known)
    return text if len(text) < 400 else text[:400] + f" ... ({len(known)} in all)"
