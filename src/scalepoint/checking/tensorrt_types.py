"""Rules on types, scales, zero points, weights and shapes: what TensorRT's parser accepts and has kernels for."""

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto
from onnx_ir import AttributeType, Node

from scalepoint.checking.qdq_graph import (
    BFLOAT,
    COPIES,
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
    PRODUCTS,
    QUANTIZE,
    STANDARD,
    WEIGHTED,
    QdqView,
    Shape,
    Tensor,
    get_integer,
    get_operand,
    get_result,
    last_sizes,
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


def zero_points(view: QdqView) -> Iterator[Fault]:
    """R01: a zero point is all zeros, of type int8, fp8 e4m3, int4 or fp4, shaped like the scale, and present on Q."""
    for node in view.nodes(*STANDARD):
        seen = _wrong_zero_point(view, node)
        if seen:
            yield Fault(node, get_operand(node, 2) or get_operand(node, 0), seen)


def _wrong_zero_point(view: QdqView, node: Node) -> str | None:
    tensor, kind = get_operand(node, 2), view.kind(node)
    if node.op_type == "QuantizeLinear" and not tensor and not get_integer(node, "output_dtype"):
        return "there is no zero point and no output_dtype, which ONNX reads as uint8 and TensorRT as int8"
    if kind and kind not in SYMMETRIC and not _is_int32_dequantize(view, node) and not _is_scale(view, node):
        return f"the quantized type is {type_name(kind)}"
    return _wrong_zeros(view, node) if tensor else None


def _wrong_zeros(view: QdqView, node: Node) -> str | None:
    tensor = get_operand(node, 2)
    values = view.values(tensor)
    if values is None and not view.is_constant(tensor):
        return "the zero point is not constant"
    if values is not None and np.any(values.astype(np.float32) != 0):
        return "the zero point is not zero"
    shapes = view.shape(tensor), view.shape(get_operand(node, 1))
    if None not in shapes and shapes[0] != shapes[1]:
        return f"the zero point has shape {_format_shape(shapes[0])}, the scale {_format_shape(shapes[1])}"
    return None


def _is_int32_dequantize(view: QdqView, node: Node) -> bool:
    return node.op_type in DEQUANTIZE and INT32 in (view.dtype(get_operand(node, 0)), view.dtype(get_operand(node, 2)))


def _is_scale(view: QdqView, node: Node) -> bool:
    """The second level of a block format: a DQ whose result is another one's scale."""
    uses = view.readers(get_result(node))
    return bool(uses) and all(use.node.op_type in DEQUANTIZE and use.place == 1 for use in uses)


def _format_shape(shape: Shape | None) -> str:
    return "unknown" if shape is None else "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def scales(view: QdqView) -> Iterator[Fault]:
    """R02: a scale is constant, positive, a scalar, one number per channel of `axis`, or blocks of the data's rank."""
    for node in view.nodes(*((QUANTIZE | DEQUANTIZE) - DYNAMIC - {"TRT_MXFP8DequantizeLinear"})):
        seen = _wrong_scale(view, node)
        if seen:
            yield Fault(node, get_operand(node, 1), seen)


def _wrong_scale(view: QdqView, node: Node) -> str | None:
    tensor = get_operand(node, 1)
    if not tensor:
        return "there is no scale"
    if not view.is_constant(tensor):
        return None if _is_dynamic_block_scale(view, tensor) else "the scale is not constant"
    values = view.scale(node)
    if values is not None and not np.all(np.isfinite(values) & (values > 0)):
        return "the scale is not a positive number everywhere"
    shape, data = view.shape(tensor), view.shape(get_operand(node, 0))
    return None if shape is None or data is None else _wrong_shape(view, node, shape, data)


def _is_dynamic_block_scale(view: QdqView, tensor: Tensor) -> bool:
    """The scale that a DynamicQuantize made, itself dequantized: how block formats quantize activations."""
    producer = view.producer(tensor)
    if producer is not None and producer.op_type in DEQUANTIZE:
        producer = view.producer(get_operand(producer, 0))
    return producer is not None and producer.op_type in DYNAMIC


def _wrong_shape(view: QdqView, node: Node, shape: Shape, data: Shape) -> str | None:
    count = 1
    for size in shape:
        count *= size or 0
    if count == 1 and len(shape) <= 1:
        return None
    axis = view.axis(node, len(data))
    if len(shape) not in (1, len(data)):
        return f"the scale has rank {len(shape)}, the data {len(data)}"
    if not 0 <= axis < len(data):
        return f"axis {get_integer(node, 'axis', 1)} is outside of data of rank {len(data)}"
    if len(shape) == 1 and not view.block(node):
        wanted: Shape = (data[axis],)
    else:
        block = view.block(node)
        wanted = tuple(
            -(-size // block) if place == axis and block and size is not None else size
            for place, size in enumerate(data)
        )
    if any(want is not None and want != size for want, size in zip(wanted, shape, strict=True)):
        return f"the scale has shape {_format_shape(shape)}, the data and axis {axis} ask for {_format_shape(wanted)}"
    return None


def activation_granularity(view: QdqView) -> Iterator[Fault]:
    """R03: Q on a tensor that is not constant has exactly one scale."""
    for node in view.nodes(*(QUANTIZE - DYNAMIC)):
        count = view.size(get_operand(node, 1))
        if not view.is_constant(get_operand(node, 0)) and count is not None and count > 1:
            yield Fault(node, get_operand(node, 0), f"an activation has {count} scales")


def bias_is_float(view: QdqView) -> Iterator[Fault]:
    """R05: no DequantizeLinear on int32; the bias of Conv and Gemm, or added behind MatMul, is float without Q/DQ."""
    for node in view.graph:
        if _is_int32_dequantize(view, node):
            yield Fault(node, get_operand(node, 0), "int32 is dequantized")
        elif node.op_type in WEIGHTED and _quantized_constant(view, get_operand(node, 2)):
            yield Fault(node, get_operand(node, 2), "the bias is quantized")
        elif node.op_type == "Add":
            for bias, data in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
                producer = view.producer(data)
                if producer is not None and producer.op_type in WEIGHTED and _quantized_constant(view, bias):
                    yield Fault(node, bias, f"the bias behind {producer.op_type} is quantized")


def _quantized_constant(view: QdqView, tensor: Tensor) -> bool:
    source = view.dequantizer(tensor)
    return source is not None and view.is_constant(tensor) and not _is_int32_dequantize(view, source)


def integer_operators(view: QdqView) -> Iterator[Fault]:
    """R06: no QLinear*, ConvInteger, MatMulInteger, DynamicQuantizeLinear."""
    for node in view.graph:
        if node.op_type.startswith(_INTEGER):
            yield Fault(node, get_operand(node, 0), f"{node.op_type} is no operator of TensorRT")


def opsets(view: QdqView) -> Iterator[Fault]:
    """R07: axis from opset 13; fp16 and bf16 scales and fp8 from 19; int4 and blocks from 21; fp4 23; e8m0 24."""
    for node in view.nodes(*STANDARD):
        kind, scale = view.kind(node), view.dtype(get_operand(node, 1))
        needs = [
            (13, "axis" in node.attributes, "the attribute axis"),
            (19, scale in (HALF, BFLOAT), f"a {type_name(scale)} scale"),
            (19, kind == FP8, "fp8"),
            (21, kind == INT4, "int4"),
            (21, view.block(node) > 0, "a block size"),
            (23, kind == FP4, "fp4"),
            (24, scale == E8M0, "an e8m0 scale"),
        ]
        missing = [(opset, what) for opset, holds, what in needs if holds and view.opset < opset]
        if missing:
            opset, what = max(missing)
            seen = f"{what} needs opset {opset}, the file has {view.opset}"
            yield Fault(node, get_operand(node, 0), seen, way_out=f"Export with opset {opset} or later.")


def float_types(view: QdqView) -> Iterator[Fault]:
    """R08: Q has a scale of its data's type, operands meet in one float type, no Cast stands between DQ and reader."""
    for node in view.graph:
        if node.op_type in QUANTIZE - DYNAMIC:
            yield from _scale_type(view, node)
        elif node.op_type in _MIXING:
            yield from _operand_types(view, node)
        elif node.op_type == "Cast":
            yield from _check_cast(view, node)


def _scale_type(view: QdqView, node: Node) -> Iterator[Fault]:
    data, scale = view.dtype(get_operand(node, 0)), view.dtype(get_operand(node, 1))
    if data in FLOATS and scale in FLOATS and data != scale:
        yield Fault(node, get_operand(node, 1), f"the scale is {type_name(scale)}, the data {type_name(data)}")


def _operand_types(view: QdqView, node: Node) -> Iterator[Fault]:
    kinds = {tensor: _float_type(view, tensor) for tensor in node.inputs if tensor}
    known = {kind for kind in kinds.values() if kind in FLOATS}
    dequantized = next((tensor for tensor in kinds if view.dequantizer(tensor)), None)
    if len(known) > 1 and dequantized:
        yield Fault(node, dequantized, f"operands of type {' and '.join(sorted(map(type_name, known)))} meet")


def _float_type(view: QdqView, tensor: Tensor) -> int:
    """ONNX's own inference stops where types disagree, so a dequantized tensor's type is read off its DQ."""
    source = view.dequantizer(tensor)
    if source is None:
        return view.dtype(tensor)
    return get_integer(source, "output_dtype") or view.dtype(get_operand(source, 1))


def _check_cast(view: QdqView, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(get_operand(node, 0))
    if source is None or view.kind(source) == FP4 or source.op_type == "TRT_MXFP8DequantizeLinear":
        return  # NVIDIA's own block format graphs have a Cast there
    readers = view.readers_past(get_result(node), lambda use: use.node.op_type in MOVES)
    reader = next((use.node for use in readers if use.node.op_type in WEIGHTED | {"Add"}), None)
    if reader is not None:
        yield Fault(
            node,
            get_operand(node, 0),
            f"a Cast stands between DequantizeLinear and {reader.op_type}",
            Severity.PERFORMANCE,
        )


def float_remainder(view: QdqView) -> Iterator[Fault]:
    """R22: in a strongly typed graph (TensorRT 11: every graph) what is not quantized is fp16 or bf16, not fp32."""
    if view.version < (11, 0) or not any(node.op_type in QUANTIZE | DEQUANTIZE for node in view.graph):
        return
    wide = [node for node in view.nodes(*WEIGHTED) if view.dtype(get_result(node)) == FLOAT]
    if wide:
        count = f"{len(wide)} convolutions and matrix products" if len(wide) > 1 else f"a {wide[0].op_type}"
        yield Fault(wide[0], get_result(wide[0]), f"the float results of {count} are fp32")


_INT4_BLOCKS = (64, 128)
_FP4_BLOCK, _MX_BLOCK = 16, 32
_TRANSPOSED_AXIS_0 = ((8, 4), (8, 6)), ((10, 0), (10, 1))  # ConvTranspose: NVIDIA's toolkit used axis 0 in these


def weight_axis(view: QdqView) -> Iterator[Fault]:
    """R04: weights have a scale per output channel: Conv axis 0, ConvTranspose 1 (0 in 10.0), products by layout."""
    for node in view.nodes(*WEIGHTED):
        place = view.weight(node)
        source = view.dequantizer(get_operand(node, place)) if place is not None else None
        if place is None or source is None or view.block(source):
            continue
        shape, count = view.shape(get_operand(source, 0)), view.size(get_operand(source, 1))
        wanted = _output_axis(view, node, place)
        if shape is None or count is None or wanted is None:
            continue
        axis = _axis_at(view, get_operand(node, place), source, len(shape))
        if count == 1:
            yield from _check_weight_scale(view, node, place, wanted)
        elif axis is not None and axis != wanted:
            yield Fault(
                source, get_operand(source, 1), f"{node.op_type} has weight scales along axis {axis}, not {wanted}"
            )


def _check_weight_scale(view: QdqView, node: Node, place: int, wanted: int) -> Iterator[Fault]:
    shape = view.shape(get_operand(node, place))
    if node.op_type != "ConvTranspose" and shape is not None and wanted < len(shape) and shape[wanted] != 1:
        seen = f"the weight of {node.op_type} has one scale for all {shape[wanted]} output channels"
        yield Fault(node, get_operand(node, place), seen, Severity.ACCURACY)


def _output_axis(view: QdqView, node: Node, place: int) -> int | None:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 0 if any(first <= view.version <= last for first, last in _TRANSPOSED_AXIS_0) else 1
    shape = view.shape(get_operand(node, place))
    if shape is None or len(shape) != 2:
        return None
    if node.op_type == "Gemm":
        return 0 if get_integer(node, "transB") else 1
    return 1 if place == 1 else 0


def _axis_at(view: QdqView, tensor: Tensor, source: Node, rank: int) -> int | None:
    """Where the scale's axis is when the operation reads it: a Transpose moves it; None if it cannot be followed."""
    path: list[Node] = []
    while (node := view.producer(tensor)) is not None and node is not source:
        path.append(node)
        tensor = get_operand(node, 0)
    axis = view.axis(source, rank)
    for node in reversed(path):
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            order = list(perm.value) if perm is not None and perm.type == AttributeType.INTS else []
            order = order or list(range(rank))[::-1]
            axis = order.index(axis) if axis in order else -1
        elif node.op_type != "Identity":
            return None
    return axis if 0 <= axis < rank else None  # outside: rule R02 speaks of it


def stored_weights(view: QdqView) -> Iterator[Fault]:
    """R26: the weight before Q is stored in the file, not computed there, such as by Mul with a batch norm's factor."""
    for node in view.nodes(*QUANTIZE):
        tensor = view.source(get_operand(node, 0), COPIES | {"Cast"})
        maker = view.producer(tensor)
        if view.is_constant(tensor) and maker is not None and maker.op_type not in (*DEQUANTIZE, "Constant"):
            yield Fault(node, get_operand(node, 0), f"the weight before {node.op_type} is computed by {maker.op_type}")


def block_formats(view: QdqView) -> Iterator[Fault]:
    """R23: int4 on constants in blocks of 64 or 128; fp4 in blocks of 16 with two DQ; mxfp8 with TensorRT's own DQ."""
    for node in view.nodes(*(QUANTIZE | DEQUANTIZE)):
        kind = view.kind(node)
        if node.op_type == "TRT_MXFP8DequantizeLinear":
            seen = _indivisible(view, node, _MX_BLOCK)
        elif view.dtype(get_operand(node, 1)) == E8M0 and view.opset >= 24:
            seen = "an e8m0 scale on a standard Q/DQ node"
        elif kind == INT4:
            seen = _wrong_int4(view, node)
        elif kind == FP4:
            seen = _wrong_fp4(view, node)
        else:
            continue
        if seen:
            yield Fault(node, get_operand(node, 0), seen)


def _wrong_int4(view: QdqView, node: Node) -> str | None:
    shape = view.shape(get_operand(node, 0))
    if not view.is_constant(get_operand(node, 0)):
        return "int4 on an activation"
    if view.block(node) not in _INT4_BLOCKS:
        return f"int4 with blocks of {view.block(node)}" if view.block(node) else "int4 without blocks"
    if shape and shape[-1] is not None and shape[-1] % 2:
        return f"int4 with an odd last size, {shape[-1]}"
    if shape and view.axis(node, len(shape)) < len(shape) - 2:
        return f"int4 with blocks along axis {view.axis(node, len(shape))} of {len(shape)}"
    return None


def _wrong_fp4(view: QdqView, node: Node) -> str | None:
    if node.op_type == "TRT_FP4DynamicQuantize":
        return _indivisible(view, node, _FP4_BLOCK)
    if node.op_type in QUANTIZE:
        return None if view.is_constant(get_operand(node, 0)) else "an activation becomes fp4 by QuantizeLinear"
    if view.block(node) != _FP4_BLOCK:
        return f"fp4 with blocks of {view.block(node)}" if view.block(node) else "fp4 without blocks"
    scale = view.producer(get_operand(node, 1))
    if scale is None or scale.op_type not in DEQUANTIZE or view.kind(scale) != FP8:
        return "an fp4 scale that is not itself e4m3 behind a DequantizeLinear"
    return _indivisible(view, node, _FP4_BLOCK)


def _indivisible(view: QdqView, node: Node, block: int) -> str | None:
    shape = view.shape(get_operand(node, 0))
    axis = get_integer(node, "axis", -1)
    size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
    return f"blocks of {block} do not divide {size} values" if size is not None and size % block else None


_MIN_INT8_SIZE = 16
_FP8_KERNEL = 32


def small_products(view: QdqView) -> Iterator[Fault]:
    """R16: no Q/DQ on a product with M or N = 1 (constant weight: only if the output is 2-D), K < 16 or N < 16."""
    for node in view.nodes(*PRODUCTS):
        if not view.is_quantized(node):
            continue
        m, k, n = _product_sizes(view, node)
        rank = len(view.shape(get_result(node)) or ())
        counts = rank == 2 or view.weight(node) is None
        if counts and 1 in (m, n):
            yield Fault(
                node, get_result(node), f"a {node.op_type} with {m if m else '?'} x {n if n else '?'} results is a GEMV"
            )
        elif any(size is not None and size < _MIN_INT8_SIZE for size in (k, n)):
            yield Fault(node, get_result(node), f"a {node.op_type} with K = {k} and N = {n} has no tensor core kernel")


def _product_sizes(view: QdqView, node: Node) -> tuple[int | None, int | None, int | None]:
    """M, K, N; None where a size is not known."""
    left, right = (last_sizes(view.shape(get_operand(node, place)), 2) for place in (0, 1))
    if node.op_type == "Gemm":
        left = left[::-1] if get_integer(node, "transA") else left
        right = right[::-1] if get_integer(node, "transB") else right
    return left[0], left[1] if left[1] is not None else right[0], right[1]


def small_convolutions(view: QdqView) -> Iterator[Fault]:
    """R17: the convolutions with few channels, odd kernels or groups that have no int8 or fp8 kernel stay float."""
    for node in view.nodes("Conv"):
        source = view.data_dequantizer(node)
        if source is None:
            continue
        weight = get_operand(node, 1)
        shape = view.shape(weight)
        if not view.is_constant(weight):
            yield Fault(node, weight, "the weight of a quantized Conv is not constant")
        elif shape is not None and len(shape) > 2:
            groups = get_integer(node, "group", 1)
            if not (_fits_fp8(shape, groups) if view.is_fp8(source) else _fits_int8(view, node, shape, groups)):
                kernel = "x".join(map(str, shape[2:]))
                seen = f"a {kernel} Conv of {shape[1]} to {shape[0]} channels in {groups} groups has no fast kernel"
                yield Fault(node, weight, seen)


def _fits_int8(view: QdqView, node: Node, shape: Shape, groups: int) -> bool:
    out, per_group, *kernel = (size or 0 for size in shape)
    if min(out, per_group) >= _MIN_INT8_SIZE:
        return True
    if groups > 1:
        return out % 8 == 0 and min(kernel) >= 3
    is_first = view.source(view.origin(get_operand(node, 0))[0]) in view.inputs
    wide = is_first or max(out, per_group) >= _MIN_INT8_SIZE
    return (out % 8 == 0 or per_group % 8 == 0) and wide and len(set(kernel)) == 1


def _fits_fp8(shape: Shape, groups: int) -> bool:
    out, per_group, *kernel = (size or 0 for size in shape)
    count = 1
    for size in kernel:
        count *= size
    return groups == 1 and min(out, per_group) > _MIN_INT8_SIZE and count <= _FP8_KERNEL
