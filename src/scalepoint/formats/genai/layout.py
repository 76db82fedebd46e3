"""Codes as MatMulNBits, GatherBlockQuantized and QMoE read them: unsigned, blocks along the inputs, low bits first.

    codes (out, blocks, block bits / 8)   scales (out, blocks)   zero points (out, ceil(blocks bits / 8)), or none

Kernels have 2, 4 and 8 bits, and blocks of 16 .. 256: other widths go into the next one, other blocks into smaller ones
with the same scale. What the codes stand for stays the same bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scalepoint.checkpoints import Packed
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationScheme, QuantizationSpec

WIDTHS = (2, 4, 8)
BLOCKS = (16, 32, 64, 128, 256)
USUAL = 128  # the fastest, where there is a choice
AT_ONCE = 4_000_000  # codes that are packed at a time
Array = np.ndarray


@dataclass(frozen=True)
class Matrix:
    """A weight in the layout of the kernels."""

    codes: Array
    scales: Array
    zeros: Array | None
    bits: int
    block: int
    columns: int  # of the weight: the last block may be longer

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """Matrices of one kind can be stacked."""
        return self.bits, self.block, self.columns, self.zeros is None

    def taken(self, rows: Array) -> "Matrix":
        """Its rows in another order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Matrix(self.codes[rows], self.scales[rows], zeros, self.bits, self.block, self.columns)


def width_of(spec: QuantizationSpec) -> int:
    """Bits that a code takes."""
    bits = get_format(spec.dtype).bits
    return next(width for width in WIDTHS if width >= bits)


def wider(spec: QuantizationSpec, columns: int) -> str:
    """Why codes take more bits in the file than their type has; "": they do not."""
    bits, width = get_format(spec.dtype).bits, width_of(spec)
    known = ", ".join(map(str, WIDTHS))
    return "" if width == bits else f"{width}-bit codes: the kernels of ONNX Runtime are for codes of {known} bits"


def block_of(packed: Packed) -> int:
    """Columns that share a scale in the file."""
    given = packed.block
    if given in BLOCKS:
        return given
    fitting = [block for block in BLOCKS if given % block == 0 and block <= USUAL]
    if fitting:
        return max(fitting)
    if packed.has_block:
        raise ExportError(f"blocks of {given} columns cannot be divided into blocks of {', '.join(map(str, BLOCKS))}")
    return 32  # one scale a row: the last block is filled up


def matrix(packed: Packed, block: int = 0) -> Matrix:
    """A weight in the layout, in smaller blocks when asked for.

    Zero points in the middle are left out: kernels take them to be there.
    """
    bits, block = width_of(packed.spec), min(block or BLOCKS[-1], block_of(packed))
    half = 2 ** (bits - 1)
    lift = half if get_format(packed.spec.dtype).low < 0 else 0
    scales = packed.scale.float()
    zeros = torch.zeros_like(scales, dtype=torch.int32) if packed.zero_point is None else packed.zero_point
    zeros = zeros + lift
    is_middle = packed.spec.qscheme != QuantizationScheme.ASYMMETRIC and bool((zeros == half).all())
    rows, columns = packed.codes.shape
    blocks = -(-columns // block)
    spread = torch.arange(blocks) * block // packed.block
    scales, zeros = scales[:, spread], zeros[:, spread]
    codes = np.empty((rows, blocks, block * bits // 8), np.uint8)
    missing = blocks * block - columns
    for start in range(0, rows, step := max(1, AT_ONCE // columns)):
        part = slice(start, start + step)
        piece = packed.codes[part].view(torch.uint8) + lift  # codes below zero wrap around to where they belong
        if missing:
            piece = torch.cat((piece, zeros[part, -1:].to(torch.uint8).expand(-1, missing)), 1)
        codes[part] = _together(piece.reshape(-1, blocks, block).numpy(), bits)
    return Matrix(
        codes,
        scales.contiguous().numpy(),
        None if is_middle else _together(zeros.to(torch.uint8).numpy(), bits),
        bits,
        block,
        columns,
    )


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """The rows of several of one kind."""
    if len({each.kind for each in matrices}) != 1:
        raise ExportError("matrices of several kinds cannot be stacked")
    first = matrices[0]
    zeros = None if first.zeros is None else np.concatenate([each.zeros for each in matrices if each.zeros is not None])
    codes = np.concatenate([each.codes for each in matrices])
    scales = np.concatenate([each.scales for each in matrices])
    return Matrix(codes, scales, zeros, first.bits, first.block, first.columns)


def _together(codes: Array, bits: int) -> Array:
    """8 / bits codes of the last axis a byte, the first in the low bits; zeros at the end."""
    many = 8 // bits
    if many == 1:
        return codes
    if missing := -codes.shape[-1] % many:
        codes = np.concatenate((codes, np.zeros((*codes.shape[:-1], missing), np.uint8)), -1)
    parts = codes.reshape(*codes.shape[:-1], -1, many)
    packed = parts[..., 0].copy()
    for place in range(1, many):
        packed |= parts[..., place] << (bits * place)
    return packed
