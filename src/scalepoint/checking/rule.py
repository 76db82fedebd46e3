"""What a checker is made of: rules, each a function that yields faults; a finding is a fault with its reasons."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from onnx_ir import Node

from scalepoint.checking.qdq_graph import QdqView, Tensor
from scalepoint.support.formatting import shorten

_MAX_NAME_LENGTH = 120


class Severity(StrEnum):
    """What the compiler does if nothing is changed."""

    ERROR = "error"  # the file is refused, or the engine is not built
    PERFORMANCE = "performance"  # a fusion or a fast kernel is lost
    ACCURACY = "accuracy"
    ADVICE = "advice"


@dataclass(frozen=True)
class Fault:
    """What a rule saw: where, and in a few words what. What else is given overrides the rule's own."""

    node: Node
    tensor: Tensor
    seen: str
    severity: Severity | None = None
    why: str = ""
    way_out: str = ""


@dataclass(frozen=True)
class Rule:
    """`check` yields every place where the rule is broken; `why` and `way_out` are sentences for the user."""

    id: str
    severity: Severity
    why: str
    way_out: str
    check: Callable[[QdqView], Iterator[Fault]]


@dataclass(frozen=True)
class Finding:
    """One violated rule at one place.

    Attributes:
        rule: Name of the rule.
        severity: What the compiler does if nothing is changed.
        node: Name of the node.
        tensor: Name of the tensor.
        why: What is wrong.
        way_out: What to do.
    """

    rule: str
    severity: Severity
    node: str
    tensor: str
    why: str
    way_out: str

    def __str__(self) -> str:
        node, tensor = (shorten(name, _MAX_NAME_LENGTH) for name in (self.node, self.tensor))
        where = f"{node} ({tensor})" if self.tensor else node
        return f"{self.rule} {self.severity.value}: {where}: {shorten(self.why, 1000)}. Way out: {self.way_out}"


def make_finding(view: QdqView, rule: Rule, fault: Fault) -> Finding:
    return Finding(
        rule=rule.id,
        severity=fault.severity or rule.severity,
        node=view.label(fault.node),
        tensor=(fault.tensor.name if fault.tensor else "") or "",
        why=f"{fault.seen}: {fault.why or rule.why}",
        way_out=fault.way_out or rule.way_out,
    )
