"""Removes the quantizers of a quantized file, so that it can be quantized again.

DequantizeLinear of a constant            stays: it is computed while the module is built
quantizer of an activation                Identity
QLinearConv, QLinearMatMul                DequantizeLinear of the weight, then Conv or MatMul
"""

from dataclasses import replace

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.graph import Graph
from scalepoint.onnx_reader.operators import Node
from scalepoint.onnx_reader.quantized import QUANTIZED_OPERATORS


def without_quantizers(graph: Graph) -> Graph:
    """Return the graph with float operators only."""
    constants = set(graph.constants) | {node.outputs[0] for node in graph.nodes if node.operator == "Constant"}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _to_float_nodes(node, constants)
    return replace(graph, nodes=tuple(nodes))


def _to_float_nodes(node: Node, constants: set[str]) -> list[Node]:
    """Return the nodes that replace a node."""
    kind = node.operator.removeprefix("com.microsoft::")
    if node.operator not in QUANTIZED_OPERATORS or (kind == "DequantizeLinear" and node.inputs[0] in constants):
        return [node]
    if kind in ("QuantizeLinear", "DequantizeLinear"):
        return [replace(node, operator="Identity", inputs=node.inputs[:1], attributes={})]
    if kind == "QLinearConv":
        return _float_conv(node)
    if kind == "QLinearMatMul":
        x, _, _, weight, scale, zero, *_ = node.inputs
        product = replace(node, operator="MatMul", inputs=(x, f"{weight}_real"), attributes={})
        return [_dequantize(node, weight, scale, zero, axis=1), product]
    raise OnnxReadError(f"{node}: the weights of {node.operator} cannot be dequantized")


def _dequantize(node: Node, weight: str, scale: str, zero: str, axis: int) -> Node:
    inputs = (weight, scale, zero) if zero else (weight, scale)
    return Node("DequantizeLinear", f"{node.name}_weight", inputs, (f"{weight}_real",), {"axis": axis}, 13)


def _float_conv(node: Node) -> list[Node]:
    """Return DequantizeLinear and Conv for a QLinearConv. The scale of its bias is input scale * weight scale."""
    x, x_scale, _, weight, scale, zero, _, _, *bias = node.inputs
    nodes = [_dequantize(node, weight, scale, zero, axis=0)]
    inputs = [x, f"{weight}_real"]
    if bias and bias[0]:
        bias_scale, real_bias = f"{bias[0]}_step", f"{bias[0]}_real"
        nodes.append(Node("Mul", f"{node.name}_bias_scale", (x_scale, scale), (bias_scale,)))
        nodes.append(
            Node("DequantizeLinear", f"{node.name}_bias", (bias[0], bias_scale), (real_bias,), {"axis": 0}, 13)
        )
        inputs.append(real_bias)
    return [*nodes, replace(node, operator="Conv", inputs=tuple(inputs))]
