"""Rewrites an ONNX graph into equivalent forms that the compiler of a target handles better.

rewrite                  from                                        to
sum_before_layer_norm    Add -> LayerNormalization                   Sum -> LayerNormalization
activations_of_codes     SiLU or GELU of a DequantizeLinear          one operator (activations.py)
gelu_halved_last         x * (0.5 * (1 + erf(..)))                   (x * (1 + erf(..))) * 0.5 (activations.py)
exp_activations          Mish, Elu                                   operations with Exp (activations.py)
quantizers_before_moves  Pad or nearest Resize -> QuantizeLinear     QuantizeLinear -> Pad or copies (its own module)
narrow_weights_as_int8   int4 codes -> DequantizeLinear              int4 codes -> Cast -> DequantizeLinear
unpack_when_loaded       DequantizeLinear of OnnxUnpackedWeight      Cast -> Mul, which a runtime folds on load
float_weights_stay       DequantizeLinear -> product by floats       the same with one scale per channel
keep_pools_apart         MaxPool of floats -> QuantizeLinear         MaxPool -> Max of one tensor -> QuantizeLinear
quantizers_before_pools  MaxPool -> Q/DQ                             Q/DQ -> MaxPool
softmax_in_float         Softmax -> QuantizeLinear                   Softmax -> Max of one tensor -> QuantizeLinear
keep_concats_apart       Concat of tokens -> QuantizeLinear -> MatMul  Concat -> Max(x, x) -> QuantizeLinear -> MatMul
linears_as_convolutions  MatMul of codes                             1x1 Conv (linear_as_conv.py)
explicit_zero_states     GRU(x) with a free batch                    GRU(x, initial state = ConstantOfShape)
softmax_of_finite        Softmax -> IsNaN -> Where(.., 0, ..)        Softmax (softmax_of_finite.py)
bias_for_several_readers  Conv without a bias, with several readers  Conv with a bias of 1e-30

A target lists the rewrites that it needs, with reasons. Results are equal bit by bit; those of convolutions and
activations are equal up to roundings of float32.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.errors import ExportError, did_you_mean
from scalepoint.formats.onnx.activations import activations_of_codes, exp_activations, gelu_halved_last
from scalepoint.formats.onnx.graph_edits import add_constant, find_producer, has_blocks, insert_before, replace_node
from scalepoint.formats.onnx.linear_as_conv import write_linears_as_convolutions
from scalepoint.formats.onnx.quantizers_before_moves import quantizers_before_moves
from scalepoint.formats.onnx.shape_arithmetic import explicit_zero_states
from scalepoint.formats.onnx.softmax_of_finite import softmax_of_finite
from scalepoint.targets.target import RewriteRule

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
NARROW_TYPES = (ir.DataType.INT4, ir.DataType.INT2)
MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze")  # these only move values
NO_BIAS = 1e-30  # too small to change a result; OpenVINO removes a bias of 0


def apply_rewrites(model: Any, rules: Iterable[RewriteRule]) -> None:
    """Apply the rewrites of a target to the graph, in place."""
    for rule in rules:
        if rule.name not in REWRITES:
            raise ExportError(f"unknown rewrite {rule.name!r} for ONNX files: {did_you_mean(rule.name, REWRITES)}")
        REWRITES[rule.name](model)


def sum_before_layer_norm(model: Any) -> None:
    """Replace the Add of two tensors that a layer norm reads, a residual or an embedding, by Sum."""
    for norm in model.graph:
        add = find_producer(norm.inputs[0], "Add") if norm.op_type == "LayerNormalization" else None
        if add is not None and add.domain == "":
            add.op_type = "Sum"


def narrow_weights_as_int8(model: Any) -> None:
    """Cast codes of fewer than 8 bits to int8 before integer kernels.

    Weights in blocks, and those next to float activations, have special kernels for narrow codes and stay unchanged.
    """
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or not (_is_narrow(node.inputs[0]) and _feeds_integer_products(node)):
            continue
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            # The zero point has the dtype of the codes: skip its Cast to fewer bits too.
            node.replace_input_with(2, node.inputs[2].producer().inputs[0])
        codes, int8 = node.inputs[0], ir.DataType.INT8
        cast = ir.node("Cast", [codes], {"to": int8})
        wide = insert_before(node, cast, codes.shape, ir.TensorType(int8), f"{codes.name}.int8")
        node.replace_input_with(0, wide)


def _is_narrow(value: Any) -> bool:
    """Whether a value has int4 or int2 codes: they are still int8 followed by a Cast, which fold_casts merges later."""
    cast = find_producer(value, "Cast")
    return cast is not None and cast.attributes.get_int("to") in NARROW_TYPES


def _feeds_integer_products(dequantize: Any) -> bool:
    """Whether every product that reads the weight also reads quantized activations."""
    if has_blocks(dequantize):
        return False
    readers = _readers_through_moves(dequantize)
    return bool(readers) and all(map(_reads_integers, readers))


def _reads_integers(product: Any) -> bool:
    return product.op_type in PRODUCTS and _comes_from_codes(product.inputs[0], MOVES)


def _comes_from_codes(value: Any, skipped_operators: Collection[str]) -> bool:
    """Whether a value is the result of a DequantizeLinear, directly or through these operators."""
    source = value.producer()
    while source is not None and source.op_type in skipped_operators:
        source = source.inputs[0].producer()
    return source is not None and source.op_type == "DequantizeLinear"


def _readers_through_moves(node: Any) -> list[Any]:
    """Return the readers of a node's result; a reader that only moves values is replaced by its own readers."""
    result: list[Any] = []
    for use in node.outputs[0].uses():
        result += _readers_through_moves(use.node) if use.node.op_type in MOVES else [use.node]
    return result


