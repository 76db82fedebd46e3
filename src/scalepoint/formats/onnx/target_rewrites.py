"""Other words for the same operation, where a target's compiler does better with them.

sum_before_layer_norm    Add -> LayerNormalization                   becomes  Sum -> LayerNormalization
gelu_halved_last         x * (0.5 * (1 + erf(..)))                   becomes  (x * (1 + erf(..))) * 0.5
narrow_weights_as_int8   int4 codes -> DequantizeLinear              becomes  int4 codes -> Cast -> DequantizeLinear
unpack_when_loaded       DequantizeLinear of codes without zero      becomes  Cast -> Mul, constants that a runtime
                         point or blocks, as StoredUnpacked has it            works out as it loads the file
float_weights_stay       DequantizeLinear -> product by floats       becomes  the same with a scale a channel
pools_before_quantizers  MaxPool of floats -> QuantizeLinear         becomes  MaxPool -> Max of one -> QuantizeLinear
quantizers_before_pools  MaxPool -> QuantizeLinear, alone            becomes  the pair of quantizers -> MaxPool
joins_before_products    Concat of tokens -> QuantizeLinear -> MatMul becomes  Concat -> Max of it and itself -> ...
linears_as_convolutions  MatMul of codes                             becomes  Conv of one tap (convolved.py)
softmax_of_finite        Softmax -> IsNaN -> Where(.., 0, ..)        becomes  Softmax, where no mask has infinities

A target names the rules that it wants, each with its reason; the values are the same bit for bit, of convolutions up to
the last rounding of float32.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.errors import ExportError, did_you_mean
from scalepoint.formats.onnx.linear_as_conv import has_blocks, write_linears_as_convolutions
from scalepoint.targets.target import RewriteRule


def apply_rewrites(model: Any, spellings: Iterable[RewriteRule]) -> None:
    """Apply the rules to the graph, in place."""
    for spelling in spellings:
        if spelling.name not in REWRITES:
            raise ExportError(f"spelling {spelling.name!r}: ONNX files have {did_you_mean(spelling.name, REWRITES)}")
        REWRITES[spelling.name](model)


def sum_before_layer_norm(model: Any) -> None:
    """The add of two tensors that a layer norm reads, be it a residual or an embedding."""
    for norm in model.graph:
        source = norm.inputs[0].producer() if norm.op_type == "LayerNormalization" and norm.inputs[0] else None
        if source is not None and source.op_type == "Add" and source.domain == "":
            source.op_type = "Sum"


def gelu_halved_last(model: Any) -> None:
    """A half is a power of two: when it comes last, no bit changes."""
    for inner in model.graph:
        half, total = _match_product(inner, _is_half)
        readers = [] if half is None else [use.node for use in inner.outputs[0].uses()]
        outer = readers[0] if len(readers) == 1 else None
        x = None if outer is None else _find_gelu_factor(outer, inner.outputs[0], total)
        if outer is not None and x is not None:
            for node, pair in ((inner, (x, total)), (outer, (inner.outputs[0], half))):
                for place, value in enumerate(pair):
                    node.replace_input_with(place, value)


def _match_product(node: Any, is_first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The operand of a product that is so, and the other; nothing of other operators."""
    if node.op_type != "Mul" or None in node.inputs:
        return None, None
    one, other = node.inputs
    return (one, other) if is_first(one) else (other, one) if is_first(other) else (None, None)


def _is_half(value: Any) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(())) == 0.5


def _find_gelu_factor(outer: Any, inner: Any, total: Any) -> Any:
    """What is multiplied by inner, where total is 1 + erf of a multiple of it."""
    _, x = _match_product(outer, lambda value: value is inner)
    add = total.producer()
    makers = [each.producer() for each in add.inputs] if add is not None and add.op_type == "Add" else []
    erf = next((each for each in makers if each is not None and each.op_type == "Erf"), None)
    scaled = None if erf is None else erf.inputs[0].producer()
    return x if scaled is not None and scaled.op_type in ("Div", "Mul") and x in scaled.inputs else None


