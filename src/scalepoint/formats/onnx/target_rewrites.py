"""Rewrites an ONNX graph into equivalent forms that the compiler of a target handles better.

rewrite                  from                                        to
sum_before_layer_norm    Add -> LayerNormalization                   Sum -> LayerNormalization
activations_of_codes     SiLU or GELU of a DequantizeLinear          one operator (activations.py)
gelu_halved_last         x * (0.5 * (1 + erf(..)))                   (x * (1 + erf(..))) * 0.5 (activations.py)
exp_activations          Mish, Elu                                   operations with Exp (activations.py)
quantizers_before_moves  Pad or nearest Resize -> QuantizeLinear     QuantizeLinear -> Pad or copies
narrow_weights_as_int8   int4 codes -> DequantizeLinear              int4 codes -> Cast -> DequantizeLinear
unpack_when_loaded       DequantizeLinear of OnnxUnpackedWeight      Cast -> Mul, which a runtime folds on load
float_weights_stay       DequantizeLinear -> product by floats       the same with one scale per channel
pools_before_quantizers  MaxPool of floats -> QuantizeLinear         MaxPool -> Max of one tensor -> QuantizeLinear
quantizers_before_pools  MaxPool -> Q/DQ                             Q/DQ -> MaxPool
softmax_in_float         DequantizeLinear -> Softmax -> Quantize     the same with a Max of one tensor after Softmax
joins_before_products    Concat of tokens -> QuantizeLinear -> MatMul  Concat -> Max(x, x) -> QuantizeLinear -> MatMul
linears_as_convolutions  MatMul of codes                             1x1 Conv (linear_as_conv.py)
softmax_of_finite        Softmax -> IsNaN -> Where(.., 0, ..)        Softmax, if no mask has infinities

A target lists the rewrites that it needs, with reasons. Results are equal bit by bit; those of convolutions and
activations are equal up to roundings of float32.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.errors import ExportError, did_you_mean
from scalepoint.formats.onnx.activations import activations_of_codes, exp_activations, gelu_halved_last
from scalepoint.formats.onnx.linear_as_conv import has_blocks, write_linears_as_convolutions
from scalepoint.formats.onnx.quantizers_before_moves import quantizers_before_moves
from scalepoint.targets.target import RewriteRule


def apply_rewrites(model: Any, rules: Iterable[RewriteRule]) -> None:
    """Apply the rewrites of a target to the graph, in place."""
    for rule in rules:
        if rule.name not in REWRITES:
            raise ExportError(f"unknown rewrite {rule.name!r} for ONNX files: {did_you_mean(rule.name, REWRITES)}")
        REWRITES[rule.name](model)


def sum_before_layer_norm(model: Any) -> None:
    """Replace the Add of two tensors that a layer norm reads, a residual or an embedding, by Sum."""
    for norm in model.graph:
        source = norm.inputs[0].producer() if norm.op_type == "LayerNormalization" and norm.inputs[0] else None
        if source is not None and source.op_type == "Add" and source.domain == "":
            source.op_type = "Sum"


def narrow_weights_as_int8(model: Any) -> None:
    """Cast codes of fewer than 8 bits to int8 before integer kernels.

    Weights in blocks, and those next to float activations, have special kernels for narrow codes and stay unchanged.
    """
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or not (_is_narrow(node.inputs[0]) and _feeds_integer_products(node)):
            continue
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            node.replace_input_with(2, node.inputs[2].producer().inputs[0])
        codes = node.inputs[0]
        cast = ir.node("Cast", [codes], {"to": int(ir.DataType.INT8)})
        cast.outputs[0].name, cast.outputs[0].shape = f"{codes.name}.int8", codes.shape
        cast.outputs[0].type = ir.TensorType(ir.DataType.INT8)
        cast.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])


def _is_narrow(value: Any) -> bool:
    """Whether a value is an int8 constant that will be stored in fewer bits (fold_casts removes its Cast)."""
    cast = value.producer()
    return cast is not None and cast.op_type == "Cast" and cast.attributes["to"].as_int() in NARROW_TYPES


def _feeds_integer_products(dequantize: Any) -> bool:
    """Whether every product that reads the weight also reads quantized activations."""
    if has_blocks(dequantize):
        return False
    readers = _readers_through_moves(dequantize)
    return bool(readers) and all(map(_reads_integers, readers))


def _readers_through_moves(node: Any) -> list[Any]:
    """Return the readers of a node's result; a reader that only moves values is replaced by its own readers."""
    result: list[Any] = []
    for use in node.outputs[0].uses():
        result += _readers_through_moves(use.node) if use.node.op_type in MOVES else [use.node]
    return result


