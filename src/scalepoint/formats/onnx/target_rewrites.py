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
keep_pools_apart         MaxPool of floats -> QuantizeLinear         MaxPool -> Max of one tensor -> QuantizeLinear
quantizers_before_pools  MaxPool -> Q/DQ                             Q/DQ -> MaxPool
softmax_in_float         Softmax -> QuantizeLinear                   Softmax -> Max of one tensor -> QuantizeLinear
keep_concats_apart       Concat of tokens -> QuantizeLinear -> MatMul  Concat -> Max(x, x) -> QuantizeLinear -> MatMul
linears_as_convolutions  MatMul of codes                             1x1 Conv (linear_as_conv.py)
explicit_zero_states     GRU(x) with a free batch                    GRU(x, initial state = ConstantOfShape)
softmax_of_finite        Softmax -> IsNaN -> Where(.., 0, ..)        Softmax, if no row can be all -inf

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
from scalepoint.formats.onnx.shape_arithmetic import explicit_zero_states
from scalepoint.targets.target import RewriteRule

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
NARROW_TYPES = (ir.DataType.INT4, ir.DataType.INT2)
MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze")  # these only move values
MAX_FINITE_MASK = 1e30  # a larger magnitude may overflow when it is added to another mask


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
            # The zero point has the dtype of the codes: skip its Cast to fewer bits too.
            node.replace_input_with(2, node.inputs[2].producer().inputs[0])
        codes = node.inputs[0]
        cast = ir.node("Cast", [codes], {"to": int(ir.DataType.INT8)})
        cast.outputs[0].name, cast.outputs[0].shape = f"{codes.name}.int8", codes.shape
        cast.outputs[0].type = ir.TensorType(ir.DataType.INT8)
        cast.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])


def _is_narrow(value: Any) -> bool:
    """Whether a value has int4 or int2 codes: they are still int8 followed by a Cast, which fold_casts merges later."""
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
    """Return the scales in a shape that broadcasts over the codes.

    They are stored once under a name made from the scale's, also for a layer that the model calls several times.
    """
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

    ONNX Runtime does so only if the input has a single scale. So each such product gets its own DequantizeLinear, which
    repeats that scale for every channel; the values are the same.
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


def keep_pools_apart(model: Any) -> None:
    """Keep a compiler from moving a quantizer before a MaxPool of floats, by a Max of one tensor between them."""
    for node in list(model.graph):
        if node.op_type != "MaxPool":
            continue
        source = node.inputs[0].producer()
        while source is not None and source.op_type in (*MOVES, "MaxPool"):
            source = source.inputs[0].producer()
        reads_codes = source is not None and source.op_type == "DequantizeLinear"
        is_quantized = any(reader.op_type == "QuantizeLinear" for reader in _readers_through_moves(node))
        if is_quantized and not reads_codes:
            _insert_max(model.graph, node)


def keep_concats_apart(model: Any) -> None:
    """Keep a compiler from moving a quantizer before a Concat, by a Max(x, x) between them.

    For a Concat that is not along the last axis, and whose quantized result a MatMul reads.
    """
    for node in list(model.graph):
        if node.op_type != "Concat" or node.outputs[0].shape is None:
            continue
        axis, rank = node.attributes["axis"].as_int(), len(node.outputs[0].shape)
        quantizers = [reader for reader in _readers_through_moves(node) if reader.op_type == "QuantizeLinear"]
        dequantizers = [use.node for quantizer in quantizers for use in quantizer.outputs[0].uses()]
        readers = [reader for dequantizer in dequantizers for reader in _readers_through_moves(dequantizer)]
        if axis not in (-1, rank - 1) and any(reader.op_type == "MatMul" for reader in readers):
            # OpenVINO drops a Max with one operand when it reads the file.
            _insert_max(model.graph, node, operand_count=2)


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


def softmax_in_float(model: Any) -> None:
    """Keep a compiler from fusing a Softmax with the quantizer after it by a Max of one tensor, which changes nothing.

    What is before the Softmax does not matter: the compiler moves a DequantizeLinear through reshapes to it.
    """
    for node in list(model.graph):
        if node.op_type != "Softmax":
            continue
        if any(reader.op_type == "QuantizeLinear" for reader in _readers_through_moves(node)):
            _insert_max(model.graph, node)


