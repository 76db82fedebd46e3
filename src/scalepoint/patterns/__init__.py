"""Patterns and the transformation they drive: the public, stable path for writing your own."""

from scalepoint.patterns.base import BASE_PATTERNS
from scalepoint.patterns.fused import Fused
from scalepoint.patterns.language import Pattern, PatternMatch, Point, Refusal, chain, join, kind_of, op, optional
from scalepoint.patterns.plan import TransformationPlan
from scalepoint.patterns.transform import (
    TransformationReport,
    TransformationResult,
    apply_transformation_plan,
    get_transformation_plan,
    transform,
)

__all__ = [
    "BASE_PATTERNS",
    "Fused",
    "Pattern",
    "PatternMatch",
    "Point",
    "Refusal",
    "TransformationPlan",
    "TransformationReport",
    "TransformationResult",
    "apply_transformation_plan",
    "chain",
    "get_transformation_plan",
    "join",
    "kind_of",
    "op",
    "optional",
    "transform",
]
