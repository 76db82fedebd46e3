"""What a checker is made of: rules, each a function that yields faults; a finding is a fault with its reasons."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalepoint.checking.graph import Node
from scalepoint.checking.qdq import View

_LONGEST_NAME = 120


class Severity(StrEnum):
    """What happens if nothing is done."""

    ERROR = "error"  # the file is refused, or the engine is not built
    PERFORMANCE = "performance"  # a fusion or a fast kernel is lost
    ACCURACY = "accuracy"
    ADVICE = "advice"


@dataclass(frozen=True)
class Fault:
    """What a rule saw: where, and in a few words what. What else is given overrides the rule's own."""

    node: Node
    tensor: str
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
    check: Callable[[View], Iterator[Fault]]


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    rule: str
    severity: Severity
    node: str
    tensor: str
    why: str
    way_out: str

    def __str__(self) -> str:
        where = f"{_plain(self.node)} ({_plain(self.tensor)})" if self.tensor else _plain(self.node)
        return f"{self.rule} {self.severity.value}: {where}: {_plain(self.why, 1000)}. Way out: {self.way_out}"


def finding(rule: Rule, fault: Fault) -> Finding:
    return Finding(
        rule=rule.id,
        severity=fault.severity or rule.severity,
        node=fault.node.name,
        tensor=fault.tensor,
        why=f"{fault.seen}: {fault.why or rule.why}",
        way_out=fault.way_out or rule.way_out,
    )


def _plain(name: str, longest: int = _LONGEST_NAME) -> str:
    """Names come from the file: nothing in them may break the line or steer a terminal."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name[: longest + 1])
    return text if len(text) <= longest else f"{text[:longest]}..."
