"""Static checks of an ONNX Q/DQ file by the rules of a compiler, for machines where the compiler is not installed.

    for finding in check("model.onnx", "tensorrt", version="10.9"):
        print(finding)

Needs the package onnx; `import scalepoint` does not import this package.
"""

# tensorrt.py is the table of rules. The functions of the rules are in tensorrt_*.py, and read the file through a
# QdqView (qdq_graph.py).

import os
from typing import TYPE_CHECKING

from scalepoint.errors import TargetError, did_you_mean, short_repr
from scalepoint.support.plugins import lazy_attributes

if TYPE_CHECKING:
    from onnx import ModelProto

    from scalepoint.checking.qdq_graph import CompilerVersion
    from scalepoint.checking.rule import Finding, Rule, Severity
    from scalepoint.targets import Section

__all__ = ["Finding", "Severity", "check", "describe_rules", "has_rules"]

_TARGETS = ("tensorrt",)
_NEWEST_MINOR = 99
__getattr__ = lazy_attributes(__name__, {"Finding": "rule", "Severity": "rule"})


def check(
    source: "str | os.PathLike[str] | ModelProto", target: str = "tensorrt", *, version: int | str = 10
) -> "list[Finding]":
    """List what the compiler of a target would reject or run slowly in an ONNX file.

    Args:
        source: The file, or a ModelProto.
        target: The target whose rules apply.
        version: Version of the compiler: "10.9", or 10 for the newest release of that line.

    Returns:
        The findings in graph order, then by rule. An empty list means that no rule is violated.

    Raises:
        TargetError: There are no rules for this target, or the version cannot be parsed.
        StoreError: The file cannot be read or is damaged.
    """
    if target not in _TARGETS:
        raise TargetError(
            f"no static checks for the target {short_repr(target)}. {did_you_mean(str(target), _TARGETS)}"
        )
    from scalepoint.checking.qdq_graph import read_views  # noqa: PLC0415  # onnx_ir is slow, and not always needed
    from scalepoint.checking.rule import make_finding  # noqa: PLC0415

    compiler_version = _parse_version(version)
    findings: list[Finding] = []
    for view in read_views(source, compiler_version):
        faults = [(rule, fault) for rule in _rules(target) for fault in rule.check(view)]
        faults.sort(key=lambda pair: (view.position(pair[1].node), pair[0].id))
        findings += [make_finding(view, rule, fault) for rule, fault in faults]
    return findings


def has_rules(target: str) -> bool:
    """Return whether `check` has rules for a target.

    Args:
        target: Name of the target.
    """
    return target in _TARGETS


def describe_rules(target: str) -> "tuple[Section, ...]":
    """Describe the rules that `check` applies for a target.

    Args:
        target: Name of the target.

    Returns:
        Sections for the description of the target; none if it has no rules.
    """
    if not has_rules(target):
        return ()
    from scalepoint.checking.tensorrt import POST_BUILD  # noqa: PLC0415
    from scalepoint.targets import Section  # noqa: PLC0415  # needs torch, which check does not

    rows = tuple((rule.id, rule.severity.value, rule.why, rule.way_out) for rule in _rules(target))
    return (
        Section("Static checks", ("rule", "severity", "why", "what to do"), rows),
        Section("What only a built engine shows", ("what", "open question"), tuple(POST_BUILD.items())),
    )


def _rules(target: str) -> "tuple[Rule, ...]":
    from scalepoint.checking.tensorrt import RULES  # noqa: PLC0415

    return {"tensorrt": RULES}[target]


def _parse_version(version: int | str) -> "CompilerVersion":
    # Floats are rejected, because 10.10 would become 10.1.
    text = str(version) if isinstance(version, int | str) and not isinstance(version, bool) else ""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and (minor.isdecimal() or not rest)):
        raise TargetError(
            f'version must be a string like "10.9" or the number of a release line like 10, got {short_repr(version)}'
        )
    return int(major), int(minor) if minor else _NEWEST_MINOR
