"""Block types with a scale of their own for 32 columns; d and m are float16.

    Q8_0   d, 32 int8                              w = d q
    Q4_0   d, 16 bytes                             w = d (q - 8)
    Q4_1   d, m, 16 bytes                          w = d q + m
    Q5_0   d, 4 bytes of fifth bits, 16 bytes      w = d (q - 16)
    Q5_1   d, m, 4 bytes of fifth bits, 16 bytes   w = d q + m

A byte j of codes has element j in its low half and element j + 16 in its high half.
"""

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.gguf.layer_types import BlockCodes, Bytes

BLOCK_COLUMNS = 32


def pack_q8_0(form: BlockCodes) -> Bytes | None:
    return _join_fields(
        form, _float16_bytes(form.scale), form.codes.to(torch.int8).numpy().view(np.uint8).reshape(-1, BLOCK_COLUMNS)
    )


def pack_q4_0(form: BlockCodes) -> Bytes | None:
    return _join_fields(form, _float16_bytes(form.scale), _pack_nibbles(_shift_codes(form, 8)))


def pack_q4_1(form: BlockCodes) -> Bytes | None:
    return _join_fields(
        form, _float16_bytes(form.scale), _float16_bytes(form.least), _pack_nibbles(_shift_codes(form, 0))
    )


def pack_q5_0(form: BlockCodes) -> Bytes | None:
    codes = _shift_codes(form, 16)
    return _join_fields(form, _float16_bytes(form.scale), _pack_fifth_bits(codes), _pack_nibbles(codes))


def pack_q5_1(form: BlockCodes) -> Bytes | None:
    codes = _shift_codes(form, 0)
    return _join_fields(
        form, _float16_bytes(form.scale), _float16_bytes(form.least), _pack_fifth_bits(codes), _pack_nibbles(codes)
    )


def _join_fields(form: BlockCodes, *parts: Bytes | None) -> Bytes | None:
    """Rows of blocks; None where a scale is not a float16."""
    known = [each for each in parts if each is not None]
    return None if len(known) < len(parts) else np.concatenate(known, 1).reshape(form.codes.shape[0], -1)


def _float16_bytes(values: Tensor | None) -> Bytes | None:
    """Two bytes for each, where all are float16 exactly."""
    if values is None:
        return None
    narrow = values.to(torch.float16)
    return narrow.numpy().view(np.uint8).reshape(-1, 2) if torch.equal(narrow.to(torch.float32), values) else None


def _shift_codes(form: BlockCodes, shift: int) -> Bytes:
    return (form.codes + shift).to(torch.uint8).numpy().reshape(-1, BLOCK_COLUMNS)


def _pack_nibbles(codes: Bytes) -> Bytes:
    low = codes & 15
    return low[:, : BLOCK_COLUMNS // 2] | low[:, BLOCK_COLUMNS // 2 :] << 4


def _pack_fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")
