"""TensorRT: the groups its builder fuses into one kernel, and the operands on which it wants Q/DQ."""

from scalepoint.targets.tensorrt import TENSORRT, TENSORRT_PATTERNS

__all__ = ["TENSORRT", "TENSORRT_PATTERNS"]
