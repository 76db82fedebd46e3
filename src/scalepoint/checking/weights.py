"""Rules on weights: the axis of their scales, and the block formats."""

from collections.abc import Iterator

from scalepoint.checking.graph import COPIES, Node
from scalepoint.checking.qdq import DEQUANTIZE, E8M0, FP4, FP8, INT4, QUANTIZE, WEIGHTED, View
from scalepoint.checking.rule import Fault, Severity

_INT4_BLOCKS = (64, 128)
_FP4_BLOCK, _MX_BLOCK = 16, 32
_TRANSPOSED_AXIS_0 = ((8, 4), (8, 6)), ((10, 0), (10, 1))  # ConvTranspose: NVIDIA's toolkit used axis 0 in these


def weight_axis(view: View) -> Iterator[Fault]:
    """R04: weights have a scale per output channel: Conv axis 0, ConvTranspose 1 (0 in 10.0), products by layout."""
    for node in view.nodes(*WEIGHTED):
        place = view.weight(node)
        source = view.dequantizer(node.input(place)) if place is not None else None
        if place is None or source is None or view.block(source):
            continue
        shape, count = view.graph.shape(source.input(0)), view.size(source.input(1))
        wanted = _output_axis(view, node, place)
        if shape is None or count is None or wanted is None:
            continue
        axis = _axis_at(view, node.input(place), source, len(shape))
        if count == 1:
            yield from _one_scale(view, node, place, wanted)
        elif axis is not None and axis != wanted:
            yield Fault(source, source.input(1), f"{node.op} has weight scales along axis {axis}, not {wanted}")


def _one_scale(view: View, node: Node, place: int, wanted: int) -> Iterator[Fault]:
    shape = view.graph.shape(node.input(place))
    if node.op != "ConvTranspose" and shape is not None and wanted < len(shape) and shape[wanted] != 1:
        seen = f"the weight of {node.op} has one scale for all {shape[wanted]} output channels"
        yield Fault(node, node.input(place), seen, Severity.ACCURACY)


def _output_axis(view: View, node: Node, place: int) -> int | None:
    if node.op == "Conv":
        return 0
    if node.op == "ConvTranspose":
        return 0 if any(first <= view.version <= last for first, last in _TRANSPOSED_AXIS_0) else 1
    shape = view.graph.shape(node.input(place))
    if shape is None or len(shape) != 2:
        return None
    if node.op == "Gemm":
        return 0 if node.integer("transB") else 1
    return 1 if place == 1 else 0


def _axis_at(view: View, tensor: str, source: Node, rank: int) -> int | None:
    """Where the scale's axis is when the operation reads it: a Transpose moves it; None if it cannot be followed."""
    path: list[Node] = []
    while (node := view.graph.producer(tensor)) is not None and node is not source:
        path.append(node)
        tensor = node.input(0)
    axis = view.axis(source, rank)
    for node in reversed(path):
        if node.op == "Transpose":
            given = node.attributes.get("perm")
            order = given if isinstance(given, list) and given else list(range(rank))[::-1]
            axis = order.index(axis) if axis in order else -1
        elif node.op != "Identity":
            return None
    return axis if 0 <= axis < rank else None  # outside: rule R02 speaks of it


def stored_weights(view: View) -> Iterator[Fault]:
    """R26: the weight before Q is stored in the file, not computed there, such as by Mul with a batch norm's factor."""
    for node in view.nodes(*QUANTIZE):
        tensor = view.graph.source(node.input(0), COPIES | {"Cast"})
        maker = view.graph.producer(tensor)
        if view.graph.is_constant(tensor) and maker is not None and maker.op not in (*DEQUANTIZE, "Constant"):
            yield Fault(node, node.input(0), f"the weight before {node.op} is computed by {maker.op}")


def block_formats(view: View) -> Iterator[Fault]:
    """R23: int4 on constants in blocks of 64 or 128; fp4 in blocks of 16 with two DQ; mxfp8 with TensorRT's own DQ."""
    for node in view.nodes(*(QUANTIZE | DEQUANTIZE)):
        kind = view.kind(node)
        if node.op == "TRT_MXFP8DequantizeLinear":
            seen = _indivisible(view, node, _MX_BLOCK)
        elif view.graph.dtype(node.input(1)) == E8M0 and view.graph.opset >= 24:
            seen = "an e8m0 scale on a standard Q/DQ node"
        elif kind == INT4:
            seen = _wrong_int4(view, node)
        elif kind == FP4:
            seen = _wrong_fp4(view, node)
        else:
            continue
        if seen:
            yield Fault(node, node.input(0), seen)


def _wrong_int4(view: View, node: Node) -> str | None:
    shape = view.graph.shape(node.input(0))
    if not view.graph.is_constant(node.input(0)):
        return "int4 on an activation"
    if view.block(node) not in _INT4_BLOCKS:
        return f"int4 with blocks of {view.block(node)}" if view.block(node) else "int4 without blocks"
    if shape and shape[-1] is not None and shape[-1] % 2:
        return f"int4 with an odd last size, {shape[-1]}"
    if shape and view.axis(node, len(shape)) < len(shape) - 2:
        return f"int4 with blocks along axis {view.axis(node, len(shape))} of {len(shape)}"
    return None


def _wrong_fp4(view: View, node: Node) -> str | None:
    if node.op == "TRT_FP4DynamicQuantize":
        return _indivisible(view, node, _FP4_BLOCK)
    if node.op in QUANTIZE:
        return None if view.graph.is_constant(node.input(0)) else "an activation becomes fp4 by QuantizeLinear"
    if view.block(node) != _FP4_BLOCK:
        return f"fp4 with blocks of {view.block(node)}" if view.block(node) else "fp4 without blocks"
    scale = view.graph.producer(node.input(1))
    if scale is None or scale.op not in DEQUANTIZE or view.kind(scale) != FP8:
        return "an fp4 scale that is not itself e4m3 behind a DequantizeLinear"
    return _indivisible(view, node, _FP4_BLOCK)


def _indivisible(view: View, node: Node, block: int) -> str | None:
    shape = view.graph.shape(node.input(0))
    axis = node.integer("axis", -1)
    size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
    return f"blocks of {block} do not divide {size} values" if size is not None and size % block else None
