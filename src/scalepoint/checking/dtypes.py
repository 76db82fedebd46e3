"""Rules on types, scales and zero points: what TensorRT's parser and its strong typing accept."""

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from scalepoint.checking.graph import Node, Shape
from scalepoint.checking.qdq import (
    BFLOAT,
    DEQUANTIZE,
    DYNAMIC,
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
    QUANTIZE,
    STANDARD,
    WEIGHTED,
    View,
)
from scalepoint.checking.rule import Fault, Severity

SYMMETRIC = frozenset({INT8, INT4, FP8, FP4})
_INTEGER = (
    "QLinear",
    "QGemm",
    "QAttention",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantizeLinear",
    "DynamicQuantizeM",
)
_MIXING = WEIGHTED | {"Add", "Sub", "Mul", "Div", "Concat"}  # all operands have one type


def type_name(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower() if kind in TensorProto.DataType.values() else f"type {kind}"


def zero_points(view: View) -> Iterator[Fault]:
    """R01: a zero point is all zeros, of type int8, fp8 e4m3, int4 or fp4, shaped like the scale, and present on Q."""
    for node in view.nodes(*STANDARD):
        seen = _wrong_zero_point(view, node)
        if seen:
            yield Fault(node, node.input(2) or node.input(0), seen)


def _wrong_zero_point(view: View, node: Node) -> str | None:
    tensor, kind = node.input(2), view.kind(node)
    if node.op == "QuantizeLinear" and not tensor and not node.integer("output_dtype"):
        return "there is no zero point and no output_dtype, which ONNX reads as uint8 and TensorRT as int8"
    if kind and kind not in SYMMETRIC and not _is_int32_dequantize(view, node) and not _is_scale(view, node):
        return f"the quantized type is {type_name(kind)}"
    return _wrong_zeros(view, node) if tensor else None


def _wrong_zeros(view: View, node: Node) -> str | None:
    tensor = node.input(2)
    values = view.graph.values(tensor)
    if values is None and not view.graph.is_constant(tensor):
        return "the zero point is not constant"
    if values is not None and np.any(values.astype(np.float32) != 0):
        return "the zero point is not zero"
    shapes = view.graph.shape(tensor), view.graph.shape(node.input(1))
    if None not in shapes and shapes[0] != shapes[1]:
        return f"the zero point has shape {_shown(shapes[0])}, the scale {_shown(shapes[1])}"
    return None


def _is_int32_dequantize(view: View, node: Node) -> bool:
    return node.op in DEQUANTIZE and INT32 in (view.graph.dtype(node.input(0)), view.graph.dtype(node.input(2)))


def _is_scale(view: View, node: Node) -> bool:
    """The second level of a block format: a DQ whose result is another one's scale."""
    uses = view.graph.readers(node.output)
    return bool(uses) and all(use.node.op in DEQUANTIZE and use.place == 1 for use in uses)


def _shown(shape: Shape | None) -> str:
    return "unknown" if shape is None else "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def scales(view: View) -> Iterator[Fault]:
    """R02: a scale is constant, positive, a scalar, one number per channel of `axis`, or blocks of the data's rank."""
    for node in view.nodes(*((QUANTIZE | DEQUANTIZE) - DYNAMIC - {"TRT_MXFP8DequantizeLinear"})):
        seen = _wrong_scale(view, node)
        if seen:
            yield Fault(node, node.input(1), seen)


def _wrong_scale(view: View, node: Node) -> str | None:
    tensor = node.input(1)
    if not tensor:
        return "there is no scale"
    if not view.graph.is_constant(tensor):
        return None if _is_dynamic_block_scale(view, tensor) else "the scale is not constant"
    values = view.scale(node)
    if values is not None and not np.all(np.isfinite(values) & (values > 0)):
        return "the scale is not a positive number everywhere"
    shape, data = view.graph.shape(tensor), view.graph.shape(node.input(0))
    return None if shape is None or data is None else _wrong_shape(view, node, shape, data)


def _is_dynamic_block_scale(view: View, tensor: str) -> bool:
    """The scale that a DynamicQuantize made, itself dequantized: how block formats quantize activations."""
    producer = view.graph.producer(tensor)
    if producer is not None and producer.op in DEQUANTIZE:
        producer = view.graph.producer(producer.input(0))
    return producer is not None and producer.op in DYNAMIC


def _wrong_shape(view: View, node: Node, shape: Shape, data: Shape) -> str | None:
    count = 1
    for size in shape:
        count *= size or 0
    if count == 1 and len(shape) <= 1:
        return None
    axis = view.axis(node, len(data))
    if len(shape) not in (1, len(data)):
        return f"the scale has rank {len(shape)}, the data {len(data)}"
    if not 0 <= axis < len(data):
        return f"axis {node.integer('axis', 1)} is outside of data of rank {len(data)}"
    if len(shape) == 1 and not view.block(node):
        wanted: Shape = (data[axis],)
    else:
        block = view.block(node)
        wanted = tuple(
            -(-size // block) if place == axis and block and size is not None else size
            for place, size in enumerate(data)
        )
    if any(want is not None and want != size for want, size in zip(wanted, shape, strict=True)):
        return f"the scale has shape {_shown(shape)}, the data and axis {axis} ask for {_shown(wanted)}"
    return None


def activation_granularity(view: View) -> Iterator[Fault]:
    """R03: Q on a tensor that is not constant has exactly one scale."""
    for node in view.nodes(*(QUANTIZE - DYNAMIC)):
        count = view.size(node.input(1))
        if not view.graph.is_constant(node.input(0)) and count is not None and count > 1:
            yield Fault(node, node.input(0), f"an activation has {count} scales")


def bias_is_float(view: View) -> Iterator[Fault]:
    """R05: no DequantizeLinear on int32; the bias of Conv and Gemm, or added behind MatMul, is float without Q/DQ."""
    for node in view.graph.nodes:
        if _is_int32_dequantize(view, node):
            yield Fault(node, node.input(0), "int32 is dequantized")
        elif node.op in WEIGHTED and _quantized_constant(view, node.input(2)):
            yield Fault(node, node.input(2), "the bias is quantized")
        elif node.op == "Add":
            for bias, data in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
                producer = view.graph.producer(data)
                if producer is not None and producer.op in WEIGHTED and _quantized_constant(view, bias):
                    yield Fault(node, bias, f"the bias behind {producer.op} is quantized")


def _quantized_constant(view: View, tensor: str) -> bool:
    source = view.dequantizer(tensor)
    return source is not None and view.graph.is_constant(tensor) and not _is_int32_dequantize(view, source)


def integer_operators(view: View) -> Iterator[Fault]:
    """R06: no QLinear*, ConvInteger, MatMulInteger, DynamicQuantizeLinear."""
    for node in view.graph.nodes:
        if node.op.startswith(_INTEGER):
            yield Fault(node, node.input(0), f"{node.op} is no operator of TensorRT")


def opsets(view: View) -> Iterator[Fault]:
    """R07: axis from opset 13; fp16 and bf16 scales and fp8 from 19; int4 and blocks from 21; fp4 23; e8m0 24."""
    for node in view.nodes(*STANDARD):
        kind, scale = view.kind(node), view.graph.dtype(node.input(1))
        needs = [
            (13, "axis" in node.attributes, "the attribute axis"),
            (19, scale in (HALF, BFLOAT), f"a {type_name(scale)} scale"),
            (19, kind == FP8, "fp8"),
            (21, kind == INT4, "int4"),
            (21, view.block(node) > 0, "a block size"),
            (23, kind == FP4, "fp4"),
            (24, scale == E8M0, "an e8m0 scale"),
        ]
        missing = [(opset, what) for opset, holds, what in needs if holds and view.graph.opset < opset]
        if missing:
            opset, what = max(missing)
            seen = f"{what} needs opset {opset}, the file has {view.graph.opset}"
            yield Fault(node, node.input(0), seen, way_out=f"Export with opset {opset} or later.")


def float_types(view: View) -> Iterator[Fault]:
    """R08: Q has a scale of its data's type, operands meet in one float type, no Cast stands between DQ and reader."""
    for node in view.graph.nodes:
        if node.op in QUANTIZE - DYNAMIC:
            yield from _scale_type(view, node)
        elif node.op in _MIXING:
            yield from _operand_types(view, node)
        elif node.op == "Cast":
            yield from _cast(view, node)


def _scale_type(view: View, node: Node) -> Iterator[Fault]:
    data, scale = view.graph.dtype(node.input(0)), view.graph.dtype(node.input(1))
    if data in FLOATS and scale in FLOATS and data != scale:
        yield Fault(node, node.input(1), f"the scale is {type_name(scale)}, the data {type_name(data)}")


def _operand_types(view: View, node: Node) -> Iterator[Fault]:
    kinds = {tensor: _float_type(view, tensor) for tensor in node.inputs if tensor}
    known = {kind for kind in kinds.values() if kind in FLOATS}
    dequantized = next((tensor for tensor in kinds if view.dequantizer(tensor)), None)
    if len(known) > 1 and dequantized:
        yield Fault(node, dequantized, f"operands of type {' and '.join(sorted(map(type_name, known)))} meet")


def _float_type(view: View, tensor: str) -> int:
    """ONNX's own inference stops where types disagree, so a dequantized tensor's type is read off its DQ."""
    source = view.dequantizer(tensor)
    if source is None:
        return view.graph.dtype(tensor)
    return source.integer("output_dtype") or view.graph.dtype(source.input(1))


def _cast(view: View, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(node.input(0))
    if source is None or view.kind(source) == FP4 or source.op == "TRT_MXFP8DequantizeLinear":
        return  # NVIDIA's own block format graphs have a Cast there
    readers = view.graph.readers_past(node.output, lambda use: use.node.op in MOVES)
    reader = next((use.node for use in readers if use.node.op in WEIGHTED | {"Add"}), None)
    if reader is not None:
        yield Fault(
            node, node.input(0), f"a Cast stands between DequantizeLinear and {reader.op}", Severity.PERFORMANCE
        )


def float_remainder(view: View) -> Iterator[Fault]:
    """R22: in a strongly typed graph (TensorRT 11: every graph) what is not quantized is fp16 or bf16, not fp32."""
    if view.version < (11, 0) or not any(node.op in QUANTIZE | DEQUANTIZE for node in view.graph.nodes):
        return
    wide = [node for node in view.nodes(*WEIGHTED) if view.graph.dtype(node.output) == FLOAT]
    if wide:
        count = f"{len(wide)} convolutions and matrix products" if len(wide) > 1 else f"a {wide[0].op}"
        yield Fault(wide[0], wide[0].output, f"the float results of {count} are fp32")
