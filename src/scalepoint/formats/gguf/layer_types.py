"""What GGUF blocks hold of a quantized weight: codes, scales and least values for blocks of 16 or 32 columns.

    plain       w = scale q             q signed
    with least  w = scale q + least     q from 0

A weight has one form or both; larger blocks are repeated, a zero point becomes a least value or a shift of the codes.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format

Bytes = NDArray[Any]  # uint8; shifts and masks lose that in the eyes of mypy


@dataclass(frozen=True)
class BlockCodes:
    """Codes (rows, columns) from `low` to `high`, by their type; scale and least (rows, blocks)."""

    codes: Tensor  # int32
    low: int
    high: int
    scale: Tensor
    least: Tensor | None = None

    def per(self, size: int) -> Self | None:
        """With a scale for every `size` columns; None where the blocks cannot be cut so."""
        block = self.codes.shape[1] // self.scale.shape[1]
        if block % size:
            return None
        least = None if self.least is None else self.least.repeat_interleave(block // size, 1)
        scale = self.scale.repeat_interleave(block // size, 1)
        return type(self)(self.codes, self.low, self.high, scale, least)


def list_block_codes(packed: QuantizedWeight) -> list[BlockCodes]:
    """The plain form and the one with a least value, where the weight has them."""
    _check_weight(packed)
    row = get_format(packed.spec.dtype)
    low, high = int(row.low), int(row.high)
    codes, scale = packed.codes.to(torch.int32), packed.scale.to(torch.float32)
    if packed.minval is not None:
        return [BlockCodes(codes - low, 0, high - low, scale, packed.minval.to(torch.float32))]
    given = packed.zero_point
    zero = torch.zeros_like(scale, dtype=torch.int32) if given is None else given.to(torch.int32)
    shift = zero.repeat_interleave(packed.block_size, 1)
    reach = (low, high) if given is None else (low - high, high - low)
    above = BlockCodes(codes - low, 0, high - low, scale, (low - zero).to(torch.float32) * scale)
    return [BlockCodes(codes - shift, *reach, scale), above]


def _check_weight(packed: QuantizedWeight) -> None:
    if packed.is_float or packed.outer_scale is not None:
        raise ExportError(f"GGUF holds integer codes, not {packed.spec.dtype}: take int8, int4 or another integer type")
    if packed.activation is not None:
        raise ExportError(
            "GGUF holds weights alone: llama.cpp rounds activations to 8 bits by itself; leave activations float"
        )
