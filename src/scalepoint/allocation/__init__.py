"""Precision by layer under a budget: what each layer loses at each width, and who gets how much."""

from scalepoint.allocation.front import Allocation, Choice, Item, front, thinned, total, trimmed, within
from scalepoint.allocation.measure import measure_widths
from scalepoint.allocation.ways import AS_IT_IS, check_choices
from scalepoint.allocation.widths import Row, Width, Widths
from scalepoint.budget import Budget

__all__ = [
    "AS_IT_IS",
    "Allocation",
    "Budget",
    "Choice",
    "Item",
    "Row",
    "Width",
    "Widths",
    "check_choices",
    "front",
    "measure_widths",
    "thinned",
    "total",
    "trimmed",
    "within",
]
