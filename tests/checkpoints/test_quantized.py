"""Quantized weights: values, unsigned codes, and checks of shapes."""

import pytest
import torch

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.spec import QuantizationSpec

INT4 = QuantizationSpec(dtype="int4", granularity={"type": "per_block", "block_size": 4, "axis": 1})
UINT4 = INT4.replace(dtype=torch.uint4, qscheme="asymmetric")


def test_dequantize_multiplies_codes_by_the_scale_of_their_block():
    codes = torch.tensor([[-8, 7, 1, 0, 2, 2, 2, 2]], dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.tensor([[0.5, 2.0]]), INT4)
    assert weight.dequantize().tolist() == [[-4.0, 3.5, 0.5, 0.0, 4.0, 4.0, 4.0, 4.0]]
    assert (weight.bits, weight.block_size, weight.has_blocks) == (4, 4, True)


def test_unsigned_codes_and_zero_points_have_the_same_values():
    codes = torch.tensor([[-8, 7, 1, 0]], dtype=torch.int8)
    unsigned_codes, zero_point = QuantizedWeight(codes, torch.tensor([[0.5]]), INT4).to_unsigned()
    assert unsigned_codes.tolist() == [[0, 15, 9, 8]]
    assert zero_point.tolist() == [[8]]
    asymmetric = QuantizedWeight(
        torch.tensor([[0, 15, 9, 8]], dtype=torch.uint8), torch.tensor([[0.5]]), UINT4, zero_point.int()
    )
    assert asymmetric.dequantize().tolist() == [[-4.0, 3.5, 0.5, 0.0]]
    assert asymmetric.to_unsigned()[1].tolist() == [[8]]


def test_minval_is_the_value_of_the_lowest_code():
    scale, minval = torch.tensor([[0.5]]), torch.tensor([[-3.0]])
    unsigned = QuantizedWeight(torch.tensor([[0, 15, 9, 8]], dtype=torch.uint8), scale, UINT4, minval=minval)
    assert unsigned.dequantize().tolist() == [[-3.0, 4.5, 1.5, 1.0]]
    signed = QuantizedWeight(torch.tensor([[-8, 7, 1, 0]], dtype=torch.int8), scale, INT4, minval=minval)
    assert torch.equal(signed.dequantize(), unsigned.dequantize())
    with pytest.raises(ExportError, match="zero points"):
        QuantizedWeight(unsigned.codes, scale, UINT4, torch.zeros(1, 1, dtype=torch.int32), minval=minval)


def test_scales_must_fit_the_codes():
    with pytest.raises(ExportError, match="scales of shape"):
        QuantizedWeight(torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 3), INT4)
    with pytest.raises(ExportError, match="zero points of shape"):
        QuantizedWeight(
            torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 2), INT4, torch.zeros(2, 1, dtype=torch.int32)
        )
