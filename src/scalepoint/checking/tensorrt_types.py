"""Rules on types, scales and zero points: what TensorRT's parser accepts.

R01  zero points              R05  the bias stays float        R08  equal float types
R02  scales                   R06  no integer operators        R22  the type of the float remainder
R03  scales of activations    R07  opsets
"""

from collections.abc import Iterator
from math import prod

import numpy as np
from onnx import TensorProto
from onnx_ir import Node

from scalepoint.checking.qdq_graph import (
    BFLOAT,
    DEQUANTIZE,
    DYNAMIC_QUANTIZE,
    E8M0,
    FLOAT,
    FLOATS,
    FP4,
    FP8,
    HALF,
    INT4,
    INT8,
    INT32,
    MOVES,
    ONNX_QDQ,
    QUANTIZE,
    WEIGHTED,
    QdqView,
    Tensor,
    TensorShape,
    both_orders,
    get_int_attribute,
    get_operand,
    get_result,
)
from scalepoint.checking.rule import Fault, Severity

SYMMETRIC = frozenset({INT8, INT4, FP8, FP4})
_INTEGER_OPERATOR_PREFIXES = (
    "QLinear",
    "QGemm",
    "QAttention",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantizeLinear",
    "DynamicQuantizeM",
)
_ONE_DTYPE = WEIGHTED | {"Add", "Sub", "Mul", "Div", "Concat"}  # all operands must have the same dtype


def check_zero_points(view: QdqView) -> Iterator[Fault]:
    """R01: a zero point is all zeros, of type int8, fp8 e4m3, int4 or fp4, shaped like the scale, and present on Q."""
    for node in view.nodes(*ONNX_QDQ):
        description = _describe_wrong_zero_point(view, node)
        if description:
            yield Fault(node, get_operand(node, 2) or get_operand(node, 0), description)


def _describe_wrong_zero_point(view: QdqView, node: Node) -> str | None:
    """Say what is wrong with the quantized type or the zero point of a node; None if nothing is."""
    tensor, dtype = get_operand(node, 2), view.quantized_dtype(node)
    if node.op_type == "QuantizeLinear" and not tensor and not get_int_attribute(node, "output_dtype"):
        return "there is no zero point and no output_dtype, which ONNX reads as uint8 and TensorRT as int8"
    if dtype and dtype not in SYMMETRIC and not _is_int32_dequantize(view, node) and not _is_scale(view, node):
        return f"the quantized type is {dtype_name(dtype)}"
    return _describe_wrong_values(view, node, tensor) if tensor else None


def _describe_wrong_values(view: QdqView, node: Node, tensor: Tensor) -> str | None:
    values = view.values(tensor)
    if values is None and not view.is_constant(tensor):
        return "the zero point is not constant"
    if values is not None and np.any(values.astype(np.float32) != 0):
        return "the zero point is not zero"
    shape, scale_shape = view.shape(tensor), view.shape(get_operand(node, 1))
    if shape is not None and scale_shape is not None and shape != scale_shape:
        return f"the zero point has shape {_format_shape(shape)}, the scale {_format_shape(scale_shape)}"
    return None


def _is_scale(view: QdqView, node: Node) -> bool:
    """Whether a DQ computes the scale of another DQ: the second level of a block format."""
    uses = view.readers(get_result(node))
    return bool(uses) and all(use.node.op_type in DEQUANTIZE and use.operand_index == 1 for use in uses)


def check_scales(view: QdqView) -> Iterator[Fault]:
    """R02: a scale is constant, positive, a scalar, one number per channel of `axis`, or blocks of the data's rank."""
    for node in view.nodes(*((QUANTIZE | DEQUANTIZE) - DYNAMIC_QUANTIZE - {"TRT_MXFP8DequantizeLinear"})):
        description = _describe_wrong_scale(view, node)
        if description:
            yield Fault(node, get_operand(node, 1), description)


def _describe_wrong_scale(view: QdqView, node: Node) -> str | None:
    """Say what is wrong with the scale of a node; None if nothing is."""
    tensor = get_operand(node, 1)
    if not tensor:
        return "there is no scale"
    if not view.is_constant(tensor):
        return None if _is_dynamic_block_scale(view, tensor) else "the scale is not constant"
    values = view.scale(node)
    if values is not None and not np.all(np.isfinite(values) & (values > 0)):
        return "the scale is not a positive number everywhere"
    shape, data_shape = view.shape(tensor), view.shape(get_operand(node, 0))
    return None if shape is None or data_shape is None else _describe_wrong_shape(view, node, shape, data_shape)


