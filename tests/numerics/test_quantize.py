"""Codes, compared with the formulas of the contract, with ONNX Runtime and with ONNX's node tests."""

import functools
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node as node_tests

from scalepoint.errors import BlockSizeMismatchError
from scalepoint.numerics import (
    QParams,
    as_blocks,
    block_counts,
    check_divides,
    dequantize,
    fake_quantize,
    quantize,
    round_to_float,
)
from tests import reference
from tests.onnx_quantize import ONNX_TYPES, differing_codes
from tests.reference import grid_of


def values_and_parameters(case, shape, block):
    """Values of which some lie on ties and some beyond the range, with the reference's parameters."""
    name, scheme, formulation, scale_dtype = case
    rng = np.random.default_rng(0)
    x = (rng.normal(0, 1, shape) + 0.3).astype(np.float32)
    low, high = reference.extremes(x, block)
    params = reference.qparams(low * np.float32(0.7), high * np.float32(0.7), name, scheme, scale_dtype)
    scale = reference.spread(params[0], shape, block)
    shift = reference.spread(params[2], shape, block) if formulation == "minval" else np.float32(0)
    ties = (np.floor((x - shift) / scale) + np.float32(0.5)) * scale + shift
    return np.where(rng.random(shape) < 0.3, ties, x).astype(np.float32), params


def ours(params):
    return QParams(*(None if value is None else torch.from_numpy(value) for value in params))


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize("case", reference.CASES, ids=reference.case_id)
def test_codes_and_values_follow_the_contract(case, layout):
    shape, block = reference.LAYOUTS[layout]
    x, params = values_and_parameters(case, shape, block)
    name, scheme, formulation, _ = case
    codes = reference.quantize(x, params, name, scheme, formulation, block)
    values = reference.dequantize(codes, params, name, scheme, formulation, block)

    got = quantize(torch.from_numpy(x), ours(params), grid_of(*case), block)
    np.testing.assert_array_equal(got.numpy(), codes)
    np.testing.assert_array_equal(dequantize(got, ours(params), grid_of(*case), block).numpy(), values)
    np.testing.assert_array_equal(
        fake_quantize(torch.from_numpy(x), ours(params), grid_of(*case), block).numpy(), values
    )


@pytest.mark.parametrize("case", reference.INTEGER_CASES, ids=reference.case_id)
def test_the_data_of_these_tests_reach_both_ends_of_the_range(case):
    shape, block = reference.LAYOUTS["per_tensor"]
    x, params = values_and_parameters(case, shape, block)
    codes = quantize(torch.from_numpy(x), ours(params), grid_of(*case), block)
    low, high = reference.limits(*case[:2])
    assert codes.max() == high
    if case[1] == "asymmetric":
        assert codes.min() == low


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_codes_of_other_input_dtypes_equal_those_of_float32(dtype):
    x = torch.linspace(-3, 3, 1001).to(dtype)
    qparams = QParams(torch.tensor([0.017]), torch.tensor([5], dtype=torch.int32), torch.tensor([-2.0]))
    grid = grid_of("int8", "asymmetric")
    assert torch.equal(quantize(x, qparams, grid), quantize(x.to(torch.float32), qparams, grid))


LARGE = {
    "a scale": ("int8", "symmetric", torch.tensor([0.02]), None),
    "a scale a row": ("int8", "symmetric", torch.rand(600, 1) * 0.02 + 0.01, torch.zeros(600, 1, dtype=torch.int32)),
    "a zero point": ("uint8", "asymmetric", torch.tensor([0.02]), torch.tensor([117], dtype=torch.int32)),
    "zero points": ("uint8", "asymmetric", torch.rand(600, 1) + 0.01, torch.randint(0, 255, (600, 1)).int()),
}


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_codes_of_a_large_tensor_equal_those_of_its_rows(case, dtype):
    fmt, scheme, scale, zero = case
    x = torch.randn(600, 500, generator=torch.Generator().manual_seed(0))
    x[3, 4], x[5, 6], x[7, 8] = float("nan"), float("inf"), -1e-9
    grid = grid_of(fmt, scheme)

    def codes(rows):
        params = [None if value is None else value[rows] if len(value) > 1 else value for value in (scale, zero)]
        return quantize(x[rows], QParams(*params, None), grid, dtype=dtype)

    all_codes = codes(slice(None))
    assert all_codes.dtype == dtype
    assert torch.equal(all_codes, torch.cat([codes(slice(row, row + 1)) for row in range(600)]))


@pytest.mark.parametrize("layout", [name for name in reference.LAYOUTS if name not in reference.RAGGED])
def test_blocks_as_rows_have_the_order_of_their_parameters(layout):
    shape, block = reference.LAYOUTS[layout]
    x = np.random.default_rng(2).normal(0, 1, shape).astype(np.float32)
    rows = as_blocks(torch.from_numpy(x), block)
    low, high = reference.extremes(x, block)
    np.testing.assert_array_equal(rows.amin(1).numpy(), low.ravel())
    np.testing.assert_array_equal(rows.amax(1).numpy(), high.ravel())
    assert rows.numel() == x.size


@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_a_ragged_block_counts_as_a_block_and_is_refused_where_blocks_must_divide(layout):
    shape, block = reference.LAYOUTS[layout]
    assert block_counts(shape, block) == reference.counts(shape, block)
    if layout in reference.RAGGED:
        with pytest.raises(BlockSizeMismatchError, match="do not divide"):
            check_divides(shape, block)
    else:
        check_divides(shape, block)


@pytest.mark.parametrize("name", ONNX_TYPES)
def test_codes_equal_those_of_onnx_runtime(name):
    assert differing_codes(name, 200_000, np.random.default_rng(7)) == 0