def _reads_integers(product: Any) -> bool:
    if product.op_type not in PRODUCTS:
        return False
    source = product.inputs[0].producer()
    while source is not None and source.op_type in MOVES:
        source = source.inputs[0].producer()
    return source is not None and source.op_type == "DequantizeLinear"


def unpack_when_loaded(model: Any) -> None:
    """Write dequantized constants as Cast and Mul, which a runtime folds when it loads the file."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or len(node.inputs) != 2 or has_blocks(node):
            continue
        codes, scale = node.inputs
        if codes.const_value is None or codes.dtype != ir.DataType.INT8 or scale.const_value is None:
            continue
        cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT})
        product = ir.node("Mul", [cast.outputs[0], _broadcast_scales(model.graph, node)])
        for new_node in (cast, product):
            new_node.outputs[0].shape, new_node.outputs[0].type = codes.shape, node.outputs[0].type
            new_node.metadata_props.update(node.metadata_props)
        old, new = [node.outputs[0]], [product.outputs[0]]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [cast, product], old, new)


def _broadcast_scales(graph: Any, node: Any) -> Any:
    """Return the scales in a shape that broadcasts over the codes. Calls that share a weight share them too."""
    codes, scale = node.inputs
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    axes_after = len(codes.shape) - 1 - axis % len(codes.shape) if len(scale.shape) else 0
    if not axes_after:
        return scale
    name = f"{scale.name}.beside.{axes_after}"
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.Tensor(scale.const_value.numpy().reshape(-1, *[1] * axes_after), name=name)
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def float_weights_stay(model: Any) -> None:
    """Keep a compiler from quantizing the float weight of a product whose input and output are quantized.

    Each such product gets its own DequantizeLinear, which repeats the one scale for every channel.
    """
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.op_type in PRODUCTS and node.inputs[0] is not None else None
        if source is None or source.op_type != "DequantizeLinear" or not _is_one_scale(source.inputs[1]):
            continue
        if _is_float_constant(node.inputs[1]) and _leads_to_codes(node):
            node.replace_input_with(0, _insert_channel_dequantize(model, node, source))


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


def _insert_channel_dequantize(model: Any, node: Any, source: Any) -> Any:
    """Insert a DequantizeLinear with one scale per input channel of the product, and return its output."""
    weight_shape = node.inputs[1].shape
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
        axis, channels = 1, int(weight_shape[1]) * groups if node.op_type == "Conv" else int(weight_shape[0])
    else:
        is_transposed = "transB" in node.attributes and bool(node.attributes["transB"].as_int())
        axis, channels = len(node.inputs[0].shape) - 1, int(weight_shape[-1 if is_transposed else -2])
    inputs = [source.inputs[0]]
    for value in source.inputs[1:]:
        array = np.broadcast_to(value.const_value.numpy().reshape(1), (channels,)).copy()
        repeated = ir.Value(name=f"{value.name}.{channels}", const_value=ir.Tensor(array, dtype=value.dtype))
        repeated.shape, repeated.type = ir.Shape((channels,)), ir.TensorType(value.dtype)
        if repeated.name not in model.graph.initializers:
            model.graph.register_initializer(repeated)
        inputs.append(model.graph.initializers[repeated.name])
    dequantize = ir.node("DequantizeLinear", inputs, {"axis": axis})
    output = dequantize.outputs[0]
    output.name = f"{node.inputs[0].name}.{node.outputs[0].name}"
    output.shape, output.type = node.inputs[0].shape, node.inputs[0].type
    dequantize.metadata_props.update(node.metadata_props)
    model.graph.insert_before(node, dequantize)
    return output


def pools_before_quantizers(model: Any) -> None:
    """Separate a MaxPool of floats from the quantizers after it by a Max of one tensor, which changes nothing."""
    for node in list(model.graph):
        if node.op_type != "MaxPool":
            continue
        source = node.inputs[0].producer()
        while source is not None and source.op_type in (*MOVES, "MaxPool"):
            source = source.inputs[0].producer()
        reads_codes = source is not None and source.op_type == "DequantizeLinear"
        is_quantized = any(reader.op_type == "QuantizeLinear" for reader in _readers_through_moves(node))
        if is_quantized and not reads_codes:
            _insert_identity(model.graph, node, "Max", 1)


def joins_before_products(model: Any) -> None:
    """Keep the quantizer after a Concat that is not along the last axis and that a MatMul reads.

    A Max(x, x), which changes nothing, keeps the compiler from moving the quantizer before the Concat.
    """
    for node in list(model.graph):
        if node.op_type != "Concat" or node.outputs[0].shape is None:
            continue
        axis, rank = node.attributes["axis"].as_int(), len(node.outputs[0].shape)
        quantizers = [reader for reader in _readers_through_moves(node) if reader.op_type == "QuantizeLinear"]
        dequantizers = [use.node for quantizer in quantizers for use in quantizer.outputs[0].uses()]
        readers = [reader for dequantizer in dequantizers for reader in _readers_through_moves(dequantizer)]
        if axis not in (-1, rank - 1) and any(reader.op_type == "MatMul" for reader in readers):
            _insert_identity(model.graph, node, "Max", 2)


def _insert_identity(graph: Any, node: Any, operator: str, operand_count: int) -> None:
    """Insert an operator that does not change its operand between a node and its readers."""
    value = node.outputs[0]
    uses = list(value.uses())
    identity = ir.node(operator, [value] * operand_count)
    output = identity.outputs[0]
    output.name, output.shape, output.type = f"{value.name}.held", value.shape, value.type
    identity.metadata_props.update(node.metadata_props)
    graph.insert_after(node, identity)
    for use in uses:
        use.node.replace_input_with(use.idx, output)


def softmax_in_float(model: Any) -> None:
    """Keep a compiler from fusing a Softmax between codes by a Max of one tensor, which changes nothing."""
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.op_type == "Softmax" else None
        if source is None or source.op_type != "DequantizeLinear":
            continue
        if any(reader.op_type == "QuantizeLinear" for reader in _readers_through_moves(node)):
            _insert_identity(model.graph, node, "Max", 1)


def quantizers_before_pools(model: Any) -> None:
    """Move a Q/DQ pair before the MaxPool that only it reads: the largest value has the largest code."""
    for quantize in list(model.graph):
        pool = quantize.inputs[0].producer() if quantize.op_type == "QuantizeLinear" else None
        while pool is not None and pool.op_type == "MaxPool" and _move_before(model.graph, pool, quantize):
            pool = quantize.inputs[0].producer()


def _move_before(graph: Any, pool: Any, quantize: Any) -> bool:
    """Move a Q/DQ pair before the pool that it reads. Returns False if that is not possible."""
    pooled, readers = pool.outputs[0], list(quantize.outputs[0].uses())
    is_pair = len(readers) == 1 and readers[0].node.op_type == "DequantizeLinear"
    is_read_by_others = len(pooled.uses()) != 1 or pooled.is_graph_output()
    if not is_pair or not _is_one_scale(quantize.inputs[1]) or is_read_by_others or len(pool.outputs) != 1:
        return False
    dequantize, source = readers[0].node, pool.inputs[0]
    dequantized = dequantize.outputs[0]
    ir.convenience.replace_all_uses_with(dequantized, pooled, replace_graph_outputs=True)
    quantize.replace_input_with(0, source)
    pool.replace_input_with(0, dequantized)
    for node in (dequantize, quantize):
        node.outputs[0].shape = source.shape
        graph.remove(node)
    graph.insert_before(pool, [quantize, dequantize])
    return True


def softmax_of_finite(model: Any) -> None:
    """Remove the check for NaN after a softmax whose masks contain finite numbers instead of infinities.

    The check is for rows that are masked completely, whose softmax is 0 / 0. With a finite mask exp() is 0 too, and a
    row that is masked completely has equal probabilities with and without the check.
    """
    for where in list(model.graph):
        softmax = _find_guarded_softmax(where)
        if softmax is None or not _is_finite(softmax.inputs[0]):
            continue
        is_nan = where.inputs[0].producer()
        ir.convenience.replace_all_uses_with(where.outputs[0], softmax.outputs[0])
        model.graph.remove([where, is_nan], safe=True)


def _find_guarded_softmax(where: Any) -> Any:
    """Return the softmax of Where(IsNaN(softmax), 0, softmax); None for another node."""
    if where.op_type != "Where" or not _holds_for_all(where.inputs[1], lambda values: values == 0):
        return None
    is_nan, softmax = where.inputs[0].producer(), where.inputs[2].producer()
    if is_nan is None or is_nan.op_type != "IsNaN" or is_nan.inputs[0] is not where.inputs[2]:
        return None
    can_remove = len(is_nan.outputs[0].uses()) == 1 and not where.outputs[0].is_graph_output()
    return softmax if can_remove and softmax is not None and softmax.op_type == "Softmax" else None


def _is_finite(scores: Any) -> bool:
    """Whether scores cannot be infinite or NaN.

    They must be a MatMul, multiplied by at most 1, plus masks. One mask may have any finite numbers; with two, the sum
    of two lowest float32 numbers would be infinite.
    """
    source, large_mask_count = scores.producer(), 0
    while source is not None and source.op_type in ("Add", "Mul", "Div"):
        magnitudes = [_max_magnitude(value) for value in source.inputs]
        constants = [(position, size) for position, size in enumerate(magnitudes) if size is not None]
        if len(constants) != 1:
            return False
        position, size = constants[0]
        if source.op_type == "Mul" and size > 1:
            return False
        if source.op_type == "Div":
            scales_down = _holds_for_all(source.inputs[1], lambda values: np.abs(values) >= 1)
            if position == 0 or not scales_down:
                return False
        large_mask_count += source.op_type == "Add" and size > MAX_FINITE_MASK
        source = source.inputs[1 - position].producer()
    return source is not None and source.op_type == "MatMul" and large_mask_count <= 1


def _max_magnitude(mask: Any) -> float | None:
    """Return the largest magnitude in a mask: a constant, or a Where between finite constants.

    A constant with infinities has the magnitude infinity, if every row also has finite values. None stands for a value
    that is not known, or for a mask with a row of infinities only.
    """
    if mask.const_value is not None:
        values = np.atleast_1d(mask.const_value.numpy())
        every_row_has_finite = bool(np.isfinite(values).any(-1).all())
        is_mask = values.size and every_row_has_finite and not (values > MAX_FINITE_MASK).any()
        return float(np.abs(values).max()) if is_mask else None
    where = mask.producer()
    if where is None or where.op_type != "Where":
        return None
    branches = where.inputs[1:]
    if not all(_holds_for_all(branch, np.isfinite) for branch in branches):
        return None
    return max(float(np.abs(branch.const_value.numpy()).max()) for branch in branches)


def _holds_for_all(value: Any, predicate: Callable[[Any], Any]) -> bool:
    """Whether a value is a constant and the predicate holds for all of its elements."""
    return value is not None and value.const_value is not None and bool(np.all(predicate(value.const_value.numpy())))


MAX_FINITE_MASK = 1e30  # a larger magnitude may overflow when it is added to another mask
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
NARROW_TYPES = (ir.DataType.INT4, ir.DataType.INT2)
MOVES = (  # these only move values
    "Transpose",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
)
REWRITES: dict[str, Callable[[Any], None]] = {
    "sum_before_layer_norm": sum_before_layer_norm,
    "activations_of_codes": activations_of_codes,
    "gelu_halved_last": gelu_halved_last,
    "exp_activations": exp_activations,
    "quantizers_before_moves": quantizers_before_moves,
    "narrow_weights_as_int8": narrow_weights_as_int8,
    "unpack_when_loaded": unpack_when_loaded,
    "float_weights_stay": float_weights_stay,
    "pools_before_quantizers": pools_before_quantizers,
    "quantizers_before_pools": quantizers_before_pools,
    "joins_before_products": joins_before_products,
    "linears_as_convolutions": write_linears_as_convolutions,
    "softmax_in_float": softmax_in_float,
    "softmax_of_finite": softmax_of_finite,
}
