"""Other words for the same operation, where a target's compiler does better with them.

sum_before_layer_norm    Add -> LayerNormalization                   becomes  Sum -> LayerNormalization
unpack_when_loaded       DequantizeLinear of codes without zero      becomes  Cast -> Mul, constants that a runtime
                         point or blocks, as StoredUnpacked has it            works out as it loads the file

A target names the rules that it wants, each with its reason; the values are the same bit for bit.
"""

from collections.abc import Callable, Iterable
from typing import Any

import onnx_ir as ir

from scalepoint.errors import ExportError, nearest
from scalepoint.targets.target import Spelling


def respell(model: Any, spellings: Iterable[Spelling]) -> None:
    """Apply the rules to the graph, in place."""
    for spelling in spellings:
        if spelling.name not in RULES:
            raise ExportError(f"spelling {spelling.name!r}: ONNX files have {nearest(spelling.name, RULES)}")
        RULES[spelling.name](model)


def sum_before_layer_norm(model: Any) -> None:
    """The add of two tensors that a layer norm reads, be it a residual or an embedding."""
    for norm in model.graph:
        source = norm.inputs[0].producer() if norm.op_type == "LayerNormalization" and norm.inputs[0] else None
        if source is not None and source.op_type == "Add" and source.domain == "":
            source.op_type = "Sum"


def unpack_when_loaded(model: Any) -> None:
    """Codes times scales, as operations that are folded."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or len(node.inputs) != 2 or "block_size" in node.attributes:
            continue
        codes, scale = node.inputs
        if codes.const_value is None or codes.dtype != ir.DataType.INT8 or scale.const_value is None:
            continue
        cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT})
        product = ir.node("Mul", [cast.outputs[0], _beside(model.graph, node)])
        for made in (cast, product):
            made.outputs[0].shape, made.outputs[0].type = codes.shape, node.outputs[0].type
            made.metadata_props.update(node.metadata_props)
        old, new = [node.outputs[0]], [product.outputs[0]]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [cast, product], old, new)


def _beside(graph: Any, node: Any) -> Any:
    """The scales with an axis for each of the codes."""
    codes, scale = node.inputs
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    behind = len(codes.shape) - 1 - axis % len(codes.shape) if len(scale.shape) else 0
    if not behind:
        return scale
    array = scale.const_value.numpy().reshape(-1, *[1] * behind)
    tensor = ir.Tensor(array, name=f"{scale.name}.beside")
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


RULES: dict[str, Callable[[Any], None]] = {
    "sum_before_layer_norm": sum_before_layer_norm,
    "unpack_when_loaded": unpack_when_loaded,
}
