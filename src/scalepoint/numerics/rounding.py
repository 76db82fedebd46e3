"""Rounding to a float format with a few vector operations, and powers of two by their bits.

With e the exponent of |x| (at least the smallest normal exponent) and m mantissa bits, neighbouring values of the
format differ by step = 2^(e - m) near x. So round(x / step) * step is the nearest one, ties to even, including
subnormals.
"""

import torch
from torch import Tensor

from scalepoint.numerics.formats import Format

EXPONENT_BITS = 0x7F800000


def round_to_float(x: Tensor, fmt: Format, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Round float32 values to the nearest values of a smaller float format. Does not clamp.

    Args:
        x: The tensor. Its values must already be within the limits of the format.
        fmt: The format.
        out: Receives the result; may be x itself.
        scratch: Memory for the intermediate values, shaped like x.
    """
    int_scratch = None if scratch is None else scratch.view(torch.int32)
    power = torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS, out=int_scratch).view(torch.float32)  # 2^e
    power = torch.clamp(power, min=2.0**fmt.min_exponent, out=scratch)
    mantissa_bits = fmt.mantissa or 0
    step = torch.mul(power, 2.0**-mantissa_bits, out=scratch)
    x = torch.div(x, step, out=out)
    x = torch.round(x, out=out)
    return torch.mul(x, step, out=out)


def floor_log2(bits: Tensor) -> Tensor:
    """Compute floor(log2 x) from the bits of a positive float32. Returns -127 for zero and subnormals."""
    return (bits >> 23) - 127


def power_of_two(power: Tensor) -> Tensor:
    """Compute 2^power as float32, for powers from -126 to 127 (normal numbers)."""
    return ((power + 127).to(torch.int32) << 23).view(torch.float32)
