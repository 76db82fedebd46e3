"""Codes in the layout of the kernels stand for what they stood for."""

import numpy as np
import pytest
import torch

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.genai.layout import PackedMatrix, pack_matrix, stack_matrices
from tests.formats.genai.tiny import int_spec, nearest


def unpacked(found: PackedMatrix) -> np.ndarray:
    """By the definition of MatMulNBits: low bits first, (code - zero point) scale, the middle where there is none."""
    mask, many = 2**found.bits - 1, 8 // found.bits

    def codes(packed: np.ndarray) -> np.ndarray:
        parts = [packed >> (found.bits * place) & mask for place in range(many)]
        return np.stack(parts, -1).reshape(*packed.shape[:-1], -1).astype(np.float32)

    blocks = found.scales.shape[1]
    zeros = 2 ** (found.bits - 1) if found.zeros is None else codes(found.zeros)[:, :blocks, None]
    wide = (codes(found.codes) - zeros) * found.scales[..., None]
    return wide.reshape(found.rows, -1)[:, : found.columns]


@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("bits", "given", "columns", "stored"),
    [
        (4, 32, 96, 32),
        (8, 16, 48, 16),
        (2, 64, 64, 64),
        (4, 48, 96, 16),
        (4, 512, 512, 128),
        (8, 0, 40, 32),
        (4, 0, 96, 32),
    ],
)
def test_values_are_kept_bit_for_bit(bits, given, columns, stored, is_symmetric):
    packed = nearest(torch.randn(6, columns), int_spec(bits, given, is_symmetric=is_symmetric))
    found = pack_matrix(packed)
    assert (found.bits, found.block, found.columns) == (bits, stored, columns)
    assert (found.zeros is None) is is_symmetric
    assert np.array_equal(unpacked(found), packed.dequantize().numpy())


def test_unsigned_codes_around_their_middle_need_no_zero_points():
    spec = int_spec(4, 16, is_symmetric=False).replace(qscheme="symmetric")
    packed = QuantizedWeight(
        torch.randint(0, 16, (2, 32), dtype=torch.uint8), torch.ones(2, 2), spec, torch.full((2, 2), 8)
    )
    found = pack_matrix(packed)
    assert found.zeros is None
    assert np.array_equal(unpacked(found), packed.dequantize().numpy())


def test_unsigned_codes_without_zero_points_count_from_zero():
    spec = int_spec(4, 16, is_symmetric=False).replace(qscheme="symmetric")
    packed = QuantizedWeight(torch.randint(0, 16, (2, 32), dtype=torch.uint8), torch.ones(2, 2), spec)
    assert np.array_equal(unpacked(pack_matrix(packed)), packed.dequantize().numpy())


def test_matrices_of_one_kind_are_stacked():
    parts = [nearest(torch.randn(rows, 64), int_spec(4, is_symmetric=False)) for rows in (3, 5)]
    found = stack_matrices([pack_matrix(each) for each in parts])
    assert np.array_equal(unpacked(found), torch.cat([each.dequantize() for each in parts]).numpy())
    assert np.array_equal(unpacked(found.select_rows(np.array([7, 0]))), unpacked(found)[[7, 0]])
    with pytest.raises(ExportError, match="several kinds"):
        stack_matrices([pack_matrix(parts[0]), pack_matrix(nearest(torch.randn(3, 64), int_spec(8)))])


def test_blocks_that_no_kernel_has_are_refused():
    with pytest.raises(ExportError, match="blocks of 8 columns"):
        pack_matrix(nearest(torch.randn(2, 64), int_spec(4, 8)))
