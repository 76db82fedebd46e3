"""Codes in words: bit i * bits of a row is where code i starts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalepoint.formats.checkpoint_folder.bit_packing import pack_bits


def unpack(words, bits, columns):
    """By whole numbers: a row is one long number, its lowest word first."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(row))
        rows.append([number >> bits * place & (1 << bits) - 1 for place in range(columns)])
    return rows


def test_eight_codes_of_four_bits_are_a_word_with_the_first_lowest():
    assert pack_bits(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]]), 4).tolist() == [[0x07654321]]
    assert pack_bits(torch.full((1, 8), 15), 4).tolist() == [[-1]]


@pytest.mark.parametrize("bits", range(1, 9))
@given(rows=st.integers(1, 3), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_codes_come_back_whatever_the_width_and_the_length(bits, rows, columns, seed):
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    assert unpack(words, bits, columns) == codes.tolist()