def _is_dynamic_block_scale(view: QdqView, tensor: Tensor) -> bool:
    """Whether a scale is the dequantized result of a DynamicQuantize, as in block formats of activations."""
    producer = view.producer(tensor)
    if producer is not None and producer.op_type in DEQUANTIZE:
        producer = view.producer(get_operand(producer, 0))
    return producer is not None and producer.op_type in DYNAMIC_QUANTIZE


def _describe_wrong_shape(view: QdqView, node: Node, shape: TensorShape, data_shape: TensorShape) -> str | None:
    """Say why the shape of a scale does not fit the data; None if it fits."""
    if len(shape) <= 1 and prod(size or 0 for size in shape) == 1:
        return None
    rank = len(data_shape)
    axis, block_size = view.axis(node, rank), view.block_size(node)
    if len(shape) not in (1, rank):
        return f"the scale has rank {len(shape)}, the data {rank}"
    if not 0 <= axis < rank:
        return f"axis {get_int_attribute(node, 'axis', 1)} is outside of data of rank {rank}"
    if len(shape) == 1 and not block_size:
        expected: TensorShape = (data_shape[axis],)
    else:
        sizes = list(data_shape)
        size = sizes[axis]
        if block_size and size is not None:
            sizes[axis] = -(-size // block_size)
        expected = tuple(sizes)
    pairs = zip(expected, shape, strict=True)
    if any(expected_size is not None and expected_size != actual_size for expected_size, actual_size in pairs):
        return f"the scale has shape {_format_shape(shape)}, the data and axis {axis} need {_format_shape(expected)}"
    return None


def _format_shape(shape: TensorShape | None) -> str:
    if shape is None:
        return "unknown"
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def check_activation_granularity(view: QdqView) -> Iterator[Fault]:
    """R03: Q on a tensor that is not constant has exactly one scale."""
    for node in view.nodes(*(QUANTIZE - DYNAMIC_QUANTIZE)):
        count = view.element_count(get_operand(node, 1))
        if not view.is_constant(get_operand(node, 0)) and count is not None and count > 1:
            yield Fault(node, get_operand(node, 0), f"an activation has {count} scales")


def check_bias_is_float(view: QdqView) -> Iterator[Fault]:
    """R05: no DequantizeLinear on int32; the bias of Conv and Gemm, or added after MatMul, is float without Q/DQ."""
    for node in view.graph:
        if _is_int32_dequantize(view, node):
            yield Fault(node, get_operand(node, 0), "int32 is dequantized")
        elif node.op_type in WEIGHTED and _is_quantized_constant(view, get_operand(node, 2)):
            yield Fault(node, get_operand(node, 2), "the bias is quantized")
        elif node.op_type == "Add":
            yield from _check_added_bias(view, node)


def _check_added_bias(view: QdqView, node: Node) -> Iterator[Fault]:
    for bias, data in both_orders(node):
        producer = view.producer(data)
        if producer is not None and producer.op_type in WEIGHTED and _is_quantized_constant(view, bias):
            yield Fault(node, bias, f"the bias after {producer.op_type} is quantized")


def _is_quantized_constant(view: QdqView, tensor: Tensor) -> bool:
    source = view.dequantizer(tensor)
    return source is not None and view.is_constant(tensor) and not _is_int32_dequantize(view, source)


def _is_int32_dequantize(view: QdqView, node: Node) -> bool:
    return node.op_type in DEQUANTIZE and INT32 in (view.dtype(get_operand(node, 0)), view.dtype(get_operand(node, 2)))


def check_integer_operators(view: QdqView) -> Iterator[Fault]:
    """R06: no QLinear*, ConvInteger, MatMulInteger, DynamicQuantizeLinear."""
    for node in view.graph:
        if node.op_type.startswith(_INTEGER_OPERATOR_PREFIXES):
            yield Fault(node, get_operand(node, 0), f"TensorRT does not have the operator {node.op_type}")


def check_opsets(view: QdqView) -> Iterator[Fault]:
    """R07: axis needs opset 13; fp16 and bf16 scales and fp8 need 19; int4 and blocks 21; fp4 23; e8m0 24."""
    for node in view.nodes(*ONNX_QDQ):
        dtype, scale_dtype = view.quantized_dtype(node), view.dtype(get_operand(node, 1))
        features = [  # needed opset, whether the node uses the feature, the feature
            (13, "axis" in node.attributes, "the attribute axis"),
            (19, scale_dtype in (HALF, BFLOAT), f"a {dtype_name(scale_dtype)} scale"),
            (19, dtype == FP8, "fp8"),
            (21, dtype == INT4, "int4"),
            (21, view.block_size(node) > 0, "a block size"),
            (23, dtype == FP4, "fp4"),
            (24, scale_dtype == E8M0, "an e8m0 scale"),
        ]
        missing = [(opset, feature) for opset, is_used, feature in features if is_used and view.opset < opset]
        if missing:
            opset, feature = max(missing)
            description = f"{feature} needs opset {opset}, the file has {view.opset}"
            yield Fault(node, get_operand(node, 0), description, way_out=f"Export with opset {opset} or later.")


def check_float_dtypes(view: QdqView) -> Iterator[Fault]:
    """R08: Q has a scale of its data's dtype, operands have one float dtype, no Cast is between a DQ and its reader."""
    for node in view.graph:
        if node.op_type in QUANTIZE - DYNAMIC_QUANTIZE:
            yield from _check_scale_dtype(view, node)
        elif node.op_type in _ONE_DTYPE:
            yield from _check_operand_dtypes(view, node)
        elif node.op_type == "Cast":
            yield from _check_cast(view, node)


def _check_scale_dtype(view: QdqView, node: Node) -> Iterator[Fault]:
    data, scale = view.dtype(get_operand(node, 0)), view.dtype(get_operand(node, 1))
    if data in FLOATS and scale in FLOATS and data != scale:
        yield Fault(node, get_operand(node, 1), f"the scale is {dtype_name(scale)}, the data {dtype_name(data)}")


def _check_operand_dtypes(view: QdqView, node: Node) -> Iterator[Fault]:
    dtypes = {tensor: _float_dtype(view, tensor) for tensor in node.inputs if tensor}
    float_dtypes = {dtype for dtype in dtypes.values() if dtype in FLOATS}
    dequantized = next((tensor for tensor in dtypes if view.dequantizer(tensor)), None)
    if len(float_dtypes) > 1 and dequantized:
        names = " and ".join(sorted(map(dtype_name, float_dtypes)))
        yield Fault(node, dequantized, f"the operands have different types, {names}")


def _float_dtype(view: QdqView, tensor: Tensor) -> int:
    """Return the dtype of a tensor; of a dequantized one by its DQ, as ONNX's inference stops where types disagree."""
    source = view.dequantizer(tensor)
    if source is None:
        return view.dtype(tensor)
    return get_int_attribute(source, "output_dtype") or view.dtype(get_operand(source, 1))


def _check_cast(view: QdqView, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(get_operand(node, 0))
    if source is None or view.quantized_dtype(source) == FP4 or source.op_type == "TRT_MXFP8DequantizeLinear":
        return  # block formats of NVIDIA's toolkit have a Cast there
    readers = view.readers_past(get_result(node), lambda use: use.node.op_type in MOVES)
    reader = next((use.node for use in readers if use.node.op_type in WEIGHTED | {"Add"}), None)
    if reader is not None:
        description = f"a Cast is between DequantizeLinear and {reader.op_type}"
        yield Fault(node, get_operand(node, 0), description, Severity.PERFORMANCE)


def check_float_remainder(view: QdqView) -> Iterator[Fault]:
    """R22: from TensorRT 11 on, where all graphs are strongly typed, the float remainder is fp16 or bf16, not fp32."""
    if view.version < (11, 0) or not any(node.op_type in QUANTIZE | DEQUANTIZE for node in view.graph):
        return
    fp32_nodes = [node for node in view.nodes(*WEIGHTED) if view.dtype(get_result(node)) == FLOAT]
    if fp32_nodes:
        first, count = fp32_nodes[0], len(fp32_nodes)
        which = f"{count} convolutions and matrix products" if count > 1 else f"a {first.op_type}"
        yield Fault(first, get_result(first), f"the float results of {which} are fp32")


def dtype_name(dtype: int) -> str:
    """Return the name of a TensorProto data type."""
    return TensorProto.DataType.Name(dtype).lower() if dtype in TensorProto.DataType.values() else f"type {dtype}"
