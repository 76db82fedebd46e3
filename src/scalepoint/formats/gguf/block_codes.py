"""Convert a quantized weight to what GGUF blocks store: codes and a scale, with or without a minimum.

    without minimum    w = scale q              q signed
    with minimum       w = scale q + minimum    q >= 0

Most weights can be written in both ways: a zero point becomes a minimum or a shift of the codes.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format

Bytes = NDArray[Any]  # uint8; for mypy, shifts and masks of numpy lose the dtype


@dataclass(frozen=True)
class BlockCodes:
    """Codes (rows, columns) with scales and minima (rows, blocks)."""

    codes: Tensor  # int32
    low: int  # range of the codes that the dtype of the weight allows
    high: int
    scale: Tensor
    minimum: Tensor | None = None

    def split_blocks(self, size: int) -> Self | None:
        """Return the same values with one scale for every `size` columns; None if the blocks cannot be split so."""
        block_size = self.codes.shape[1] // self.scale.shape[1]
        if block_size % size:
            return None
        repeats = block_size // size
        minimum = None if self.minimum is None else self.minimum.repeat_interleave(repeats, 1)
        return type(self)(self.codes, self.low, self.high, self.scale.repeat_interleave(repeats, 1), minimum)

    def to_unsigned(self, shift: int, columns: int) -> Bytes:
        """Return the codes plus `shift` as bytes, with a row for each block of `columns` columns."""
        return (self.codes + shift).to(torch.uint8).numpy().reshape(-1, columns)

    def join_fields(self, *fields: Bytes) -> Bytes:
        """Concatenate the fields of each block, then the blocks of each row of the weight."""
        return np.concatenate(fields, 1).reshape(self.codes.shape[0], -1)


def list_block_codes(weight: QuantizedWeight) -> list[BlockCodes]:
    """Return all ways to write a weight: without a minimum (if it has no minval), and with one."""
    _check_weight(weight)
    number_format = get_format(weight.spec.dtype)
    low, high = int(number_format.low), int(number_format.high)
    codes, scale = weight.codes.to(torch.int32), weight.scale.to(torch.float32)
    if weight.minval is not None:
        return [BlockCodes(codes - low, 0, high - low, scale, weight.minval.to(torch.float32))]
    if weight.zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
        signed_low, signed_high = low, high
    else:
        zero_point = weight.zero_point.to(torch.int32)
        signed_low, signed_high = low - high, high - low
    shift = zero_point.repeat_interleave(weight.block_size, 1)
    minimum = (low - zero_point).to(torch.float32) * scale
    return [
        BlockCodes(codes - shift, signed_low, signed_high, scale),
        BlockCodes(codes - low, 0, high - low, scale, minimum),
    ]


def _check_weight(weight: QuantizedWeight) -> None:
    if weight.is_float or weight.outer_scale is not None:
        raise ExportError(
            f"GGUF stores integer codes, got {weight.spec.dtype}: use int8, int4 or another integer dtype"
        )
    if weight.activation is not None:
        raise ExportError(
            "GGUF cannot store quantized activations, llama.cpp rounds them to 8 bits itself: leave activations float"
        )
