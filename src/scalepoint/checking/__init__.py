"""Static checks of a deployed file: a compiler's rules over an ONNX Q/DQ graph, where the compiler cannot be asked.

    for finding in check("model.onnx", "tensorrt", version="10.9"):
        print(finding)

Needs the package onnx; `import scalepoint` does not import this.
"""

import os
from typing import TYPE_CHECKING

from scalepoint.checking.qdq_graph import Version, read_views
from scalepoint.checking.rule import Finding, Rule, Severity, make_finding
from scalepoint.checking.tensorrt import POST_BUILD, RULES
from scalepoint.errors import TargetError, nearest, shown

if TYPE_CHECKING:
    from onnx import ModelProto

    from scalepoint.targets import Section

__all__ = ["RULES", "Finding", "Severity", "check", "describe_rules", "has_rules"]

_TARGETS: dict[str, tuple[Rule, ...]] = {"tensorrt": RULES}
_NEWEST_MINOR = 99


def check(
    source: "str | os.PathLike[str] | ModelProto", target: str = "tensorrt", *, version: int | str = 10
) -> list[Finding]:
    """What the target's compiler would refuse or run badly, in graph order, then by rule.

    `version` is that of the compiler: "10.9", or 10 for the newest release of that line.
    """
    if target not in _TARGETS:
        raise TargetError(f"no static checks for the target {shown(target)}. {nearest(str(target), _TARGETS)}")
    parsed = _parse_version(version)
    findings: list[Finding] = []
    for view in read_views(source, parsed):
        faults = [(rule, fault) for rule in _TARGETS[target] for fault in rule.check(view)]
        faults.sort(key=lambda pair: (view.position(pair[1].node), pair[0].id))
        findings += [make_finding(view, rule, fault) for rule, fault in faults]
    return findings


def has_rules(target: str) -> bool:
    """Whether there are static rules for a target."""
    return target in _TARGETS


def describe_rules(target: str) -> "tuple[Section, ...]":
    """The rules that `check` applies for a target, as sections of its description; none where there are none."""
    from scalepoint.targets import Section  # noqa: PLC0415  # needs torch, which check does not

    rows = tuple((rule.id, rule.severity.value, rule.why, rule.way_out) for rule in _TARGETS.get(target, ()))
    if not rows:
        return ()
    return (
        Section("Static checks", ("rule", "severity", "why", "way out"), rows),
        Section("What only a built engine shows", ("what", "open question"), tuple(POST_BUILD.items())),
    )


def _parse_version(version: int | str) -> Version:
    # A float is refused: 10.10 would be read as 10.1.
    text = str(version) if isinstance(version, int | str) and not isinstance(version, bool) else ""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and (minor.isdecimal() or not rest)):
        raise TargetError(
            f'version is a text like "10.9" or the number of a release line like 10, not {shown(version)}'
        )
    return int(major), int(minor) if minor else _NEWEST_MINOR
