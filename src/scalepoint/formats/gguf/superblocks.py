"""Block types of 256 columns, whose scales are small integers times one float16 (K-quants).

    Q2_K   16 blocks of 16, 4-bit sc and m      w = d sc q - dmin m     q 0..3
    Q3_K   16 blocks of 16, 6-bit sc            w = d sc q              q -4..3, sc -32..31
    Q4_K   8 blocks of 32, 6-bit sc and m       w = d sc q - dmin m     q 0..15
    Q5_K   as Q4_K                                                      q 0..31
    Q6_K   16 blocks of 16, 8-bit sc            w = d sc q              q -32..31, sc -128..127

`nearest` gives values that such a type can hold, before codes are chosen; `factors` finds their integers again.
"""

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.gguf.layer_types import BlockCodes, Bytes

SUPERBLOCK_COLUMNS = 256


def round_to_factors(values: Tensor, most: int) -> Tensor:
    """(.., blocks of a super-block), not negative: the nearest d i, where d is a float16 and i at most `most`.

    A value above zero stays above zero. The largest one fixes d.
    """
    d = (values.amax(-1, keepdim=True) / most).to(torch.float16).to(torch.float32)
    d = torch.where((d == 0) & (values.amax(-1, keepdim=True) > 0), 2.0**-24, d)
    steps = (values / torch.where(d > 0, d, 1.0)).round().clamp(0, most)
    return d * torch.where((steps == 0) & (values > 0), 1.0, steps)


def split_into_factors(values: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """(rows, blocks), not negative -> float16 d (rows) and integers up to `most` (rows, blocks) with d i = values.

    None where there are none.
    """
    largest = values.amax(1)
    d, whole = torch.zeros_like(largest), torch.zeros_like(values)
    left = largest.nonzero().flatten()
    for step in range(most, 0, -1):
        if not len(left):
            break
        tried = (largest[left] / step).to(torch.float16).to(torch.float32)
        found = (values[left] / torch.where(tried > 0, tried, 1.0)[:, None]).round()
        fits = ((found * tried[:, None] == values[left]) & (found <= most)).all(1)
        d[left[fits]], whole[left[fits]] = tried[fits], found[fits]
        left = left[~fits]
    return None if len(left) else (d.to(torch.float16), whole.to(torch.uint8))


def pack_q2_k(form: BlockCodes) -> Bytes | None:
    found = _pack_scales(form, 16, 15)
    if found is None:
        return None
    d, steps, least, more = found
    quarter = _shift_codes(form, 0).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = np.bitwise_or.reduce(quarter, 2).reshape(-1, 64)
    return _code_rows(form, steps | more << 4, codes, d, least)


def pack_q3_k(form: BlockCodes) -> Bytes | None:
    found = split_into_factors(form.scale.reshape(-1, 16), 31)
    if found is None:
        return None
    d, steps = found[0].numpy().view(np.uint8).reshape(-1, 2), found[1].numpy() + np.uint8(32)
    codes = _shift_codes(form, 4)
    quarter = (codes & 3).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    low = np.bitwise_or.reduce(quarter, 2).reshape(-1, 64)
    high = np.packbits((codes >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    short = (steps[:, :8] & 15) | (steps[:, 8:] & 15) << 4
    upper = (steps >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return _code_rows(form, high, low, short, np.bitwise_or.reduce(upper, 1), d)


def pack_q4_k(form: BlockCodes) -> Bytes | None:
    found = _pack_scales(form, 8, 63)
    if found is None:
        return None
    d, steps, least, more = found
    return _code_rows(form, d, least, _pack_six_bits(steps, more), _pack_halves(_shift_codes(form, 0)))


def pack_q5_k(form: BlockCodes) -> Bytes | None:
    found = _pack_scales(form, 8, 63)
    if found is None:
        return None
    d, steps, least, more = found
    codes = _shift_codes(form, 0)
    fifth = np.packbits((codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    return _code_rows(form, d, least, _pack_six_bits(steps, more), fifth, _pack_halves(codes & 15))


def pack_q6_k(form: BlockCodes) -> Bytes | None:
    found = split_into_factors(form.scale.reshape(-1, 16), 127)
    if found is None:
        return None
    codes = _shift_codes(form, 32).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce((codes >> 4) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1), 2).reshape(-1, 64)
    return _code_rows(form, low, high, found[1].numpy(), found[0].numpy().view(np.uint8).reshape(-1, 2))


def _pack_scales(form: BlockCodes, blocks: int, most: int) -> tuple[Bytes, Bytes, Bytes, Bytes] | None:
    """d and its integers, dmin and its integers; None where they cannot be held."""
    assert form.least is not None  # noqa: S101  # only forms with least values come here
    first = split_into_factors(form.scale.reshape(-1, blocks), most)
    second = split_into_factors(-form.least.reshape(-1, blocks), most)
    if first is None or second is None:
        return None
    d, least = (each[0].numpy().view(np.uint8).reshape(-1, 2) for each in (first, second))
    return d, first[1].numpy(), least, second[1].numpy()


def _pack_six_bits(steps: Bytes, more: Bytes) -> Bytes:
    """Twelve bytes of eight pairs of 6 bits: the first four as they are, the others in halves and upper bits."""
    first = steps[:, :4] | (steps[:, 4:] >> 4) << 6
    second = more[:, :4] | (more[:, 4:] >> 4) << 6
    return np.concatenate((first, second, steps[:, 4:] & 15 | (more[:, 4:] & 15) << 4), 1)


def _pack_halves(codes: Bytes) -> Bytes:
    """Of 64 codes the first 32 in the low halves of bytes, the others in the high ones."""
    pairs = codes.reshape(-1, 4, 2, 32)
    found: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return found.reshape(-1, 128)


def _shift_codes(form: BlockCodes, shift: int) -> Bytes:
    return (form.codes + shift).to(torch.uint8).numpy().reshape(-1, SUPERBLOCK_COLUMNS)


def _code_rows(form: BlockCodes, *parts: Bytes) -> Bytes:
    return np.concatenate(parts, 1).reshape(form.codes.shape[0], -1)