def quantizers_before_pools(model: Any) -> None:
    """Move a Q/DQ pair before the MaxPool that only it reads: the largest value has the largest code."""
    for quantize in list(model.graph):
        while _can_move_before_pool(quantize):  # again if there is another pool before this one
            _move_before_pool(model.graph, quantize)


def _can_move_before_pool(quantize: Any) -> bool:
    """Whether a node is the start of a Q/DQ pair with one scale that alone reads a MaxPool."""
    pool = quantize.inputs[0].producer() if quantize.op_type == "QuantizeLinear" else None
    if pool is None or pool.op_type != "MaxPool" or len(pool.outputs) != 1:
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


def softmax_of_finite(model: Any) -> None:
    """Remove the check for NaN after a softmax that cannot give NaN, because no row of its scores is all -inf.

    The check is for rows that are masked completely: with -inf, their softmax is 0 / 0. With a mask of finite numbers,
    such as the lowest float32, a masked key has the probability exp(-3e38) = 0 too. A row that such a mask covers
    completely has equal probabilities, not NaN, so the check does not change it.
    """
    for where in list(model.graph):
        softmax = _find_guarded_softmax(where)
        if softmax is None or not _cannot_give_nan(softmax):
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


def _cannot_give_nan(softmax: Any) -> bool:
    """Whether no row of the scores is all -inf, and no score is NaN or +inf.

    The scores must be a MatMul, multiplied by at most 1, plus masks. Its result is taken to be far from the limits of
    float32. One mask may have large numbers or -inf; the sum of two could be -inf in a whole row.
    """
    source, large_mask_count = softmax.inputs[0].producer(), 0
    keeps_minus_inf = True  # all factors between the current node and the softmax are positive
    while source is not None and source.op_type in ("Add", "Mul", "Div"):
        magnitudes = [_max_magnitude(operand) for operand in source.inputs]
        constants = [(index, magnitude) for index, magnitude in enumerate(magnitudes) if magnitude is not None]
        if len(constants) != 1:
            return False
        index, magnitude = constants[0]
        operand = source.inputs[index]
        if source.op_type == "Add":
            # -inf times a negative number is +inf, and -inf times 0 is NaN.
            if magnitude == np.inf and not (keeps_minus_inf and _is_along_last_axis(softmax)):
                return False
            large_mask_count += magnitude > MAX_FINITE_MASK
        else:
            is_divided_by = source.op_type == "Div" and index == 1
            divides_down = is_divided_by and _holds_for_all(operand, lambda v: np.isfinite(v) & (np.abs(v) >= 1))
            if not divides_down and (source.op_type == "Div" or magnitude > 1):
                return False
            keeps_minus_inf = keeps_minus_inf and _holds_for_all(operand, lambda values: values > 0)
        source = source.inputs[1 - index].producer()
    return source is not None and source.op_type == "MatMul" and large_mask_count <= 1


def _is_along_last_axis(softmax: Any) -> bool:
    axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
    shape = softmax.inputs[0].shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _max_magnitude(operand: Any) -> float | None:
    """Return the largest magnitude in a mask or factor: a constant, or a Where between finite constants.

    A constant with -inf has the magnitude infinity, if every row also has finite values. None stands for a value that
    is not known, and for a constant that is not usable: it has NaN, +inf, or a row of -inf only.
    """
    if operand.const_value is not None:
        values = np.atleast_1d(operand.const_value.numpy())
        every_row_has_finite = bool(np.isfinite(values).any(-1).all())
        # False for NaN and +inf too
        is_usable = values.size and every_row_has_finite and bool((values <= MAX_FINITE_MASK).all())
        return float(np.abs(values).max()) if is_usable else None
    where = operand.producer()
    if where is None or where.op_type != "Where":
        return None
    branches = where.inputs[1:]
    if not all(_holds_for_all(branch, np.isfinite) for branch in branches):
        return None
    return max(float(np.abs(branch.const_value.numpy()).max()) for branch in branches)


def _holds_for_all(value: Any, predicate: Callable[[Any], Any]) -> bool:
    """Whether a value is a constant and the predicate holds for all of its elements."""
    return value is not None and value.const_value is not None and bool(np.all(predicate(value.const_value.numpy())))


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
}
