"""Codes as MatMulNBits, GatherBlockQuantized and QMoE read them: unsigned, blocks along the inputs, low bits first.

    codes (out, blocks, block bits / 8)   scales (out, blocks)   zero points (out, ceil(blocks bits / 8)), or none

Kernels have 2, 4 and 8 bits, and blocks of 16 .. 256: other widths go into the next one, other blocks into smaller ones
with the same scale. What the codes stand for stays the same bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationScheme, QuantizationSpec

CODE_BITS = (2, 4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 128  # the fastest, where there is a choice
MAX_ELEMENTS_AT_ONCE = 4_000_000  # codes that are packed at a time
Array = np.ndarray


@dataclass(frozen=True)
class PackedMatrix:
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

    def select_rows(self, rows: Array) -> "PackedMatrix":
        """Its rows in another order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return PackedMatrix(self.codes[rows], self.scales[rows], zeros, self.bits, self.block, self.columns)


def code_bits(spec: QuantizationSpec) -> int:
    """Bits that a code takes."""
    bits = get_format(spec.dtype).bits
    return next(width for width in CODE_BITS if width >= bits)


def describe_wider_type(spec: QuantizationSpec, columns: int) -> str:
    """Why codes take more bits in the file than their type has; "": they do not."""
    bits, width = get_format(spec.dtype).bits, code_bits(spec)
    known = ", ".join(map(str, CODE_BITS))
    return "" if width == bits else f"{width}-bit codes: the kernels of ONNX Runtime are for codes of {known} bits"


def stored_block_size(packed: QuantizedWeight) -> int:
    """Columns that share a scale in the file."""
    given = packed.block_size
    if given in BLOCK_SIZES:
        return given
    fitting = [block for block in BLOCK_SIZES if given % block == 0 and block <= DEFAULT_BLOCK_SIZE]
    if fitting:
        return max(fitting)
    if packed.has_blocks:
        raise ExportError(
            f"blocks of {given} columns cannot be divided into blocks of {', '.join(map(str, BLOCK_SIZES))}"
        )
    return 32  # one scale a row: the last block is filled up


def pack_matrix(packed: QuantizedWeight, block: int = 0) -> PackedMatrix:
    """A weight in the layout, in smaller blocks when asked for.

    Zero points in the middle are left out: kernels take them to be there.
    """
    bits, block = code_bits(packed.spec), min(block or BLOCK_SIZES[-1], stored_block_size(packed))
    half = 2 ** (bits - 1)
    lift = half if get_format(packed.spec.dtype).low < 0 else 0
    scales = packed.scale.float()
    zeros = torch.zeros_like(scales, dtype=torch.int32) if packed.zero_point is None else packed.zero_point
    zeros = zeros + lift
    is_middle = packed.spec.qscheme != QuantizationScheme.ASYMMETRIC and bool((zeros == half).all())
    rows, columns = packed.codes.shape
    blocks = -(-columns // block)
    spread = torch.arange(blocks) * block // packed.block_size
    scales, zeros = scales[:, spread], zeros[:, spread]
    codes = np.empty((rows, blocks, block * bits // 8), np.uint8)
    missing = blocks * block - columns
    for start in range(0, rows, step := max(1, MAX_ELEMENTS_AT_ONCE // columns)):
        part = slice(start, start + step)
        piece = packed.codes[part].view(torch.uint8) + lift  # codes below zero wrap around to where they belong
        if missing:
            piece = torch.cat((piece, zeros[part, -1:].to(torch.uint8).expand(-1, missing)), 1)
        codes[part] = _pack_codes(piece.reshape(-1, blocks, block).numpy(), bits)
    return PackedMatrix(
        codes,
        scales.contiguous().numpy(),
        None if is_middle else _pack_codes(zeros.to(torch.uint8).numpy(), bits),
        bits,
        block,
        columns,
    )


def stack_matrices(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """The rows of several of one kind."""
    if len({each.kind for each in matrices}) != 1:
        raise ExportError("matrices of several kinds cannot be stacked")
    first = matrices[0]
    zeros = None if first.zeros is None else np.concatenate([each.zeros for each in matrices if each.zeros is not None])
    codes = np.concatenate([each.codes for each in matrices])
    scales = np.concatenate([each.scales for each in matrices])
    return PackedMatrix(codes, scales, zeros, first.bits, first.block, first.columns)


def _pack_codes(codes: Array, bits: int) -> Array:
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
