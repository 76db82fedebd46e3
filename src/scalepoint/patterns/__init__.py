"""Patterns: the public, stable path for writing your own."""

from scalepoint.patterns.base import BASE_PATTERNS
from scalepoint.patterns.fused import Fused
from scalepoint.patterns.language import Pattern, PatternMatch, Point, Refusal, chain, join, kind_of, op, optional
from scalepoint.patterns.plan import TransformationPlan

__all__ = [
    "BASE_PATTERNS",
    "Fused",
    "Pattern",
    "PatternMatch",
    "Point",
    "Refusal",
    "TransformationPlan",
    "chain",
    "join",
    "kind_of",
    "op",
    "optional",
]
