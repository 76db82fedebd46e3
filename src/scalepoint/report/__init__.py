"""The report of a run: a dataclass first, JSON second, the terminal third, and one HTML page that opens from disk."""

from scalepoint.report.folder import write
from scalepoint.report.html import to_html
from scalepoint.report.model import (
    Attempt,
    GraphNode,
    Histogram,
    LayerError,
    Metric,
    Raised,
    Report,
    Reproduction,
)

__all__ = [
    "Attempt",
    "GraphNode",
    "Histogram",
    "LayerError",
    "Metric",
    "Raised",
    "Report",
    "Reproduction",
    "to_html",
    "write",
]
