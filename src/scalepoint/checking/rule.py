"""Rules and findings: a rule is a function that yields faults; a finding is a fault with the rule's explanation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from onnx_ir import Node

from scalepoint.checking.qdq_graph import QdqView, Tensor
from scalepoint.support.formatting import shorten

_MAX_NAME_LENGTH = 120


class Severity(StrEnum):
    """The consequence if nothing is changed."""

    ERROR = "error"  # the compiler rejects the file or fails
    PERFORMANCE = "performance"  # a fusion or a fast kernel is lost
    ACCURACY = "accuracy"
    ADVICE = "advice"


@dataclass(frozen=True)
class Fault:
    """One place where a rule is violated. `severity`, `why` and `way_out` override those of the rule."""

    node: Node
    tensor: Tensor
    description: str
    severity: Severity | None = None
    why: str = ""
    way_out: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule: `check` yields a fault for every violation; `why` and `way_out` explain it to the user."""

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
        return f"{self.rule} {self.severity.value}: {where}: {shorten(self.why, 1000)}. What to do: {self.way_out}"


def make_finding(view: QdqView, rule: Rule, fault: Fault) -> Finding:
    return Finding(
        rule=rule.id,
        severity=fault.severity or rule.severity,
        node=view.label(fault.node),
        tensor=(fault.tensor.name if fault.tensor else "") or "",
        why=f"{fault.description}: {fault.why or rule.why}",
        way_out=fault.way_out or rule.way_out,
    )
