"""Moves quantizers before zero padding and nearest upsampling, so that codes are padded and upsampled.

    Pad -> QuantizeLinear       ->    QuantizeLinear -> Pad with the zero point
    Resize -> QuantizeLinear    ->    QuantizeLinear -> Transpose -> columns twice -> rows twice -> Transpose

Upsampling is written as copies, with channels last. Repeating an element next to itself is a Concat of a tensor with
itself, one axis further inside:

    (n, h, w, c)  -- Concat on c -->  (n, h, w, 2c) = (n, h, 2w, c)
    (n, h, 2wc)   -- Concat      -->  (n, h, 2 * 2wc) = (n, 2h, 2w, c)

ONNX Runtime runs int8 convolutions with channels last, so the transposes around the copies cancel with its own. Its
kernel for Resize takes ten times as long in that layout.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.formats.onnx.graph_edits import add_constant, find_producer, insert_before, pads_with_zeros

TO_CHANNELS_LAST, TO_CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def quantizers_before_moves(model: Any) -> None:
    """Move the quantizers that alone read a Pad with zeros or a nearest Resize before it. The last one goes first."""
    graph = model.graph
    for node in reversed(list(graph)):
        quantizers = _find_equal_quantizers(node)
        if not quantizers:
            continue
        factors = _find_factors(node) if node.op_type == "Resize" else None
        if factors is not None:
            moved = _insert_copies(graph, node, _find_or_insert_codes(graph, node, quantizers[0]), factors)
        elif node.op_type == "Pad" and pads_with_zeros(node) and not any(map(_feeds_convolution, quantizers)):
            codes, zero_point = _find_or_insert_codes(graph, node, quantizers[0]), quantizers[0].inputs[2]
            pad = ir.node("Pad", [codes, node.inputs[1], zero_point])
            moved = insert_before(node, pad, node.outputs[0].shape, codes.type)
        else:
            continue
        for quantize in quantizers:
            ir.convenience.replace_all_uses_with(quantize.outputs[0], moved)
            graph.remove(quantize, safe=True)
        graph.remove(node, safe=True)


def _find_equal_quantizers(node: Any) -> list[Any]:
    """Return the readers of a node's only output, if all of them are quantizers with the same parameters; else []."""
    readers = [use.node for use in node.outputs[0].uses()]
    if len(node.outputs) > 1 or node.outputs[0].is_graph_output():
        return []
    are_equal = all(
        reader.op_type == "QuantizeLinear" and _has_equal_parameters(reader, readers[0]) for reader in readers
    )
    return readers if are_equal else []


def _feeds_convolution(quantize: Any) -> bool:
    """Whether a convolution reads the quantized tensor. It pads by itself (passes.fold_pads)."""
    dequantizers = [use.node for use in quantize.outputs[0].uses()]
    return any(use.node.op_type == "Conv" for node in dequantizers for use in node.outputs[0].uses())


def _find_factors(resize: Any) -> tuple[int, int] | None:
    """Return by how much a nearest Resize repeats rows and columns; None if it does anything else."""
    attributes = resize.attributes
    is_nearest = attributes.get_string("mode", "nearest") == "nearest" and "axes" not in attributes
    rounds_down = attributes.get_string("nearest_mode") == "floor"
    if not (is_nearest and rounds_down and attributes.get_string("coordinate_transformation_mode") == "asymmetric"):
        return None
    before, after = resize.inputs[0].shape, resize.outputs[0].shape
    if before is None or after is None or len(before) != 4 or before[:2] != after[:2]:
        return None
    sizes = [*before[1:], *after[2:]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    _, height, width, new_height, new_width = sizes
    is_whole = new_height % height == 0 and new_width % width == 0
    return (new_height // height, new_width // width) if is_whole else None


def _has_equal_parameters(first: Any, second: Any) -> bool:
    """Whether two nodes quantize or dequantize with the same scale and zero point, one for the whole tensor."""
    if len(first.inputs) != len(second.inputs):
        return False
    return all(map(_is_same_number, first.inputs[1:], second.inputs[1:]))


def _is_same_number(first: Any, second: Any) -> bool:
    if first.const_value is None or second.const_value is None or first.const_value.size != 1:
        return False
    return first.dtype == second.dtype and np.array_equal(first.const_value.numpy(), second.const_value.numpy())


def _find_or_insert_codes(graph: Any, node: Any, quantize: Any) -> Any:
    """Return the first input of a node in the codes of a quantizer."""
    dequantize = find_producer(node.inputs[0], "DequantizeLinear")
    if dequantize is not None and _has_equal_parameters(dequantize, quantize):
        return dequantize.inputs[0]
    before = ir.node("QuantizeLinear", [node.inputs[0], *quantize.inputs[1:]])
    before.outputs[0].shape, before.outputs[0].type = node.inputs[0].shape, quantize.outputs[0].type
    before.metadata_props.update(quantize.metadata_props)
    graph.insert_before(node, before)
    return before.outputs[0]


def _insert_copies(graph: Any, resize: Any, codes: Any, factors: tuple[int, int]) -> Any:
    """Insert the copies before a Resize and return their result."""
    channels, height, width = (int(size) for size in resize.inputs[0].shape[1:])
    rows, columns = factors
    nodes: list[Any] = []

    def add(operator: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        node = ir.node(operator, inputs, attributes)
        node.outputs[0].type = codes.type
        node.metadata_props.update(resize.metadata_props)
        nodes.append(node)
        return node.outputs[0]

    def reshape(value: Any, *sizes: int) -> Any:
        shape = (-1, *sizes)
        name = "sizes." + ".".join(map(str, shape))
        return add("Reshape", [value, add_constant(graph, name, np.array(shape, np.int64))], {})

    value = add("Transpose", [codes], {"perm": TO_CHANNELS_LAST})
    value = add("Concat", [value] * columns, {"axis": 3})
    value = reshape(value, height, columns * width * channels)
    value = add("Concat", [value] * rows, {"axis": 2})
    value = reshape(value, rows * height, columns * width, channels)
    value = add("Transpose", [value], {"perm": TO_CHANNELS_FIRST})
    value.shape = resize.outputs[0].shape
    graph.insert_before(resize, nodes)
    return value
