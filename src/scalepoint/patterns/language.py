"""The pattern language: what a compiler fuses, said as data.

    Pattern("ConvBNReLUPattern", chain(CONV, optional(BATCH_NORM), ACTIVATION), FusedConvBNReLU, (INPUT,))

A pattern is a chain of elements. Each names a role and the kinds it takes (alternatives); `optional` may be absent;
`join` has two operands, one from the chain and one from elsewhere, in either order; `where` may refuse, with a reason.
Between two elements nobody else reads, or the compiler could not fuse them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import fx

from scalepoint.errors import PatternError
from scalepoint.graph.nodes import get_info, get_kind, module_path
from scalepoint.patterns.fused import Fused


class Point(StrEnum):
    """An operand of a fused group that may be quantized."""

    INPUT = "input"
    RESIDUAL_INPUT = "residual_input"
    KEY_INPUT = "key_input"
    VALUE_INPUT = "value_input"
    OUTPUT = "output"


Nodes = dict[str, fx.Node]
Condition = Callable[[fx.Node, Nodes], str | None]  # the reason for a refusal, or None


@dataclass(frozen=True)
class Element:
    """One operation of a chain."""

    role: str
    kinds: frozenset[str]
    where: Condition | None = None
    is_optional: bool = False
    is_join: bool = False


def op(role: str, *kinds: str, where: Condition | None = None) -> Element:
    """Describe one operation of a chain.

    Args:
        role: Name of the operation in the match.
        *kinds: Kinds of operations that match; the role by default.
        where: A further condition. It returns the reason for a refusal, or None.
    """
    if not role:
        raise PatternError("an operation of a pattern has a role")
    return Element(role, frozenset(kinds or (role,)), where)


def join(role: str, *kinds: str, where: Condition | None = None) -> Element:
    """Describe an operation with two operands: one is the chain so far, the other comes from elsewhere.

    Args:
        role: Name of the operation in the match.
        *kinds: Kinds of operations that match; the role by default.
        where: A further condition. It returns the reason for a refusal, or None.
    """
    return replace(op(role, *kinds, where=where), is_join=True)


def optional(element: Element) -> Element:
    """Describe an operation that may be missing in a chain.

    Args:
        element: What `op` or `join` returned.
    """
    return replace(element, is_optional=True)


def chain(*elements: Element) -> tuple[Element, ...]:
    """Describe operations that follow each other.

    Args:
        *elements: What `op`, `optional` and `join` return, first operation first.
    """
    return elements


@dataclass(frozen=True)
class Pattern:
    """Operations that belong together, and where quantizers may stand.

    Attributes:
        name: Name of the pattern.
        match: The operations to look for.
        make: Builds the fused module.
        qdq_points: The operands that may be quantized.
        why_float: The reason for the report if there are none.
    """

    name: str
    match: tuple[Element, ...]
    make: type[Fused]
    qdq_points: tuple[Point, ...] = ()
    why_float: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise PatternError(f"a pattern has a name, not {self.name!r}")
        if not (isinstance(self.match, tuple) and all(isinstance(element, Element) for element in self.match)):
            raise PatternError(f"{self.name}: match is chain(op(...), ...), not {self.match!r}")
        if not all(isinstance(point, Point) for point in self.qdq_points):
            raise PatternError(f"{self.name}: qdq_points are members of Point, not {self.qdq_points!r}")
        if not self.match or self.match[0].is_optional or self.match[0].is_join:
            raise PatternError(f"{self.name}: a chain starts with an operation that is there and has one chain input")
        roles = [element.role for element in self.match]
        if len(set(roles)) != len(roles):
            raise PatternError(f"{self.name}: each role is named once, not {roles}")
        if not (isinstance(self.make, type) and issubclass(self.make, Fused)):
            raise PatternError(f"{self.name}: make is a subclass of Fused, not {self.make!r}")

    @property
    def anchor(self) -> Element:
        return self.match[0]


def without_points(pattern: Pattern, why: str) -> Pattern:
    """The same for a target that has no kernel for it in low precision."""
    return replace(pattern, qdq_points=(), why_float=pattern.why_float or why)


@dataclass
class PatternMatch:
    """One place where a pattern fits. Set `apply` to False to leave it alone; `reason` tells why it was skipped."""

    pattern: Pattern
    nodes: Nodes
    apply: bool = True
    reason: str = ""
    fused: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Where it stands in the model: the path of its first operation."""
        return get_layer_name(self.nodes[self.pattern.anchor.role])

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.nodes)


@dataclass(frozen=True)
class Refusal:
    """A place where a pattern almost fits, and why it does not."""

    pattern: str
    name: str
    reason: str


def get_layer_name(node: fx.Node) -> str:
    """Where a node stands in the model: its module, or the module that ran it and its kind."""
    if node.op == "call_module":
        return get_info(node).replaced_layer or str(node.target)  # what a conversion made stands where its origin stood
    path = module_path(node)
    return f"{path}.{get_kind(node)}" if path else get_kind(node)


def match_at(pattern: Pattern, anchor: fx.Node) -> PatternMatch | Refusal | None:
    """The longest chain of the pattern that starts here; a Refusal when a condition or a second reader forbids it."""
    if get_kind(anchor) not in pattern.anchor.kinds:
        return None
    reason = pattern.anchor.where(anchor, {}) if pattern.anchor.where else None
    if reason:
        return Refusal(pattern.name, get_layer_name(anchor), reason)
    nodes: Nodes = {pattern.anchor.role: anchor}
    last, refusal = anchor, ""
    for element in pattern.match[1:]:
        following, reason = _find_next(last, element, nodes)
        refusal = reason or refusal
        if following is not None:
            nodes[element.role] = last = following
        elif not element.is_optional:
            return Refusal(pattern.name, get_layer_name(anchor), refusal) if refusal else None
    return PatternMatch(pattern, nodes)


def _find_next(last: fx.Node, element: Element, nodes: Nodes) -> tuple[fx.Node | None, str]:
    """The reader of `last` that the element takes, or why there is none."""
    fitting = [user for user in last.users if get_kind(user) in element.kinds]
    if not fitting:
        return None, ""
    if len(last.users) > 1:
        others = ", ".join(get_layer_name(user) for user in last.users if user is not fitting[0])
        return None, f"{get_layer_name(last)} has another reader: {others}"
    following = fitting[0]
    if element.is_join and len([arg for arg in following.args if isinstance(arg, fx.Node)]) != 2:
        return None, f"{following.target} does not join two tensors"
    reason = element.where(following, nodes) if element.where else None
    return (None, reason) if reason else (following, "")
