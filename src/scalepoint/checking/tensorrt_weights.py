"""Rules on weights and shapes: which of them TensorRT has kernels for.

R04  axis of the weight scales    R16  small products             R26  weights are stored, not computed
R23  int4, fp4 and mxfp8          R17  small convolutions
"""

from collections.abc import Iterator
from math import prod

from onnx_ir import AttributeType, Node

from scalepoint.checking.qdq_graph import (
    COPIES,
    DEQUANTIZE,
    E8M0,
    FP4,
    FP8,
    INT4,
    PRODUCTS,
    QUANTIZE,
    WEIGHTED,
    QdqView,
    Tensor,
    TensorShape,
    get_int_attribute,
    get_operand,
    get_result,
    last_sizes,
)
from scalepoint.checking.rule import Fault, Severity

# Version ranges in which NVIDIA's toolkit used axis 0 for ConvTranspose
_TRANSPOSED_AXIS_0 = ((8, 4), (8, 6)), ((10, 0), (10, 1))
_MIN_INT8_SIZE = 16  # channels of a convolution; K and N of a product
_MAX_FP8_KERNEL = 32  # weights per pair of input and output channel
_INT4_BLOCK_SIZES = (64, 128)
_FP4_BLOCK_SIZE, _MX_BLOCK_SIZE = 16, 32


def check_weight_axis(view: QdqView) -> Iterator[Fault]:
    """R04: weights have a scale per output channel: Conv axis 0, ConvTranspose 1 (0 in 10.0), products by layout."""
    for node in view.nodes(*WEIGHTED):
        index = view.weight_index(node)
        source = view.dequantizer(get_operand(node, index)) if index is not None else None
        if index is None or source is None or view.block_size(source):
            continue
        shape, count = view.shape(get_operand(source, 0)), view.element_count(get_operand(source, 1))
        expected = _output_axis(view, node, index)
        if shape is None or count is None or expected is None:
            continue
        axis = _axis_after_transposes(view, get_operand(node, index), source, len(shape))
        if count == 1:
            yield from _check_single_scale(view, node, index, expected)
        elif axis is not None and axis != expected:
            description = f"{node.op_type} has weight scales along axis {axis}, not {expected}"
            yield Fault(source, get_operand(source, 1), description)


def _check_single_scale(view: QdqView, node: Node, index: int, channel_axis: int) -> Iterator[Fault]:
    shape = view.shape(get_operand(node, index))
    if node.op_type == "ConvTranspose" or shape is None or channel_axis >= len(shape):
        return
    if shape[channel_axis] != 1:
        description = f"the weight of {node.op_type} has one scale for all {shape[channel_axis]} output channels"
        yield Fault(node, get_operand(node, index), description, Severity.ACCURACY)


