"""The report of a run: a dataclass, JSON, text for a terminal, and one self-contained HTML page."""

from typing import TYPE_CHECKING

from scalepoint.report.html import notebook_snippet, to_html, write
from scalepoint.report.model import GraphNode, Report, Reproduction
from scalepoint.support.plugins import lazy_attributes

if TYPE_CHECKING:
    from scalepoint.report.difference import Difference, DifferenceTable, compare_runs
    from scalepoint.report.quality_gate import GateCheck, GateResult, Outcome, gate
    from scalepoint.report.sweep import Sweep, SweepRow, SweepTable, sweep_page

__all__ = [
    "Difference",
    "DifferenceTable",
    "GateCheck",
    "GateResult",
    "GraphNode",
    "Outcome",
    "Report",
    "Reproduction",
    "Sweep",
    "SweepRow",
    "SweepTable",
    "compare_runs",
    "gate",
    "notebook_snippet",
    "sweep_page",
    "to_html",
    "write",
]

# `compare` and `sweep` use these; a report of one run does not.
__getattr__ = lazy_attributes(
    __name__,
    {
        "Difference": "difference",
        "DifferenceTable": "difference",
        "GateCheck": "quality_gate",
        "GateResult": "quality_gate",
        "Outcome": "quality_gate",
        "Sweep": "sweep",
        "SweepRow": "sweep",
        "SweepTable": "sweep",
        "compare_runs": "difference",
        "gate": "quality_gate",
        "sweep_page": "sweep",
    },
)
