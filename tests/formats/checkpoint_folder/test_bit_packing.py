"""Packing codes into words: code i of a row starts at bit i * bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalepoint.formats.checkpoint_folder.bit_packing import pack_bits


def unpack(words, bits, columns):
    """Read every row as one long integer, whose lowest word is the first."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << 32 * index for index, word in enumerate(row))
        rows.append([number >> bits * column & (1 << bits) - 1 for column in range(columns)])
    return rows


def test_eight_4_bit_codes_fill_a_word_with_the_first_in_the_low_bits():
    assert pack_bits(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]]), 4).tolist() == [[0x07654321]]
    assert pack_bits(torch.full((1, 8), 15), 4).tolist() == [[-1]]


@pytest.mark.parametrize("bits", range(1, 9))
@given(rows=st.integers(1, 3), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_unpacking_gives_the_codes_for_any_width_and_length(bits, rows, columns, seed):
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    assert unpack(words, bits, columns) == codes.tolist()