def unpack_when_loaded(model: Any) -> None:
    """Write dequantized constants as Cast and Mul, which a runtime folds when it loads the file."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or len(node.inputs) != 2 or has_blocks(node):
            continue
        codes, scale = node.inputs
        if codes.const_value is not None and codes.dtype == ir.DataType.INT8 and scale.const_value is not None:
            cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT})
            product = ir.node("Mul", [cast.outputs[0], _broadcast_scales(model.graph, node)])
            replace_node(node, cast, product)


def _broadcast_scales(graph: Any, node: Any) -> Any:
    """Return the scales of a DequantizeLinear in a shape that broadcasts over the codes."""
    codes, scale = node.inputs
    rank = len(codes.shape)
    axes_after = rank - 1 - node.attributes.get_int("axis", 1) % rank if len(scale.shape) else 0
    if not axes_after:
        return scale
    # The name does not contain the node, so that several calls of a layer share the scales.
    return add_constant(
        graph, f"{scale.name}.beside.{axes_after}", scale.const_value.numpy().reshape(-1, *[1] * axes_after)
    )


def float_weights_stay(model: Any) -> None:
    """Keep a compiler from quantizing the float weight of a product whose input and output are quantized.

    ONNX Runtime does so only if the input has a single scale. So each such product gets its own DequantizeLinear, which
    repeats that scale for every channel; the values are the same.
    """
    for node in list(model.graph):
        dequantize = find_producer(node.inputs[0], "DequantizeLinear") if node.op_type in PRODUCTS else None
        if dequantize is None or not _is_one_scale(dequantize.inputs[1]):
            continue
        if _is_float_constant(node.inputs[1]) and _leads_to_codes(node):
            node.replace_input_with(0, _insert_channel_dequantize(model.graph, node, dequantize))


def _is_one_scale(scale: Any) -> bool:
    return scale.const_value is not None and scale.const_value.size == 1


def _is_float_constant(value: Any) -> bool:
    """Whether a value is a float constant, stored or folded by the runtime, with at least two axes, as weights have."""
    is_float = value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None
    return is_float and len(value.shape) > 1 and _is_constant(value)


def _is_constant(value: Any) -> bool:
    source = value.producer()
    if source is None:
        return bool(value.is_initializer())
    return source.op_type in ("Cast", "Mul", *MOVES) and all(map(_is_constant, source.inputs))


def _leads_to_codes(node: Any) -> bool:
    """Whether the result reaches a QuantizeLinear through biases and clamps only."""
    uses = node.outputs[0].uses()
    if len(uses) != 1:
        return False
    reader = uses[0].node
    return reader.op_type == "QuantizeLinear" or (reader.op_type in ("Add", "Relu", "Clip") and _leads_to_codes(reader))


def _insert_channel_dequantize(graph: Any, product: Any, dequantize: Any) -> Any:
    """Insert a DequantizeLinear with one scale per input channel of the product, and return its output."""
    weight_shape, x = product.inputs[1].shape, product.inputs[0]
    if product.op_type == "Conv":
        axis, channels = 1, int(weight_shape[1]) * product.attributes.get_int("group", 1)
    elif product.op_type == "ConvTranspose":
        axis, channels = 1, int(weight_shape[0])
    else:
        is_transposed = bool(product.attributes.get_int("transB", 0))
        axis, channels = len(x.shape) - 1, int(weight_shape[-1 if is_transposed else -2])
    inputs = [dequantize.inputs[0]]
    for value in dequantize.inputs[1:]:
        repeated = np.broadcast_to(value.const_value.numpy().reshape(1), (channels,)).copy()
        inputs.append(add_constant(graph, f"{value.name}.{channels}", repeated, value.dtype))
    copy = ir.node("DequantizeLinear", inputs, {"axis": axis})
    return insert_before(product, copy, x.shape, x.type, f"{x.name}.{product.outputs[0].name}")


def keep_pools_apart(model: Any) -> None:
    """Keep a compiler from moving a quantizer before a MaxPool of floats, by a Max of one tensor between them."""
    for node in list(model.graph):
        if node.op_type != "MaxPool" or _comes_from_codes(node.inputs[0], (*MOVES, "MaxPool")):
            continue
        if _find_quantizers_after(node):
            _insert_max(model.graph, node)


def softmax_in_float(model: Any) -> None:
    """Keep a compiler from fusing a Softmax with the quantizer after it by a Max of one tensor, which changes nothing.

    What is before the Softmax does not matter: the compiler moves a DequantizeLinear through reshapes to it.
    """
    for node in list(model.graph):
        if node.op_type == "Softmax" and _find_quantizers_after(node):
            _insert_max(model.graph, node)


def keep_concats_apart(model: Any) -> None:
    """Keep a compiler from moving a quantizer before a Concat, by a Max(x, x) between them.

    For a Concat that is not along the last axis, and whose quantized result a MatMul reads.
    """
    for node in list(model.graph):
        if node.op_type != "Concat" or node.outputs[0].shape is None:
            continue
        axis, rank = node.attributes["axis"].as_int(), len(node.outputs[0].shape)
        dequantizers = [use.node for quantizer in _find_quantizers_after(node) for use in quantizer.outputs[0].uses()]
        readers = [reader for dequantizer in dequantizers for reader in _readers_through_moves(dequantizer)]
        if axis not in (-1, rank - 1) and any(reader.op_type == "MatMul" for reader in readers):
            # OpenVINO drops a Max with one operand when it reads the file.
            _insert_max(model.graph, node, operand_count=2)


def _find_quantizers_after(node: Any) -> list[Any]:
    """Return the QuantizeLinear nodes that read a node's result, directly or through nodes that only move values."""
    return [reader for reader in _readers_through_moves(node) if reader.op_type == "QuantizeLinear"]


