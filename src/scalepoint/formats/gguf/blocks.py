"""Pack the block types that have 32 columns and one float16 scale d, and in some types one float16 minimum m.

    Q8_0   d, 32 int8                              w = d q
    Q4_0   d, 16 bytes                             w = d (q - 8)
    Q4_1   d, m, 16 bytes                          w = d q + m
    Q5_0   d, 4 bytes of fifth bits, 16 bytes      w = d (q - 16)
    Q5_1   d, m, 4 bytes of fifth bits, 16 bytes   w = d q + m

Byte j of the codes has element j in its low half and element j + 16 in its high half. All functions return None if a
scale or minimum is not exactly a float16.
"""

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.gguf.block_codes import BlockCodes, Bytes

BLOCK_COLUMNS = 32


def pack_q8_0(block_codes: BlockCodes) -> Bytes | None:
    codes = block_codes.codes.to(torch.int8).numpy().view(np.uint8).reshape(-1, BLOCK_COLUMNS)
    return _join_fields(block_codes, _float16_bytes(block_codes.scale), codes)


def pack_q4_0(block_codes: BlockCodes) -> Bytes | None:
    codes = block_codes.to_unsigned(8, BLOCK_COLUMNS)
    return _join_fields(block_codes, _float16_bytes(block_codes.scale), _pack_nibbles(codes))


def pack_q4_1(block_codes: BlockCodes) -> Bytes | None:
    scale, minimum = _float16_bytes(block_codes.scale), _float16_bytes(block_codes.minimum)
    codes = block_codes.to_unsigned(0, BLOCK_COLUMNS)
    return _join_fields(block_codes, scale, minimum, _pack_nibbles(codes))


def pack_q5_0(block_codes: BlockCodes) -> Bytes | None:
    codes = block_codes.to_unsigned(16, BLOCK_COLUMNS)
    return _join_fields(block_codes, _float16_bytes(block_codes.scale), _pack_fifth_bits(codes), _pack_nibbles(codes))


def pack_q5_1(block_codes: BlockCodes) -> Bytes | None:
    scale, minimum = _float16_bytes(block_codes.scale), _float16_bytes(block_codes.minimum)
    codes = block_codes.to_unsigned(0, BLOCK_COLUMNS)
    return _join_fields(block_codes, scale, minimum, _pack_fifth_bits(codes), _pack_nibbles(codes))


def _join_fields(block_codes: BlockCodes, *fields: Bytes | None) -> Bytes | None:
    """Return the packed rows; None if a field is None."""
    exact_fields = [field for field in fields if field is not None]
    return block_codes.join_fields(*exact_fields) if len(exact_fields) == len(fields) else None


def _float16_bytes(values: Tensor | None) -> Bytes | None:
    """Return two bytes for each value, or None if a value is not exactly a float16."""
    if values is None:
        return None
    narrow = values.to(torch.float16)
    return narrow.numpy().view(np.uint8).reshape(-1, 2) if torch.equal(narrow.to(torch.float32), values) else None


def _pack_nibbles(codes: Bytes) -> Bytes:
    low = codes & 15
    return low[:, : BLOCK_COLUMNS // 2] | low[:, BLOCK_COLUMNS // 2 :] << 4


def _pack_fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")
