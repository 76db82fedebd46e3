"""Chooses a precision for every layer within a budget, from the error and cost of each layer at each precision."""

from scalepoint.allocation.front import (
    Allocation,
    Item,
    PrecisionChoice,
    compute_front,
    find_best_within,
    sum_choices,
    thin_front,
    trim_allocation,
)
from scalepoint.allocation.measure import measure_widths
from scalepoint.allocation.precision_options import UNCHANGED, check_choices
from scalepoint.allocation.widths import Width, WidthRow, Widths
from scalepoint.budget import Budget

__all__ = [
    "UNCHANGED",
    "Allocation",
    "Budget",
    "Item",
    "PrecisionChoice",
    "Width",
    "WidthRow",
    "Widths",
    "check_choices",
    "compute_front",
    "find_best_within",
    "measure_widths",
    "sum_choices",
    "thin_front",
    "trim_allocation",
]
