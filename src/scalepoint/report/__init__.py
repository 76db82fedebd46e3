"""The report of a run: a dataclass first, JSON second, the terminal third, and one HTML page that opens from disk."""

from scalepoint.report.chosen import Allocated, AllocatedLayer, ChosenCodes, FrontPoint, Tuned
from scalepoint.report.folder import write
from scalepoint.report.html import to_html
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

__all__ = [
    "Allocated",
    "AllocatedLayer",
    "Attempt",
    "ChosenCodes",
    "FrontPoint",
    "GraphNode",
    "Histogram",
    "Language",
    "Metric",
    "Raised",
    "Report",
    "ReportedLayer",
    "Reproduction",
    "Tuned",
    "is_within",
    "to_html",
    "write",
]
