"""The report of a run: a dataclass first, JSON second, the terminal third, and one HTML page that opens from disk."""

from scalepoint.report.folder import write
from scalepoint.report.html import to_html
from scalepoint.report.model import GraphNode, Histogram, LayerError, Metric, Report

__all__ = ["GraphNode", "Histogram", "LayerError", "Metric", "Report", "to_html", "write"]
