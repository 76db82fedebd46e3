"""Packing codes in the layout of the kernels does not change their values."""

import numpy as np
import pytest
import torch

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.genai.layout import PackedMatrix, pack_matrix, stack_matrices
from tests.formats.genai.tiny import int_spec, round_to_nearest


def dequantize(matrix: PackedMatrix) -> np.ndarray:
    """Unpack and dequantize by the definition of MatMulNBits. The default zero point is the middle of the range."""
    mask, codes_per_byte = 2**matrix.bits - 1, 8 // matrix.bits

    def unpack(packed: np.ndarray) -> np.ndarray:
        parts = [packed >> (matrix.bits * index) & mask for index in range(codes_per_byte)]
        return np.stack(parts, -1).reshape(*packed.shape[:-1], -1).astype(np.float32)

    blocks = matrix.scales.shape[1]
    middle = 2 ** (matrix.bits - 1)
    zero_points = middle if matrix.zero_points is None else unpack(matrix.zero_points)[:, :blocks, None]
    values = (unpack(matrix.codes) - zero_points) * matrix.scales[..., None]
    return values.reshape(matrix.rows, -1)[:, : matrix.columns]


@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("bits", "block_size", "columns", "stored_block_size"),
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
def test_packing_keeps_values_bit_for_bit(bits, block_size, columns, stored_block_size, is_symmetric):
    weight = round_to_nearest(torch.randn(6, columns), int_spec(bits, block_size, is_symmetric=is_symmetric))
    matrix = pack_matrix(weight)
    assert (matrix.bits, matrix.block_size, matrix.columns) == (bits, stored_block_size, columns)
    assert (matrix.zero_points is None) is is_symmetric
    assert np.array_equal(dequantize(matrix), weight.dequantize().numpy())


def test_unsigned_codes_with_zero_points_in_the_middle_store_no_zero_points():
    spec = int_spec(4, 16, is_symmetric=False).replace(qscheme="symmetric")
    weight = QuantizedWeight(
        torch.randint(0, 16, (2, 32), dtype=torch.uint8), torch.ones(2, 2), spec, torch.full((2, 2), 8)
    )
    matrix = pack_matrix(weight)
    assert matrix.zero_points is None
    assert np.array_equal(dequantize(matrix), weight.dequantize().numpy())


def test_unsigned_codes_without_zero_points_have_zero_point_zero():
    spec = int_spec(4, 16, is_symmetric=False).replace(qscheme="symmetric")
    weight = QuantizedWeight(torch.randint(0, 16, (2, 32), dtype=torch.uint8), torch.ones(2, 2), spec)
    assert np.array_equal(dequantize(pack_matrix(weight)), weight.dequantize().numpy())


def test_matrices_with_equal_layouts_are_stacked():
    weights = [round_to_nearest(torch.randn(rows, 64), int_spec(4, is_symmetric=False)) for rows in (3, 5)]
    stacked = stack_matrices([pack_matrix(weight) for weight in weights])
    assert np.array_equal(dequantize(stacked), torch.cat([weight.dequantize() for weight in weights]).numpy())
    assert np.array_equal(dequantize(stacked.select_rows(np.array([7, 0]))), dequantize(stacked)[[7, 0]])
    with pytest.raises(ExportError, match="different layouts"):
        stack_matrices([pack_matrix(weights[0]), pack_matrix(round_to_nearest(torch.randn(3, 64), int_spec(8)))])


def test_blocks_that_no_kernel_has_are_rejected():
    with pytest.raises(ExportError, match="blocks of 8 columns"):
        pack_matrix(round_to_nearest(torch.randn(2, 64), int_spec(4, 8)))
