"""Pack the block types of 256 columns (K-quants), whose scales are small integers times one float16.

    Q2_K   16 blocks of 16, 4-bit sc and m      w = d sc q - dmin m     q 0..3
    Q3_K   16 blocks of 16, 6-bit sc            w = d sc q              q -4..3, sc -32..31
    Q4_K   8 blocks of 32, 6-bit sc and m       w = d sc q - dmin m     q 0..15
    Q5_K   as Q4_K                                                      q 0..31
    Q6_K   16 blocks of 16, 8-bit sc            w = d sc q              q -32..31, sc -128..127

`round_to_factors` rounds scales to such products before codes are chosen; `split_into_factors` finds d and sc again.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.gguf.block_codes import BlockCodes, Bytes

SUPERBLOCK_COLUMNS = 256
SAMPLED_ROWS = 16
_TWO_BIT_SHIFTS = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)  # of four 2-bit codes in a byte


def round_to_factors(values: Tensor, max_factor: int) -> Tensor:
    """Round non-negative values (.., blocks of a super-block) to d i with a float16 d and integers i <= max_factor.

    d is chosen for the largest value. A value above zero stays above zero.
    """
    largest = values.amax(-1, keepdim=True)
    d = (largest / max_factor).to(torch.float16).to(torch.float32)
    d = torch.where((d == 0) & (largest > 0), 2.0**-24, d)
    factors = (values / torch.where(d > 0, d, 1.0)).round().clamp(0, max_factor)
    return d * torch.where((factors == 0) & (values > 0), 1.0, factors)


def split_into_factors(values: Tensor, max_factor: int) -> tuple[Tensor, Tensor] | None:
    """Split non-negative values (rows, blocks) into float16 d (rows) and integers <= max_factor (rows, blocks).

    Tries for each row all d for which the largest value of the row is an integer multiple. Returns None if a row has no
    exact split.
    """
    # Most weights have no exact split, and a few rows show that.
    sample = values[:: -(-len(values) // SAMPLED_ROWS)]
    if len(sample) < len(values) and split_into_factors(sample, max_factor) is None:
        return None
    largest = values.amax(1)
    d, factors = torch.zeros_like(largest), torch.zeros_like(values)
    open_rows = largest.nonzero().flatten()
    for factor_of_largest in range(max_factor, 0, -1):
        if not len(open_rows):
            break
        candidate = (largest[open_rows] / factor_of_largest).to(torch.float16).to(torch.float32)
        divisor = torch.where(candidate > 0, candidate, 1.0)[:, None]
        integers = (values[open_rows] / divisor).round()
        is_exact = ((integers * candidate[:, None] == values[open_rows]) & (integers <= max_factor)).all(1)
        d[open_rows[is_exact]], factors[open_rows[is_exact]] = candidate[is_exact], integers[is_exact]
        open_rows = open_rows[~is_exact]
    return None if len(open_rows) else (d.to(torch.float16), factors.to(torch.uint8))


def pack_q2_k(block_codes: BlockCodes) -> Bytes | None:
    """Fields: 16 bytes of factors (scale low, minimum high), 64 bytes of codes, d, dmin."""
    scales = _split_scales_and_minima(block_codes, blocks=16, max_factor=15)
    if scales is None:
        return None
    factors = scales.scale_factors | scales.min_factors << 4
    codes = _pack_two_bits(block_codes.to_unsigned(0, SUPERBLOCK_COLUMNS))
    return block_codes.join_fields(factors, codes, scales.d, scales.d_min)


def pack_q3_k(block_codes: BlockCodes) -> Bytes | None:
    """Fields: 32 bytes of third bits, 64 bytes of low bits, 8 + 4 bytes of factors (low halves, upper bits), d."""
    split = _split(block_codes.scale, blocks=16, max_factor=31)
    if split is None:
        return None
    d, factors = split
    codes = block_codes.to_unsigned(4, SUPERBLOCK_COLUMNS)
    low_bits = _pack_two_bits(codes & 3)
    stored_factors = factors + np.uint8(32)  # 6 bits: llama.cpp subtracts 32
    low_nibbles = stored_factors & 15
    low_factor_bits = low_nibbles[:, :8] | low_nibbles[:, 8:] << 4
    high_factor_bits = np.bitwise_or.reduce((stored_factors >> 4).reshape(-1, 4, 4) << _TWO_BIT_SHIFTS, 1)
    return block_codes.join_fields(_pack_single_bits(codes >> 2), low_bits, low_factor_bits, high_factor_bits, d)


def pack_q4_k(block_codes: BlockCodes) -> Bytes | None:
    """Fields: d, dmin, 12 bytes of factors, 128 bytes of codes."""
    scales = _split_scales_and_minima(block_codes, blocks=8, max_factor=63)
    if scales is None:
        return None
    codes = block_codes.to_unsigned(0, SUPERBLOCK_COLUMNS)
    factors = _pack_six_bits(scales.scale_factors, scales.min_factors)
    return block_codes.join_fields(scales.d, scales.d_min, factors, _pack_nibbles(codes))


def pack_q5_k(block_codes: BlockCodes) -> Bytes | None:
    """Fields: d, dmin, 12 bytes of factors, 32 bytes of fifth bits, 128 bytes of low bits."""
    scales = _split_scales_and_minima(block_codes, blocks=8, max_factor=63)
    if scales is None:
        return None
    codes = block_codes.to_unsigned(0, SUPERBLOCK_COLUMNS)
    factors = _pack_six_bits(scales.scale_factors, scales.min_factors)
    high_bits = _pack_single_bits(codes >> 4)
    return block_codes.join_fields(scales.d, scales.d_min, factors, high_bits, _pack_nibbles(codes & 15))


def pack_q6_k(block_codes: BlockCodes) -> Bytes | None:
    """Fields: 128 bytes of low bits, 64 bytes of upper bits, 16 factors, d."""
    split = _split(block_codes.scale, blocks=16, max_factor=127)
    if split is None:
        return None
    d, factors = split
    codes = block_codes.to_unsigned(32, SUPERBLOCK_COLUMNS)
    quarters = codes.reshape(-1, 2, 4, 32)
    low_nibbles = quarters & 15
    low_bits = (low_nibbles[:, :, :2] | low_nibbles[:, :, 2:] << 4).reshape(-1, 128)
    return block_codes.join_fields(low_bits, _pack_two_bits(codes >> 4), factors, d)


@dataclass(frozen=True)
class _ScalesAndMinima:
    """d and dmin as two bytes each, with their integer factors (super-blocks, blocks)."""

    d: Bytes
    scale_factors: Bytes
    d_min: Bytes
    min_factors: Bytes


def _split_scales_and_minima(block_codes: BlockCodes, blocks: int, max_factor: int) -> _ScalesAndMinima | None:
    """Split scales and minima into factors; None if they cannot be stored exactly."""
    assert block_codes.minimum is not None  # noqa: S101  # BlockType.try_pack checks it
    scales = _split(block_codes.scale, blocks, max_factor)
    minima = _split(-block_codes.minimum, blocks, max_factor)
    return None if scales is None or minima is None else _ScalesAndMinima(*scales, *minima)


def _split(values: Tensor, blocks: int, max_factor: int) -> tuple[Bytes, Bytes] | None:
    """Return d as two bytes for each super-block, and the factors (super-blocks, blocks); None if inexact."""
    split = split_into_factors(values.reshape(-1, blocks), max_factor)
    if split is None:
        return None
    d, factors = split
    return d.numpy().view(np.uint8).reshape(-1, 2), factors.numpy()


def _pack_single_bits(codes: Bytes) -> Bytes:
    """Pack 256 1-bit codes into 32 bytes: byte j has elements j, j + 32, .., j + 224, from its lowest bit on."""
    return np.packbits(codes.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _pack_two_bits(codes: Bytes) -> Bytes:
    """Pack 256 2-bit codes into 64 bytes: byte j of each half has elements j, j + 32, j + 64 and j + 96 of 128."""
    packed: Bytes = np.bitwise_or.reduce(codes.reshape(-1, 2, 4, 32) << _TWO_BIT_SHIFTS, 2)
    return packed.reshape(-1, 64)


def _pack_six_bits(scale_factors: Bytes, min_factors: Bytes) -> Bytes:
    """Pack eight pairs of 6-bit factors into twelve bytes.

    The first eight bytes have the first four scale factors, then the first four min factors, and in their two upper
    bits the upper bits of the other factors. The last four bytes have the low halves of the other factors.
    """
    other_scales, other_minima = scale_factors[:, 4:], min_factors[:, 4:]
    scale_bytes = scale_factors[:, :4] | (other_scales >> 4) << 6
    min_bytes = min_factors[:, :4] | (other_minima >> 4) << 6
    low_halves = (other_scales & 15) | (other_minima & 15) << 4
    return np.concatenate((scale_bytes, min_bytes, low_halves), 1)


def _pack_nibbles(codes: Bytes) -> Bytes:
    """Pack 4-bit codes: of every 64 codes the first 32 are in the low halves of bytes, the rest in the high halves."""
    pairs = codes.reshape(-1, 4, 2, 32)
    packed: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return packed.reshape(-1, 128)
