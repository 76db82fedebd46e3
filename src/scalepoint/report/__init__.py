"""The report of a run: a dataclass first, JSON second, the terminal third, and one HTML page that opens from disk."""

from scalepoint.report.chosen import Allocated, AllocatedLayer, ChosenCodes, FrontPoint, Tuned
from scalepoint.report.difference import Difference, DifferenceTable, compare_runs
from scalepoint.report.folder import write
from scalepoint.report.html import notebook_snippet, to_html
from scalepoint.report.language import Language
from scalepoint.report.model import (
    Attempt,
    GraphNode,
    Histogram,
    Metric,
    Raised,
    Report,
    ReportedLayer,
    Reproduction,
    is_within,
)
from scalepoint.report.sweep import Sweep, SweepRow, SweepTable
from scalepoint.report.sweep_page import sweep_page

__all__ = [
    "Allocated",
    "AllocatedLayer",
    "Attempt",
    "ChosenCodes",
    "Difference",
    "DifferenceTable",
    "FrontPoint",
    "GraphNode",
    "Histogram",
    "Language",
    "Metric",
    "Raised",
    "Report",
    "ReportedLayer",
    "Reproduction",
    "Sweep",
    "SweepRow",
    "SweepTable",
    "Tuned",
    "compare_runs",
    "is_within",
    "notebook_snippet",
    "sweep_page",
    "to_html",
    "write",
]
