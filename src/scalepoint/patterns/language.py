"""The pattern language: describe as data which operations a compiler fuses.

    Pattern("ConvBNReLUPattern", chain(CONV, optional(BATCH_NORM), ACTIVATION), FusedConvBNReLU, (INPUT,))

A pattern is a chain of elements. Each element has a role and the kinds of operations that match. An `optional` element
may be missing. A `join` has two operands in either order, one of them from the chain. A condition `where` can reject an
operation with a reason. The value between two elements must have no other reader, or a compiler could not fuse them.
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
# A condition gets an operation and the nodes that were matched before it. It is named for what it requires. It returns
# None if the operation fulfils this, otherwise a text that says why not.
Condition = Callable[[fx.Node, Nodes], str | None]


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
        where: A further condition: returns None if the operation matches, else a text that says why not.
    """
    if not role:
        raise PatternError("op() needs a role, the name of the operation in the match")
    return Element(role, frozenset(kinds or (role,)), where)


def join(role: str, *kinds: str, where: Condition | None = None) -> Element:
    """Describe an operation with two operands: one is the chain so far, the other comes from elsewhere.

    Args:
        role: Name of the operation in the match.
        *kinds: Kinds of operations that match; the role by default.
        where: A further condition: returns None if the operation matches, else a text that says why not.
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
            raise PatternError(f"the name of a pattern must be a text, got {self.name!r}")
        if not (isinstance(self.match, tuple) and all(isinstance(element, Element) for element in self.match)):
            raise PatternError(f"{self.name}: match must be chain(op(...), ...), got {self.match!r}")
        if not all(isinstance(point, Point) for point in self.qdq_points):
            raise PatternError(f"{self.name}: qdq_points must be members of Point, got {self.qdq_points!r}")
        if not self.match or self.match[0].is_optional or self.match[0].is_join:
            raise PatternError(f"{self.name}: the first element of a chain must be op(...), not optional() or join()")
        roles = [element.role for element in self.match]
        if len(set(roles)) != len(roles):
            raise PatternError(f"{self.name}: roles must be different, got {roles}")
        if not (isinstance(self.make, type) and issubclass(self.make, Fused)):
            raise PatternError(f"{self.name}: make must be a subclass of Fused, got {self.make!r}")

    @property
    def anchor(self) -> Element:
        """The first element, where matching starts."""
        return self.match[0]


def without_points(pattern: Pattern, reason: str) -> Pattern:
    """Return the pattern without Q/DQ points, for a target that computes it in float for this reason."""
    return replace(pattern, qdq_points=(), why_float=pattern.why_float or reason)


@dataclass
class PatternMatch:
    """Operations of a model that match a pattern.

    Attributes:
        pattern: The pattern.
        nodes: The matched nodes by role, in execution order.
        apply: Set it to False to leave the operations as they are.
        reason: Why the match was skipped.
        fused: Name of the fused module, once the match is applied.
    """

    pattern: Pattern
    nodes: Nodes
    apply: bool = True
    reason: str = ""
    fused: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The layer name of its first operation."""
        return get_layer_name(self.nodes[self.pattern.anchor.role])

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.nodes)


@dataclass(frozen=True)
class Refusal:
    """An operation that almost matches a pattern, or that no pattern matches.

    Attributes:
        pattern: Name of the pattern; "" if no pattern matches.
        name: Name of the layer.
        reason: Why it does not match.
    """

    pattern: str
    name: str
    reason: str


def get_layer_name(node: fx.Node) -> str:
    """Return the path of a node's module, or the path of the module that ran a function, and its kind.

    An operation that a conversion made has the name of the layer that it replaced.
    """
    if node.op == "call_module":
        return get_info(node).replaced_layer or str(node.target)
    path = module_path(node)
    return f"{path}.{get_kind(node)}" if path else get_kind(node)


def match_at(pattern: Pattern, anchor: fx.Node) -> PatternMatch | Refusal | None:
    """Match the longest chain of the pattern that starts at a node.

    Returns:
        The match; a Refusal if a condition or another reader prevents it; None if the operations are others.
    """
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
    """Return the reader of `last` that matches the element, or None and the reason."""
    candidates = [user for user in last.users if get_kind(user) in element.kinds]
    if not candidates:
        return None, ""
    following = candidates[0]
    if len(last.users) > 1:
        other_readers = ", ".join(get_layer_name(user) for user in last.users if user is not following)
        return None, f"{get_layer_name(last)} has another reader: {other_readers}"
    if element.is_join and len([arg for arg in following.args if isinstance(arg, fx.Node)]) != 2:
        return None, f"{following.target} does not join two tensors"
    reason = element.where(following, nodes) if element.where else None
    return (None, reason) if reason else (following, "")