def _insert_max(graph: Any, node: Any, operand_count: int = 1) -> None:
    """Insert a Max of one tensor, which does not change it, between a node and its readers.

    A compiler does not move or fuse operators across it. One operand is enough for ONNX Runtime, and fastest.
    """
    value = node.outputs[0]
    uses = list(value.uses())
    maximum = ir.node("Max", [value] * operand_count)
    output = maximum.outputs[0]
    output.name, output.shape, output.type = f"{value.name}.held", value.shape, value.type
    maximum.metadata_props.update(node.metadata_props)
    graph.insert_after(node, maximum)
    for use in uses:
        use.node.replace_input_with(use.idx, output)


def quantizers_before_pools(model: Any) -> None:
    """Move a Q/DQ pair before the MaxPool that only it reads: the largest value has the largest code."""
    for quantize in list(model.graph):
        while _can_move_before_pool(quantize):  # again if there is another pool before this one
            _move_before_pool(model.graph, quantize)


def _can_move_before_pool(quantize: Any) -> bool:
    """Whether a node is the start of a Q/DQ pair with one scale that alone reads a MaxPool."""
    pool = find_producer(quantize.inputs[0], "MaxPool") if quantize.op_type == "QuantizeLinear" else None
    if pool is None or len(pool.outputs) != 1:
        return False
    pooled, readers = pool.outputs[0], list(quantize.outputs[0].uses())
    is_pair = len(readers) == 1 and readers[0].node.op_type == "DequantizeLinear"
    is_read_by_others = len(pooled.uses()) != 1 or pooled.is_graph_output()
    return is_pair and _is_one_scale(quantize.inputs[1]) and not is_read_by_others


