"""TensorRT: the groups its builder fuses into one kernel, and the operands on which it wants Q/DQ."""

from scalepoint.patterns.base import BASE_PATTERNS

TENSORRT_PATTERNS = BASE_PATTERNS

__all__ = ["TENSORRT_PATTERNS"]