def narrow_weights_as_int8(model: Any) -> None:
    """Codes of fewer than 8 bits that an integer kernel multiplies: what reads them in blocks, or beside float
    activations, has kernels of its own for them."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or not (_is_narrow(node.inputs[0]) and _meets_integers(node)):
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
    """Whether it is made from a constant in int8, to be stored in fewer bits."""
    cast = value.producer()
    return cast is not None and cast.op_type == "Cast" and cast.attributes["to"].as_int() in NARROW_TYPES


def _meets_integers(dequantize: Any) -> bool:
    """Whether every product that reads the weight reads integers on its other side, too."""
    if "block_size" in dequantize.attributes and dequantize.attributes["block_size"].as_int():
        return False
    readers = _readers_through_moves(dequantize)
    return bool(readers) and all(map(_reads_integers, readers))


def _readers_through_moves(node: Any) -> list[Any]:
    """What reads the value of a node, moves left out."""
    readers = [use.node for use in node.outputs[0].uses()]
    return [found for each in readers for found in (_readers_through_moves(each) if each.op_type in MOVES else [each])]


def _reads_integers(product: Any) -> bool:
    if product.op_type not in PRODUCTS:
        return False
    source = product.inputs[0].producer()
    while source is not None and source.op_type in MOVES:
        source = source.inputs[0].producer()
    return source is not None and source.op_type == "DequantizeLinear"


def unpack_when_loaded(model: Any) -> None:
    """Codes times scales, as operations that are folded."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or len(node.inputs) != 2 or has_blocks(node):
            continue
        codes, scale = node.inputs
        if codes.const_value is None or codes.dtype != ir.DataType.INT8 or scale.const_value is None:
            continue
        cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT})
        product = ir.node("Mul", [cast.outputs[0], _broadcast_scales(model.graph, node)])
        for made in (cast, product):
            made.outputs[0].shape, made.outputs[0].type = codes.shape, node.outputs[0].type
            made.metadata_props.update(node.metadata_props)
        old, new = [node.outputs[0]], [product.outputs[0]]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [cast, product], old, new)


def _broadcast_scales(graph: Any, node: Any) -> Any:
    """The scales with an axis for each of the codes; once in the file, also where several calls share a weight."""
    codes, scale = node.inputs
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    behind = len(codes.shape) - 1 - axis % len(codes.shape) if len(scale.shape) else 0
    if not behind:
        return scale
    name = f"{scale.name}.beside.{behind}"
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.Tensor(scale.const_value.numpy().reshape(-1, *[1] * behind), name=name)
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def float_weights_stay(model: Any) -> None:
    """Products by float weights between integers: each gets a DequantizeLinear of its own, with the one scale written
    once a channel, which keeps a compiler from quantizing the weight by itself."""
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.op_type in PRODUCTS and node.inputs[0] is not None else None
        if source is None or source.op_type != "DequantizeLinear" or not _is_one_scale(source.inputs[1]):
            continue
        if _is_float_constant(node.inputs[1]) and _leads_to_codes(node):
            node.replace_input_with(0, _insert_channel_dequantize(model, node, source))


def _is_one_scale(scale: Any) -> bool:
    return scale.const_value is not None and scale.const_value.size == 1


def _is_float_constant(value: Any) -> bool:
    """Whether a runtime has it as a float constant, worked out or not; of two axes at least, as weights are."""
    is_float = value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None
    return is_float and len(value.shape) > 1 and _is_constant(value)


def _is_constant(value: Any) -> bool:
    source = value.producer()
    if source is None:
        return bool(value.is_initializer())
    return source.op_type in ("Cast", "Mul", *MOVES) and all(map(_is_constant, source.inputs))


def _leads_to_codes(node: Any) -> bool:
    """Whether one line of biases and clamps ends in QuantizeLinear."""
    uses = node.outputs[0].uses()
    if len(uses) != 1:
        return False
    reader = uses[0].node
    return reader.op_type == "QuantizeLinear" or (reader.op_type in ("Add", "Relu", "Clip") and _leads_to_codes(reader))