def _move_before_pool(graph: Any, quantize: Any) -> None:
    pool, dequantize = quantize.inputs[0].producer(), quantize.outputs[0].uses()[0].node
    pooled, source, dequantized = pool.outputs[0], pool.inputs[0], dequantize.outputs[0]
    ir.convenience.replace_all_uses_with(dequantized, pooled, replace_graph_outputs=True)
    quantize.replace_input_with(0, source)
    pool.replace_input_with(0, dequantized)
    for node in (dequantize, quantize):
        node.outputs[0].shape = source.shape
        graph.remove(node)
    graph.insert_before(pool, [quantize, dequantize])


def bias_for_several_readers(model: Any) -> None:
    """Give a bias to each Conv of codes that has none, or zeros, and whose result several nodes read."""
    for node in model.graph:
        if node.op_type != "Conv" or not _reads_integers(node):
            continue
        output, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        is_zero = bias is None or (bias.const_value is not None and not bias.const_value.numpy().any())
        if is_zero and _count_readers(output) > 1:
            values = np.full(int(node.inputs[1].shape[0]), NO_BIAS, np.float32)
            node.resize_inputs(3)
            node.replace_input_with(2, add_constant(model.graph, f"{output.name}.no_bias", values))


def _count_readers(value: Any) -> int:
    """Return how many nodes and graph outputs read a value. Readers of a moved value count instead of the move."""
    readers = [use.node for use in value.uses()]
    counts = (_count_readers(reader.outputs[0]) if reader.op_type in MOVES else 1 for reader in readers)
    return bool(value.is_graph_output()) + sum(counts)


REWRITES: dict[str, Callable[[Any], None]] = {
    "sum_before_layer_norm": sum_before_layer_norm,
    "activations_of_codes": activations_of_codes,
    "gelu_halved_last": gelu_halved_last,
    "exp_activations": exp_activations,
    "quantizers_before_moves": quantizers_before_moves,
    "narrow_weights_as_int8": narrow_weights_as_int8,
    "unpack_when_loaded": unpack_when_loaded,
    "float_weights_stay": float_weights_stay,
    "keep_pools_apart": keep_pools_apart,
    "quantizers_before_pools": quantizers_before_pools,
    "keep_concats_apart": keep_concats_apart,
    "explicit_zero_states": explicit_zero_states,
    "linears_as_convolutions": write_linears_as_convolutions,
    "softmax_in_float": softmax_in_float,
    "softmax_of_finite": softmax_of_finite,
    "bias_for_several_readers": bias_for_several_readers,
}