NAMES = {
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.UINT16: "uint16",
    TensorProto.INT16: "int16",
    TensorProto.UINT4: "uint4",
    TensorProto.INT4: "int4",
    TensorProto.UINT2: "uint2",
    TensorProto.INT2: "int2",
    TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    TensorProto.FLOAT8E5M2: "float8_e5m2",
    TensorProto.FLOAT4E2M1: "float4_e2m1fn_x2",
}

QUANTIZE_NODES = (
    "test_quantizelinear",
    "test_quantizelinear_axis",
    "test_quantizelinear_blocked_asymmetric",
    "test_quantizelinear_blocked_symmetric",
    "test_quantizelinear_e4m3fn",
    "test_quantizelinear_e5m2",
    "test_quantizelinear_float4e2m1",
    "test_quantizelinear_int16",
    "test_quantizelinear_int2",
    "test_quantizelinear_int4",
    "test_quantizelinear_uint16",
    "test_quantizelinear_uint2",
    "test_quantizelinear_uint4",
)
DEQUANTIZE_NODES = (
    "test_dequantizelinear",
    "test_dequantizelinear_axis",
    "test_dequantizelinear_blocked",
    "test_dequantizelinear_e4m3fn",
    "test_dequantizelinear_e4m3fn_float16",
    "test_dequantizelinear_e4m3fn_zero_point",
    "test_dequantizelinear_e5m2",
    "test_dequantizelinear_float4e2m1",
    "test_dequantizelinear_int16",
    "test_dequantizelinear_int2",
    "test_dequantizelinear_int4",
    "test_dequantizelinear_uint16",
    "test_dequantizelinear_uint2",
    "test_dequantizelinear_uint4",
)
CAST_NODES = tuple(
    f"test_cast_{source}_to_{target}"
    for source in ("FLOAT", "FLOAT16")
    for target in ("FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT4E2M1")
)


@functools.cache
def node_cases():
    """ONNX's own tests of one node, of the modules that quantize or cast: name -> (node, inputs, outputs)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes its expected infinities with numpy
        for path in Path(node_tests.__file__).parent.glob("*.py"):
            if any(operator in path.read_text() for operator in ('"QuantizeLinear"', '"DequantizeLinear"', '"Cast"')):
                import_module(f"{node_tests.__name__}.{path.stem}")
        cases = node_tests._NodeTestCases
    return {
        case.name: (case.model.graph.node[0], *case.data_sets[0])
        for case in cases
        if case.model is not None and len(case.model.graph.node) == 1
    }


def array_and_type(value):
    """The values as float32 and the dtype's name, of an array or a TensorProto."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value).astype(np.float32), NAMES.get(value.data_type)
    return np.asarray(value).astype(np.float32), str(np.asarray(value).dtype)


def parameters(node, inputs, shape):
    """QParams and the block from a node's scale, zero point, axis and block size, as ONNX defines them."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    axis, size = attributes.get("axis", 1), attributes.get("block_size", 0)
    scale, _ = array_and_type(inputs[1])
    zero_point = array_and_type(inputs[2])[0] if len(inputs) > 2 else np.zeros(scale.shape, np.float32)
    if size:
        block = tuple(size if at == axis else 1 for at in range(len(shape)))
    elif scale.size > 1:
        block = tuple(1 if at == axis else extent for at, extent in enumerate(shape))
    else:
        block = tuple(shape)
    counts = reference.counts(shape, block)
    return QParams(
        torch.from_numpy(scale.reshape(counts)), torch.from_numpy(zero_point.reshape(counts)).to(torch.int32)
    ), block


def test_all_27_quantization_nodes_of_onnx_are_among_these_tests():
    shipped = {
        name for name, (node, *_) in node_cases().items() if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }
    assert shipped == {*QUANTIZE_NODES, *DEQUANTIZE_NODES}
    assert len(shipped) == 27


@pytest.mark.parametrize("name", QUANTIZE_NODES)
def test_a_quantize_node_of_onnx_gives_its_expected_codes(name):
    node, inputs, outputs = node_cases()[name]
    x, _ = array_and_type(inputs[0])
    expected, dtype = array_and_type(outputs[0])
    qparams, block = parameters(node, inputs, x.shape)
    scheme = "symmetric" if dtype in reference.FLOATS else "asymmetric"
    codes = quantize(torch.from_numpy(x), qparams, grid_of(dtype, scheme), block)
    np.testing.assert_array_equal(codes.numpy(), expected)


@pytest.mark.parametrize("name", DEQUANTIZE_NODES)
def test_a_dequantize_node_of_onnx_gives_its_expected_values(name):
    node, inputs, outputs = node_cases()[name]
    codes, dtype = array_and_type(inputs[0])
    qparams, block = parameters(node, inputs, codes.shape)
    scheme = "symmetric" if dtype in reference.FLOATS else "asymmetric"
    values = dequantize(torch.from_numpy(codes), qparams, grid_of(dtype, scheme), block).numpy()
    np.testing.assert_array_equal(values.astype(outputs[0].dtype), outputs[0])


@pytest.mark.parametrize("name", CAST_NODES)
def test_a_saturating_cast_of_onnx_is_a_clamp_and_a_rounding(name):
    _, inputs, outputs = node_cases()[name]
    x, _ = array_and_type(inputs[0])
    expected, dtype = array_and_type(outputs[0])
    fmt = grid_of(dtype).format
    if dtype == "float4_e2m1fn_x2":  # it has no NaN to cast to
        x, expected = x[~np.isnan(x)], expected[~np.isnan(x)]
    rounded = round_to_float(torch.from_numpy(x).clamp(fmt.low, fmt.high), fmt).numpy()
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(expected))
