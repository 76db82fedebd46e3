"""The plan: every match with what is to happen to it. Look at it, switch matches off, save it, apply it."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import fx

from scalepoint.compat.torch_names import HigherOrderOperator
from scalepoint.errors import PatternError, short_repr
from scalepoint.graph.kinds import WEIGHTED
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.weight_readers import find_unknown_readers
from scalepoint.patterns.language import Pattern, PatternMatch, Refusal, get_layer_name, match_at
from scalepoint.support.documents import parse_json
from scalepoint.support.formatting import one_line

VERSION = 1


@dataclass
class TransformationPlan:
    """Matches in graph order, and the places that were refused with the reason."""

    model: fx.GraphModule
    matches: list[PatternMatch]
    refusals: list[Refusal] = field(default_factory=list)
    converted: dict[str, int] = field(default_factory=dict)
    is_applied: bool = False

    def counts(self) -> dict[str, int]:
        """How many matches of each pattern would be applied."""
        return dict(Counter(match.pattern.name for match in self.matches if match.apply))

    def table(self) -> Table:
        table = Table(title="transformation plan")
        for column in ("where", "pattern", "operations", "apply", "reason"):
            table.add_column(column, overflow="fold")
        for match in self.matches:
            answer = "yes" if match.apply else "no"
            row = (match.name, match.pattern.name, " + ".join(match.roles), answer, match.reason)
            table.add_row(*(Text(one_line(cell)) for cell in row))
        for refusal in self.refusals:
            if not refusal.pattern:
                cells = (refusal.name, "", "", "no", refusal.reason)
                table.add_row(*(Text(one_line(cell)) for cell in cells))
        return table

    def to_json(self) -> str:
        rows = [
            {"where": match.name, "pattern": match.pattern.name, "apply": match.apply, "reason": match.reason}
            for match in self.matches
        ]
        return json.dumps({"version": VERSION, "matches": rows}, indent=2)

    def load_json(self, text: str) -> None:
        """Take over what a saved plan says of each match: of all that are in this plan, and of no other."""
        data = parse_json(text)
        if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("matches"), list):
            raise PatternError(f"not a plan of version {VERSION}")
        matches_by_key: dict[tuple[str, str], list[PatternMatch]] = {}
        for match in self.matches:
            matches_by_key.setdefault((match.name, match.pattern.name), []).append(match)
        saved: list[tuple[PatternMatch, dict[str, Any]]] = []
        for row in data["matches"]:
            if not isinstance(row, dict) or not isinstance(row.get("apply"), bool):
                raise PatternError(f"a row of a plan has 'where', 'pattern' and 'apply', not {short_repr(row)}")
            there = matches_by_key.get((str(row.get("where", "")), str(row.get("pattern", ""))))
            if not there:
                raise PatternError(f"a plan of another model: {row.get('pattern')} at {row.get('where')} is not here")
            saved.append((there.pop(0), row))
        missing = [f"{match.pattern.name} at {match.name}" for matches in matches_by_key.values() for match in matches]
        if missing:
            raise PatternError(
                f"the saved plan does not speak of {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}"
            )
        for match, row in saved:
            match.apply, match.reason = row["apply"], str(row.get("reason", ""))


def make_plan(model: fx.GraphModule, patterns: tuple[Pattern, ...]) -> TransformationPlan:
    """Match the patterns, longest first and in graph order; an operation belongs to one match."""
    _check_patterns(patterns)
    by_kind: dict[str, list[fx.Node]] = {}
    order = {}
    for index, node in enumerate(model.graph.nodes):
        order[node] = index
        by_kind.setdefault(get_kind(node), []).append(node)
    matched: set[fx.Node] = set()
    matches: list[PatternMatch] = []
    refusals: list[Refusal] = []
    for pattern in sorted(patterns, key=lambda pattern: -len(pattern.match)):
        anchors = [node for kind in pattern.anchor.kinds for node in by_kind.get(kind, ())]
        for anchor in sorted(anchors, key=order.__getitem__):
            if anchor in matched:
                continue
            attempt = _try_match(pattern, anchor)
            if isinstance(attempt, PatternMatch) and matched.isdisjoint(attempt.nodes.values()):
                matches.append(attempt)
                matched.update(attempt.nodes.values())
            elif isinstance(attempt, Refusal):
                refusals.append(attempt)
    matches.sort(key=lambda match: order[match.nodes[match.pattern.anchor.role]])
    return TransformationPlan(model, matches, [*refusals, *_find_unmatched(model, matched, refusals)])


def _check_patterns(patterns: tuple[Pattern, ...]) -> None:
    strangers = [pattern for pattern in patterns if not isinstance(pattern, Pattern)]
    if strangers:
        stranger = strangers[0]
        if isinstance(stranger, type) and issubclass(stranger, Pattern):
            raise PatternError(f"patterns are Pattern values, not classes: pass {stranger.__name__}()")
        raise PatternError(f"patterns are Pattern values, not {stranger!r}")
    twice = [name for name, count in Counter(pattern.name for pattern in patterns).items() if count > 1]
    if twice:
        raise PatternError(f"two patterns are called {twice[0]!r}: plans and reports tell patterns by their names")


def _find_unmatched(model: fx.GraphModule, taken: set[fx.Node], refusals: list[Refusal]) -> list[Refusal]:
    """The operations with weights that no pattern took and nobody spoke of yet."""
    refused = {refusal.name for refusal in refusals}
    weighted = [node for node in model.graph.nodes if get_kind(node) in (*WEIGHTED, "attention", "left")]
    reasons = {node: f"no pattern takes a {get_kind(node)}: it stays as it is" for node in weighted}
    unknown = list(find_unknown_readers(model))
    for node, _ in unknown:
        alike = dict.fromkeys(weight for other, weight in unknown if get_layer_name(other) == get_layer_name(node))
        reasons[node] = _explain_unknown(node, list(alike))
    return [
        Refusal("", get_layer_name(node), reason)
        for node, reason in reasons.items()
        if node not in taken and get_layer_name(node) not in refused
    ]


def _explain_unknown(node: fx.Node, weights: list[str]) -> str:
    if isinstance(node.target, HigherOrderOperator):
        return f"stands in a branch of torch.{node.target.__name__}, which is not looked into: it stays float"
    named = f"weight {weights[0]}" if len(weights) == 1 else f"weights {', '.join(weights)}"
    return f"reads the {named} in a way that is not known: it stays float"


def _try_match(pattern: Pattern, anchor: fx.Node) -> PatternMatch | Refusal | None:
    """A match, or a refusal, also when a condition of the pattern fails."""
    try:
        return match_at(pattern, anchor)
    except Exception as error:  # a user's condition may fail in any way, and never aborts the rest
        return Refusal(pattern.name, get_layer_name(anchor), f"{type(error).__name__}: {error}")
