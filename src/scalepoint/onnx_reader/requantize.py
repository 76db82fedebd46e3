"""Removes the quantizers of a quantized file, so that it can be quantized again.

DequantizeLinear of a constant                        stays: it is computed while the module is built
quantizer of an activation, DynamicQuantizeLinear     Identity
operator with a quantized weight                      DequantizeLinear of the weight, then the float operator

In a dynamically quantized file the scale of a weight is read after its integer product:

    DynamicQuantizeLinear(x) -> codes, x_scale;   Cast(MatMulInteger(codes, weight)) * (x_scale * weight_scale)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.graph import Graph
from scalepoint.onnx_reader.operators import Node
from scalepoint.onnx_reader.quantized import DEQUANTIZE_NBITS, QUANTIZED_OPERATORS

# Quantized operator -> its float operator, the positions of input, weight, scale, zero point and bias (None: it has
# none), and the axis of its scales.
_LAYERS: Mapping[str, tuple[str, tuple[int, int, int | None, int, int | None], int]] = {
    "QLinearConv": ("Conv", (0, 3, 4, 5, 8), 0),
    "QLinearMatMul": ("MatMul", (0, 3, 4, 5, None), 1),
    "ConvInteger": ("Conv", (0, 1, None, 3, None), 0),
    "MatMulInteger": ("MatMul", (0, 1, None, 3, None), 1),
    "DynamicQuantizeMatMul": ("MatMul", (0, 1, 2, 3, 4), 1),
    "MatMulIntegerToFloat": ("MatMul", (0, 1, 3, 5, 6), 1),
}


@dataclass(frozen=True)
class ScaledProduct:
    """An integer product in a dynamically quantized file.

    Attributes:
        weight_scale: Name of the scale of its weight.
        output: Name of the product after it was multiplied with the scales.
    """

    weight_scale: str
    output: str


def without_quantizers(graph: Graph) -> Graph:
    """Return the graph with float operators only."""
    constants = set(graph.constants) | {node.outputs[0] for node in graph.nodes if node.operator == "Constant"}
    products = _find_scaled_products(graph.nodes)
    results = {product.output for product in products.values()}
    nodes: list[Node] = []
    for node in graph.nodes:
        is_cast = node.operator == "Cast" and node.inputs[0] in products
        if not is_cast and node.outputs[0] not in results:
            nodes += _to_float_nodes(node, constants, products)
    return replace(graph, nodes=tuple(nodes))


def _find_scaled_products(nodes: Sequence[Node]) -> dict[str, ScaledProduct]:
    """Find the integer products of a dynamically quantized file that are multiplied with scales, by output."""
    producers = {name: node for node in nodes for name in node.outputs}
    dynamic = {node.outputs[1] for node in nodes if node.operator == "DynamicQuantizeLinear"}
    weight_scales: dict[str, str] = {}  # x_scale * weight_scale -> weight_scale
    products: dict[str, ScaledProduct] = {}
    for node in nodes:
        if node.operator != "Mul" or len(node.inputs) != 2:
            continue
        for first, second in (node.inputs, node.inputs[::-1]):
            cast = producers.get(second)
            if first in dynamic and second not in dynamic:
                weight_scales[node.outputs[0]] = second
            elif first in weight_scales and cast is not None and cast.operator == "Cast":
                products[cast.inputs[0]] = ScaledProduct(weight_scales[first], node.outputs[0])
    return products


def _identity(node: Node, source: str) -> Node:
    return replace(node, operator="Identity", inputs=(source,), outputs=node.outputs[:1], attributes={})


def _to_float_nodes(node: Node, constants: set[str], products: Mapping[str, ScaledProduct]) -> list[Node]:
    """Return the nodes that replace a node."""
    kind = node.operator.removeprefix("com.microsoft::")
    if node.operator not in QUANTIZED_OPERATORS or (kind == "DequantizeLinear" and node.inputs[0] in constants):
        return [node]
    if kind in ("QuantizeLinear", "DequantizeLinear"):
        return [_identity(node, node.inputs[0])]
    if kind == "DynamicQuantizeLinear":
        return [_identity(node, node.inputs[0]), *(_number(name, 1.0) for name in node.outputs[1:] if name)]
    if kind in _LAYERS:
        return _float_layer(node, constants, products)
    if kind == "MatMulNBits":
        weight = f"{node.outputs[0]}_weight"
        inputs = (*node.inputs[1:4], "", "")[:3]
        unpack = Node(DEQUANTIZE_NBITS, f"{node.name}_weight", inputs, (weight,), node.attributes)
        bias = node.inputs[5] if len(node.inputs) > 5 else ""
        return [unpack, *_product("MatMul", node, weight, bias)]
    if kind == "DynamicQuantizeLSTM":
        return _float_lstm(node)
    raise OnnxReadError(f"{node}: the weights of {node.operator} cannot be dequantized")


def _number(name: str, number: float) -> Node:
    return Node("Constant", name, (), (name,), {"value_float": number})


def _product(operator: str, node: Node, weight: str, bias: str) -> list[Node]:
    """Return the float operator and the addition of its bias."""
    attributes = node.attributes if operator == "Conv" else {}
    if not bias or operator == "Conv":
        inputs = (node.inputs[0], weight, bias) if bias else (node.inputs[0], weight)
        return [replace(node, operator=operator, inputs=inputs, attributes=attributes)]
    product = f"{node.outputs[0]}_product"
    return [
        replace(node, operator=operator, inputs=(node.inputs[0], weight), outputs=(product,), attributes={}),
        replace(node, operator="Add", name=f"{node.name}_bias", inputs=(product, bias), attributes={}),
    ]


def _float_layer(node: Node, constants: set[str], products: Mapping[str, ScaledProduct]) -> list[Node]:
    """Return DequantizeLinear of the weight and the float operator."""
    operator, positions, axis = _LAYERS[node.operator.removeprefix("com.microsoft::")]
    names = [node.inputs[i] if i is not None and i < len(node.inputs) else "" for i in positions]
    _, weight, scale, zero, bias = names
    if weight not in constants:  # a product of two activations
        return _product(operator, node, weight, bias)
    prefix, nodes = node.outputs[0], []
    if not scale and node.outputs[0] in products:
        product = products[node.outputs[0]]
        scale, node = product.weight_scale, replace(node, outputs=(product.output,))
    if not scale:
        scale = f"{prefix}_one"
        nodes.append(_number(scale, 1.0))
    real = f"{prefix}_weight"
    nodes.append(_dequantize(real, (weight, scale, zero), axis))
    if node.operator == "QLinearConv" and bias:  # the scale of its bias is input scale * weight scale
        nodes.append(Node("Mul", f"{prefix}_bias_scale", (node.inputs[1], scale), (f"{prefix}_bias_scale",)))
        nodes.append(_dequantize(f"{prefix}_bias", (bias, f"{prefix}_bias_scale", ""), 0))
        bias = f"{prefix}_bias"
    return [*nodes, *_product(operator, node, real, bias)]


def _dequantize(output: str, inputs: tuple[str, str, str], axis: int) -> Node:
    return Node("DequantizeLinear", output, inputs if inputs[2] else inputs[:2], (output,), {"axis": axis}, 13)


def _float_lstm(node: Node) -> list[Node]:
    """Return an LSTM with dequantized weights. Those of a DynamicQuantizeLSTM are transposed."""
    inputs, nodes = list(node.inputs), []
    for index, scale in ((1, 8), (2, 10)):
        real = f"{node.outputs[0] or node.name}_weight{index}"
        nodes.append(_dequantize(f"{real}_transposed", (inputs[index], inputs[scale], inputs[scale + 1]), 0))
        nodes.append(Node("Transpose", real, (f"{real}_transposed",), (real,), {"perm": [0, 2, 1]}))
        inputs[index] = real
    while inputs and (len(inputs) > 8 or not inputs[-1]):
        inputs.pop()
    return [*nodes, replace(node, operator="LSTM", inputs=tuple(inputs), opset=14)]