def _insert_channel_dequantize(model: Any, node: Any, source: Any) -> Any:
    weight = node.inputs[1].shape
    if node.op_type in ("Conv", "ConvTranspose"):
        groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
        axis, count = 1, int(weight[1]) * groups if node.op_type == "Conv" else int(weight[0])
    else:
        is_turned = "transB" in node.attributes and bool(node.attributes["transB"].as_int())
        axis, count = len(node.inputs[0].shape) - 1, int(weight[-1 if is_turned else -2])
    parts = [source.inputs[0]]
    for value in source.inputs[1:]:
        array = np.broadcast_to(value.const_value.numpy().reshape(1), (count,)).copy()
        made = ir.Value(name=f"{value.name}.{count}", const_value=ir.Tensor(array, dtype=value.dtype))
        made.shape, made.type = ir.Shape((count,)), ir.TensorType(value.dtype)
        if made.name not in model.graph.initializers:
            model.graph.register_initializer(made)
        parts.append(model.graph.initializers[made.name])
    own = ir.node("DequantizeLinear", parts, {"axis": axis})
    own.outputs[0].name = f"{node.inputs[0].name}.{node.outputs[0].name}"
    own.outputs[0].shape, own.outputs[0].type = node.inputs[0].shape, node.inputs[0].type
    own.metadata_props.update(node.metadata_props)
    model.graph.insert_before(node, own)
    return own.outputs[0]


def pools_before_quantizers(model: Any) -> None:
    """A pool of floats whose values are quantized behind it: a maximum of one tensor keeps the two apart."""
    for node in list(model.graph):
        source = node.inputs[0].producer() if node.op_type == "MaxPool" else None
        while source is not None and source.op_type in (*MOVES, "MaxPool"):
            source = source.inputs[0].producer()
        is_of_codes = source is not None and source.op_type == "DequantizeLinear"
        if (
            node.op_type != "MaxPool"
            or is_of_codes
            or all(each.op_type != "QuantizeLinear" for each in _readers_through_moves(node))
        ):
            continue
        _insert_identity_operator(model.graph, node, "Max", 1)


def joins_before_products(model: Any) -> None:
    """Tensors that are joined along other than their last axis and quantized for a product: a maximum that changes
    nothing keeps the quantizer behind the join."""
    for node in list(model.graph):
        if node.op_type != "Concat" or node.outputs[0].shape is None:
            continue
        axis, rank = node.attributes["axis"].as_int(), len(node.outputs[0].shape)
        pairs = [each.outputs[0].uses() for each in _readers_through_moves(node) if each.op_type == "QuantizeLinear"]
        behind = [found for uses in pairs for use in uses for found in _readers_through_moves(use.node)]
        if axis not in (-1, rank - 1) and any(each.op_type == "MatMul" for each in behind):
            _insert_identity_operator(model.graph, node, "Max", 2)


def _insert_identity_operator(graph: Any, node: Any, operator: str, count: int) -> None:
    """Its value goes through an operator that keeps it, `count` times its operand, to all that read it."""
    given = node.outputs[0]
    readers = list(given.uses())
    held = ir.node(operator, [given] * count)
    made = held.outputs[0]
    made.name, made.shape, made.type = f"{given.name}.held", given.shape, given.type
    held.metadata_props.update(node.metadata_props)
    graph.insert_after(node, held)
    for reader in readers:
        reader.node.replace_input_with(reader.idx, made)


def quantizers_before_pools(model: Any) -> None:
    """The pair behind a pool whose values nobody else reads goes before it: the largest value has the largest code."""
    for quantize in list(model.graph):
        pool = quantize.inputs[0].producer() if quantize.op_type == "QuantizeLinear" else None
        while pool is not None and pool.op_type == "MaxPool" and _moves_before(model.graph, pool, quantize):
            pool = quantize.inputs[0].producer()


def _moves_before(graph: Any, pool: Any, quantize: Any) -> bool:
    pooled, readers = pool.outputs[0], list(quantize.outputs[0].uses())
    is_pair = len(readers) == 1 and readers[0].node.op_type == "DequantizeLinear"
    is_whole = quantize.inputs[1].const_value is not None and quantize.inputs[1].const_value.size == 1
    if not (is_pair and is_whole) or len(pooled.uses()) != 1 or pooled.is_graph_output() or len(pool.outputs) != 1:
        return False
    dequantize, source = readers[0].node, pool.inputs[0]
    made = dequantize.outputs[0]
    ir.convenience.replace_all_uses_with(made, pooled, replace_graph_outputs=True)
    quantize.replace_input_with(0, source)
    pool.replace_input_with(0, made)
    for node in (dequantize, quantize):
        node.outputs[0].shape = source.shape
        graph.remove(node)
    graph.insert_before(pool, [quantize, dequantize])
    return True


