"""The report of a run: a dataclass, JSON, text for a terminal, and one self-contained HTML page."""

from scalepoint.report.difference import Difference, DifferenceTable, compare_runs
from scalepoint.report.html import notebook_snippet, to_html, write
from scalepoint.report.model import GraphNode, Report, Reproduction
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
