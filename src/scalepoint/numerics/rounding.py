"""Rounding to a float format with a few vector operations, and powers of two by their bits.

With e the exponent of |x| (at least the smallest normal exponent) and m mantissa bits, values of the format near x have
the distance step = 2^(e - m). So round(x / step) * step is the nearest one, ties to even, including subnormals.
"""

import torch
from torch import Tensor

from scalepoint.numerics.formats import Format

EXPONENT_BITS = 0x7F800000


def round_to_float(x: Tensor, fmt: Format, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Round float32 values to the nearest value of a smaller float format, within its limits.

    Args:
        x: The tensor.
        fmt: The format.
        out: Receives the result; may be x itself.
        scratch: Memory for the intermediate values, shaped like x.
    """
    bits = None if scratch is None else scratch.view(torch.int32)
    step = torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS, out=bits).view(torch.float32)
    mantissa = fmt.mantissa or 0
    step = torch.clamp(step, min=2.0**fmt.min_exponent, out=scratch)
    step = torch.mul(step, 2.0**-mantissa, out=scratch)
    x = torch.div(x, step, out=out)
    x = torch.round(x, out=out)
    return torch.mul(x, step, out=out)


def floor_log2(bits: Tensor) -> Tensor:
    """Compute floor(log2 x) from the bits of a positive float32. Returns -127 for zero and subnormals."""
    return (bits >> 23) - 127


def power_of_two(power: Tensor) -> Tensor:
    """Compute 2^power as float32, for powers from -126 to 127 (normal numbers)."""
    return ((power + 127).to(torch.int32) << 23).view(torch.float32)