def softmax_of_finite(model: Any) -> None:
    """The check for rows without any key, whose softmax is 0 / 0: with numbers for infinities in the mask there are
    none. exp() of them is zero all the same, and a row that is masked whole has equal probabilities in both forms."""
    for choice in list(model.graph):
        softmax = _find_guarded_softmax(choice)
        if softmax is None or not _is_finite(softmax.inputs[0]):
            continue
        check = choice.inputs[0].producer()
        ir.convenience.replace_all_uses_with(choice.outputs[0], softmax.outputs[0])
        model.graph.remove([choice, check], safe=True)


def _find_guarded_softmax(choice: Any) -> Any:
    """The softmax whose NaN a Where makes zeros of; None of another node."""
    if choice.op_type != "Where" or not _has_only(choice.inputs[1], lambda values: values == 0):
        return None
    check, softmax = choice.inputs[0].producer(), choice.inputs[2].producer()
    if check is None or check.op_type != "IsNaN" or check.inputs[0] is not choice.inputs[2]:
        return None
    is_alone = len(check.outputs[0].uses()) == 1 and not choice.outputs[0].is_graph_output()
    return softmax if is_alone and softmax is not None and softmax.op_type == "Softmax" else None


def _is_finite(scores: Any) -> bool:
    """Products of activations, scaled down at most, with small masks and one of any numbers: two of the lowest number
    make an infinity."""
    source, large = scores.producer(), 0
    while source is not None and source.op_type in ("Add", "Mul", "Div"):
        known = [
            (place, size) for place, value in enumerate(source.inputs) if (size := _max_magnitude(value)) is not None
        ]
        if len(known) != 1:
            return False
        place, size = known[0]
        if source.op_type == "Mul" and size > 1:
            return False
        if source.op_type == "Div" and (place == 0 or not _has_only(source.inputs[1], lambda each: np.abs(each) >= 1)):
            return False
        large += source.op_type == "Add" and size > MAX_FINITE_MASK
        source = source.inputs[1 - place].producer()
    return source is not None and source.op_type == "MatMul" and large <= 1


def _max_magnitude(mask: Any) -> float | None:
    """The largest magnitude of a constant, or of a choice between numbers; infinity of a constant that has such and
    leaves every row a number; None of what is not known, or leaves a row nothing."""
    if mask.const_value is not None:
        values = mask.const_value.numpy()
        rows = np.isfinite(values).reshape(-1, values.shape[-1] if values.ndim else 1).any(-1)
        return (
            float(np.abs(values).max())
            if values.size and bool(rows.all()) and not (values > MAX_FINITE_MASK).any()
            else None
        )
    source = mask.producer()
    if (
        source is None
        or source.op_type != "Where"
        or not all(_has_only(each, np.isfinite) for each in source.inputs[1:])
    ):
        return None
    return max(float(np.abs(each.const_value.numpy()).max()) for each in source.inputs[1:])


def _has_only(value: Any, are_so: Callable[[Any], Any]) -> bool:
    return value is not None and value.const_value is not None and bool(np.all(are_so(value.const_value.numpy())))


MAX_FINITE_MASK = 1e30
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
NARROW_TYPES = (ir.DataType.INT4, ir.DataType.INT2)
MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
REWRITES: dict[str, Callable[[Any], None]] = {
    "sum_before_layer_norm": sum_before_layer_norm,
    "gelu_halved_last": gelu_halved_last,
    "narrow_weights_as_int8": narrow_weights_as_int8,
    "unpack_when_loaded": unpack_when_loaded,
    "float_weights_stay": float_weights_stay,
    "pools_before_quantizers": pools_before_quantizers,
    "quantizers_before_pools": quantizers_before_pools,
    "joins_before_products": joins_before_products,
    "linears_as_convolutions": write_linears_as_convolutions,
    "softmax_of_finite": softmax_of_finite,
}
