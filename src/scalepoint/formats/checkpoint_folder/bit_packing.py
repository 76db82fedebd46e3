"""Codes of few bits in 32-bit words, without gaps: code i of a row starts at bit i * bits, low bits first.

4 bits    word = c0 | c1 << 4 | .. | c7 << 28
3 bits    32 codes in 3 words; two of them lie across a border
"""

import torch
from torch import Tensor

WORD = 32


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes from 0 to 2^bits - 1 as rows of ceil(columns * bits / 32) words, int32."""
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % WORD)).reshape(rows, -1, WORD)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int64)
    for index in range(WORD):
        word, offset = divmod(index * bits, WORD)
        wide = padded[..., index].to(torch.int64)
        words[..., word] |= wide << offset
        if offset + bits > WORD:
            words[..., word + 1] |= wide >> (WORD - offset)
    words = (words & 0xFFFFFFFF).to(torch.int32)
    return words.reshape(rows, -1)[:, : -(-columns * bits // WORD)].contiguous()