def _output_axis(view: QdqView, node: Node, index: int) -> int | None:
    """Return the axis of the output channels in a weight; None if its rank is unknown or not 2."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 0 if any(first <= view.version <= last for first, last in _TRANSPOSED_AXIS_0) else 1
    shape = view.shape(get_operand(node, index))
    if shape is None or len(shape) != 2:
        return None
    if node.op_type == "Gemm":
        return 0 if get_int_attribute(node, "transB") else 1
    return 1 if index == 1 else 0


def _axis_after_transposes(view: QdqView, tensor: Tensor, source: Node, rank: int) -> int | None:
    """Return the axis of the scale as the operation reads the weight, after Transposes; None if it is unknown."""
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
    return axis if 0 <= axis < rank else None  # R02 reports an axis that is out of range


def check_small_products(view: QdqView) -> Iterator[Fault]:
    """R16: no Q/DQ on a product with M or N = 1 (constant weight: only if the output is 2-D), K < 16 or N < 16."""
    for node in view.nodes(*PRODUCTS):
        if not view.is_quantized(node):
            continue
        m, k, n = _product_sizes(view, node)
        rank = len(view.shape(get_result(node)) or ())
        is_gemv_slow = rank == 2 or view.weight_index(node) is None
        if is_gemv_slow and 1 in (m, n):
            description = f"a {node.op_type} with {m if m else '?'} x {n if n else '?'} results is a GEMV"
            yield Fault(node, get_result(node), description)
        elif any(size is not None and size < _MIN_INT8_SIZE for size in (k, n)):
            yield Fault(node, get_result(node), f"a {node.op_type} with K = {k} and N = {n} has no tensor core kernel")


def _product_sizes(view: QdqView, node: Node) -> tuple[int | None, int | None, int | None]:
    """Return M, K and N; None for an unknown size."""
    left, right = (last_sizes(view.shape(get_operand(node, index)), 2) for index in (0, 1))
    if node.op_type == "Gemm":
        left = left[::-1] if get_int_attribute(node, "transA") else left
        right = right[::-1] if get_int_attribute(node, "transB") else right
    k = left[1] if left[1] is not None else right[0]  # the common size, if one of the shapes is known
    return left[0], k, right[1]


def check_small_convolutions(view: QdqView) -> Iterator[Fault]:
    """R17: a convolution is float if its channels, kernel size or groups have no int8 or fp8 kernel."""
    for node in view.nodes("Conv"):
        source = view.data_dequantizer(node)
        if source is None:
            continue
        weight = get_operand(node, 1)
        shape = view.shape(weight)
        if not view.is_constant(weight):
            yield Fault(node, weight, "the weight of a quantized Conv is not constant")
        elif shape is not None and len(shape) > 2:
            groups = get_int_attribute(node, "group", 1)
            is_fp8 = view.is_fp8(source)
            has_kernel = _has_fp8_kernel(shape, groups) if is_fp8 else _has_int8_kernel(view, node, shape, groups)
            if not has_kernel:
                kernel = "x".join(map(str, shape[2:]))
                description = (
                    f"a {kernel} Conv of {shape[1]} to {shape[0]} channels in {groups} groups has no fast kernel"
                )
                yield Fault(node, weight, description)


def _has_int8_kernel(view: QdqView, node: Node, shape: TensorShape, groups: int) -> bool:
    out_channels, in_per_group, *kernel = (size or 0 for size in shape)
    if min(out_channels, in_per_group) >= _MIN_INT8_SIZE:
        return True
    if groups > 1:
        return out_channels % 8 == 0 and min(kernel) >= 3
    is_first = view.skip_back(view.before_pairs(get_operand(node, 0)).tensor) in view.inputs
    is_large = is_first or max(out_channels, in_per_group) >= _MIN_INT8_SIZE
    return (out_channels % 8 == 0 or in_per_group % 8 == 0) and is_large and len(set(kernel)) == 1


def _has_fp8_kernel(shape: TensorShape, groups: int) -> bool:
    out_channels, in_per_group, *kernel = (size or 0 for size in shape)
    if groups != 1 or min(out_channels, in_per_group) <= _MIN_INT8_SIZE:
        return False
    return prod(kernel) <= _MAX_FP8_KERNEL


def check_block_formats(view: QdqView) -> Iterator[Fault]:
    """R23: int4 on constants in blocks of 64 or 128; fp4 in blocks of 16 with two DQ; mxfp8 with TensorRT's own DQ."""
    for node in view.nodes(*(QUANTIZE | DEQUANTIZE)):
        dtype = view.quantized_dtype(node)
        if node.op_type == "TRT_MXFP8DequantizeLinear":
            description = _describe_indivisible(view, node, _MX_BLOCK_SIZE)
        elif view.dtype(get_operand(node, 1)) == E8M0 and view.opset >= 24:
            description = "an e8m0 scale on a standard Q/DQ node"
        elif dtype == INT4:
            description = _describe_wrong_int4(view, node)
        elif dtype == FP4:
            description = _describe_wrong_fp4(view, node)
        else:
            continue
        if description:
            yield Fault(node, get_operand(node, 0), description)


def _describe_wrong_int4(view: QdqView, node: Node) -> str | None:
    shape = view.shape(get_operand(node, 0))
    if not view.is_constant(get_operand(node, 0)):
        return "int4 on an activation"
    if view.block_size(node) not in _INT4_BLOCK_SIZES:
        return f"int4 with blocks of {view.block_size(node)}" if view.block_size(node) else "int4 without blocks"
    if shape and shape[-1] is not None and shape[-1] % 2:
        return f"int4 with an odd last size, {shape[-1]}"
    if shape and view.axis(node, len(shape)) < len(shape) - 2:
        return f"int4 with blocks along axis {view.axis(node, len(shape))} of {len(shape)}"
    return None


def _describe_wrong_fp4(view: QdqView, node: Node) -> str | None:
    if node.op_type == "TRT_FP4DynamicQuantize":
        return _describe_indivisible(view, node, _FP4_BLOCK_SIZE)
    if node.op_type in QUANTIZE:
        return None if view.is_constant(get_operand(node, 0)) else "an activation is quantized to fp4 by QuantizeLinear"
    if view.block_size(node) != _FP4_BLOCK_SIZE:
        return f"fp4 with blocks of {view.block_size(node)}" if view.block_size(node) else "fp4 without blocks"
    scale = view.producer(get_operand(node, 1))
    if scale is None or scale.op_type not in DEQUANTIZE or view.quantized_dtype(scale) != FP8:
        return "an fp4 scale that is not e4m3 followed by a DequantizeLinear"
    return _describe_indivisible(view, node, _FP4_BLOCK_SIZE)


def _describe_indivisible(view: QdqView, node: Node, block_size: int) -> str | None:
    """Say so if blocks do not divide the size of their axis."""
    shape = view.shape(get_operand(node, 0))
    axis = get_int_attribute(node, "axis", -1)
    size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
    return f"blocks of {block_size} do not divide {size} values" if size is not None and size % block_size else None


def check_stored_weights(view: QdqView) -> Iterator[Fault]:
    """R26: the weight before Q is stored in the file, not computed there, such as by Mul with a batch norm's factor."""
    for node in view.nodes(*QUANTIZE):
        tensor = view.skip_back(get_operand(node, 0), COPIES | {"Cast"})
        producer = view.producer(tensor)
        if view.is_constant(tensor) and producer is not None and producer.op_type not in (*DEQUANTIZE, "Constant"):
            description = f"the weight before {node.op_type} is computed by {producer.op_type}"
            yield Fault(node, get_operand(node, 0), description)
