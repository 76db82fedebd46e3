"""Pack codes in the layout of MatMulNBits, GatherBlockQuantized and QMoE.

The codes are unsigned, in blocks along the inputs, low bits first.

    codes (out, blocks, block_size bits / 8)   scales (out, blocks)   zero points (out, ceil(blocks bits / 8)), or none

The kernels support 2, 4 and 8 bits and blocks of 16 .. 256. Codes of other widths are stored in the next larger width,
and other blocks are split into smaller ones with the same scale. The values do not change by a bit.
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
PREFERRED_BLOCK_SIZE = 128  # the fastest; larger blocks are split into blocks of this size
ROW_BLOCK_SIZE = 32  # for weights with one scale per row; the last block is padded
MAX_ELEMENTS_AT_ONCE = 4_000_000  # codes that are packed at a time
Array = np.ndarray


@dataclass(frozen=True)
class PackedMatrix:
    """A weight in the layout of the kernels."""

    codes: Array
    scales: Array
    zero_points: Array | None
    bits: int
    block_size: int
    columns: int  # of the weight; the last block may be padded

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        """Matrices with equal layouts can be stacked."""
        return self.bits, self.block_size, self.columns, self.zero_points is None

    def select_rows(self, rows: Array) -> "PackedMatrix":
        """Return the matrix with these rows, in this order."""
        zero_points = None if self.zero_points is None else self.zero_points[rows]
        return PackedMatrix(self.codes[rows], self.scales[rows], zero_points, self.bits, self.block_size, self.columns)


def code_bits(spec: QuantizationSpec) -> int:
    """Return the bits that a code takes in the file."""
    bits = get_format(spec.dtype).bits
    return next(width for width in CODE_BITS if width >= bits)


def describe_wider_type(spec: QuantizationSpec, columns: int) -> str:
    """Say why codes take more bits in the file than in the spec; "" if they do not."""
    bits, stored_bits = get_format(spec.dtype).bits, code_bits(spec)
    if stored_bits == bits:
        return ""
    return f"{stored_bits}-bit codes: the kernels of ONNX Runtime have codes of {', '.join(map(str, CODE_BITS))} bits"


def stored_block_size(weight: QuantizedWeight) -> int:
    """Return the number of columns that share a scale in the file."""
    size = weight.block_size
    if size in BLOCK_SIZES:
        return size
    divisors = [block for block in BLOCK_SIZES if size % block == 0 and block <= PREFERRED_BLOCK_SIZE]
    if divisors:
        return max(divisors)
    if weight.has_blocks:
        raise ExportError(
            f"blocks of {size} columns cannot be split into blocks of {', '.join(map(str, BLOCK_SIZES))} columns"
        )
    return ROW_BLOCK_SIZE


def pack_matrix(weight: QuantizedWeight, max_block_size: int = 0) -> PackedMatrix:
    """Pack a weight for the kernels.

    Args:
        weight: The quantized weight.
        max_block_size: Split blocks that are larger; 0: do not.

    Returns:
        The packed weight. Its zero points are None if all are in the middle of the range, the kernels' default.
    """
    bits = code_bits(weight.spec)
    block_size = min(max_block_size or BLOCK_SIZES[-1], stored_block_size(weight))
    rows, columns = weight.codes.shape
    blocks = -(-columns // block_size)
    source_block = torch.arange(blocks) * block_size // weight.block_size  # the block of the weight, for each block
    middle = 2 ** (bits - 1)
    offset = middle if get_format(weight.spec.dtype).low < 0 else 0  # makes signed codes unsigned
    scales = weight.scale.float()[:, source_block]
    zero_points = torch.full_like(scales, offset, dtype=torch.int32)
    if weight.zero_point is not None:
        zero_points = zero_points + weight.zero_point[:, source_block]
    is_default = weight.spec.qscheme != QuantizationScheme.ASYMMETRIC and bool((zero_points == middle).all())
    codes = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    padding = blocks * block_size - columns
    rows_at_once = max(1, MAX_ELEMENTS_AT_ONCE // columns)
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        unsigned = weight.codes[part].view(torch.uint8) + offset  # uint8 wraps around: -8 becomes 248, plus 8 is 0
        if padding:
            zeros = zero_points[part, -1:].to(torch.uint8).expand(-1, padding)
            unsigned = torch.cat((unsigned, zeros), 1)
        codes[part] = _pack_codes(unsigned.reshape(-1, blocks, block_size).numpy(), bits)
    return PackedMatrix(
        codes,
        scales.contiguous().numpy(),
        None if is_default else _pack_codes(zero_points.to(torch.uint8).numpy(), bits),
        bits,
        block_size,
        columns,
    )


def stack_matrices(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Concatenate the rows of matrices with equal layouts."""
    if len({matrix.layout for matrix in matrices}) != 1:
        raise ExportError("matrices with different layouts (bits, block size, columns, zero points) cannot be stacked")
    first = matrices[0]
    zero_points = None
    if first.zero_points is not None:
        zero_points = np.concatenate([matrix.zero_points for matrix in matrices if matrix.zero_points is not None])
    codes = np.concatenate([matrix.codes for matrix in matrices])
    scales = np.concatenate([matrix.scales for matrix in matrices])
    return PackedMatrix(codes, scales, zero_points, first.bits, first.block_size, first.columns)


def _pack_codes(codes: Array, bits: int) -> Array:
    """Pack the last axis, 8 / bits codes per byte, the first code in the low bits; the last byte is padded with 0."""
    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return codes
    if padding := -codes.shape[-1] % codes_per_byte:
        codes = np.concatenate((codes, np.zeros((*codes.shape[:-1], padding), np.uint8)), -1)
    parts = codes.reshape(*codes.shape[:-1], -1, codes_per_byte)
    packed = parts[..., 0].copy()
    for index in range(1, codes_per_byte):
        packed |= parts[..., index] << (bits * index)
    return packed
