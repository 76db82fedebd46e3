"""Pack codes into 32-bit words without gaps: code i of a row starts at bit i * bits, low bits first.

4 bits    word = c0 | c1 << 4 | .. | c7 << 28
3 bits    32 codes in 3 words; two of the codes extend over two words
"""

import torch
from torch import Tensor

WORD_BITS = 32


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes from 0 to 2^bits - 1 into rows of ceil(columns * bits / 32) words, int32."""
    rows, columns = codes.shape
    # 32 codes fill a whole number of words: `bits` of them.
    padded = torch.nn.functional.pad(codes, (0, -columns % WORD_BITS)).reshape(rows, -1, WORD_BITS)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int64)
    for index in range(WORD_BITS):
        word, offset = divmod(index * bits, WORD_BITS)
        code = padded[..., index].to(torch.int64)
        words[..., word] |= code << offset
        if offset + bits > WORD_BITS:
            words[..., word + 1] |= code >> (WORD_BITS - offset)
    words = (words & 0xFFFFFFFF).to(torch.int32)
    return words.reshape(rows, -1)[:, : -(-columns * bits // WORD_BITS)].contiguous()
