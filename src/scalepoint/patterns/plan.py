"""The transformation plan: every match and whether it will be fused. It can be printed, edited, saved and applied."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import fx

from scalepoint.compat.torch_names import HigherOrderOperator
from scalepoint.errors import PatternError, short_repr
from scalepoint.graph.kinds import OPAQUE, WEIGHTED
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.weight_readers import find_unknown_readers
from scalepoint.patterns.language import Pattern, PatternMatch, Refusal, get_layer_name, match_at
from scalepoint.support.documents import parse_json
from scalepoint.support.formatting import to_one_line

PLAN_VERSION = 1


@dataclass
class TransformationPlan:
    """What `transform` will fuse.

    Attributes:
        model: The captured graph.
        matches: Matches in graph order. Set `apply` of a match to False to leave it alone.
        refusals: Operations that almost match a pattern, and operations with weights that no pattern matches.
        converted: Number of changes by conversion.
        is_applied: Whether the plan was applied. It can be applied once.
    """

    model: fx.GraphModule
    matches: list[PatternMatch]
    refusals: list[Refusal] = field(default_factory=list)
    converted: dict[str, int] = field(default_factory=dict)
    is_applied: bool = False

    def counts(self) -> dict[str, int]:
        """Return how many matches of each pattern will be applied."""
        return dict(Counter(match.pattern.name for match in self.matches if match.apply))

    def table(self) -> Table:
        """Return a rich table with one line per match."""
        table = Table(title="transformation plan")
        for column in ("where", "pattern", "operations", "apply", "reason"):
            table.add_column(column, overflow="fold")
        for match in self.matches:
            applies = "yes" if match.apply else "no"
            row = (match.name, match.pattern.name, " + ".join(match.roles), applies, match.reason)
            table.add_row(*(Text(to_one_line(cell)) for cell in row))
        for refusal in self.refusals:
            if not refusal.pattern:
                cells = (refusal.name, "", "", "no", refusal.reason)
                table.add_row(*(Text(to_one_line(cell)) for cell in cells))
        return table

    def to_json(self) -> str:
        """Return the matches, and whether each is applied, as JSON."""
        rows = [
            {"where": match.name, "pattern": match.pattern.name, "apply": match.apply, "reason": match.reason}
            for match in self.matches
        ]
        return json.dumps({"version": PLAN_VERSION, "matches": rows}, indent=2)

    def load_json(self, text: str) -> None:
        """Set `apply` and `reason` of all matches from a saved plan, which must have the same matches.

        Args:
            text: What `to_json` returned.

        Raises:
            PatternError: The text is not a plan, or a plan of another model.
        """
        data = parse_json(text)
        is_plan = isinstance(data, dict) and data.get("version") == PLAN_VERSION
        if not is_plan or not isinstance(data.get("matches"), list):
            raise PatternError(f"this is not a saved plan of version {PLAN_VERSION}")
        matches_by_key: dict[tuple[str, str], list[PatternMatch]] = {}
        for match in self.matches:
            matches_by_key.setdefault((match.name, match.pattern.name), []).append(match)
        saved: list[tuple[PatternMatch, dict[str, Any]]] = []
        for row in data["matches"]:
            if not isinstance(row, dict) or not isinstance(row.get("apply"), bool):
                raise PatternError(
                    f"a match in a saved plan must have 'where', 'pattern' and 'apply', got {short_repr(row)}"
                )
            matches = matches_by_key.get((str(row.get("where", "")), str(row.get("pattern", ""))))
            if not matches:
                raise PatternError(
                    f"this is a plan of another model: it has {row.get('pattern')} at {row.get('where')}"
                )
            saved.append((matches.pop(0), row))
        missing = [f"{match.pattern.name} at {match.name}" for matches in matches_by_key.values() for match in matches]
        if missing:
            raise PatternError(f"the saved plan does not contain {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}")
        for match, row in saved:
            match.apply, match.reason = row["apply"], str(row.get("reason", ""))


def make_plan(model: fx.GraphModule, patterns: tuple[Pattern, ...]) -> TransformationPlan:
    """Match the patterns, longest first and in graph order. An operation belongs to at most one match."""
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
    for pattern in patterns:
        if isinstance(pattern, Pattern):
            continue
        if isinstance(pattern, type) and issubclass(pattern, Pattern):
            raise PatternError(f"patterns must be Pattern instances, got a class: pass {pattern.__name__}()")
        raise PatternError(f"patterns must be Pattern instances, got {pattern!r}")
    repeated = [name for name, count in Counter(pattern.name for pattern in patterns).items() if count > 1]
    if repeated:
        raise PatternError(f"two patterns have the name {repeated[0]!r}: names must be unique in plans and reports")


def _find_unmatched(model: fx.GraphModule, matched: set[fx.Node], refusals: list[Refusal]) -> list[Refusal]:
    """Return the operations with weights that no pattern matched, without those that have a refusal already."""
    refused_names = {refusal.name for refusal in refusals}
    weighted = [node for node in model.graph.nodes if get_kind(node) in (*WEIGHTED, "attention", OPAQUE)]
    reasons = {node: _explain_unmatched(get_kind(node)) for node in weighted}
    unknown = list(find_unknown_readers(model))
    for node, _ in unknown:
        name = get_layer_name(node)
        weights = dict.fromkeys(weight for reader, weight in unknown if get_layer_name(reader) == name)
        reasons[node] = _explain_unknown(node, list(weights))
    return [
        Refusal("", get_layer_name(node), reason)
        for node, reason in reasons.items()
        if node not in matched and get_layer_name(node) not in refused_names
    ]


def _explain_unmatched(kind: str) -> str:
    if kind == OPAQUE:
        return "not captured, as leave= asks: it stays float"
    return f"no pattern matches {kind}: it stays float"


def _explain_unknown(node: fx.Node, weights: list[str]) -> str:
    if isinstance(node.target, HigherOrderOperator):
        return f"is in a branch of torch.{node.target.__name__}, which is not transformed: it stays float"
    names = f"weight {weights[0]}" if len(weights) == 1 else f"weights {', '.join(weights)}"
    return f"reads the {names} in an unknown way: it stays float"


def _try_match(pattern: Pattern, anchor: fx.Node) -> PatternMatch | Refusal | None:
    """Match a pattern, and turn an exception in one of its conditions into a refusal."""
    try:
        return match_at(pattern, anchor)
    except Exception as error:  # a user's condition can raise any exception; the other patterns still apply
        return Refusal(pattern.name, get_layer_name(anchor), f"{type(error).__name__}: {error}")
