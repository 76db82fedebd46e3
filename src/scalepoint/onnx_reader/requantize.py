"""Takes the quantizers out of a quantized file, so that it can be quantized anew.

Weights become real numbers: DequantizeLinear of constants is computed while the file is read. Quantizers of activations
are left out, and integer operators become their float counterparts.
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
        nodes += _without_quantizer(node, constants)
    return replace(graph, nodes=tuple(nodes))


def _without_quantizer(node: Node, constants: set[str]) -> list[Node]:
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
    raise OnnxReadError(f"{node}: the weights of {node.operator} cannot be read back as real numbers")


def _dequantize(node: Node, weight: str, scale: str, zero: str, axis: int) -> Node:
    inputs = (weight, scale, zero) if zero else (weight, scale)
    return Node("DequantizeLinear", f"{node.name}_weight", inputs, (f"{weight}_real",), {"axis": axis}, 13)


def _float_conv(node: Node) -> list[Node]:
    """A QLinearConv as DequantizeLinear and Conv. Its bias is in steps of input scale times weight scale."""
    x, x_scale, _, weight, scale, zero, _, _, *bias = node.inputs
    nodes = [_dequantize(node, weight, scale, zero, axis=0)]
    inputs = [x, f"{weight}_real"]
    if bias and bias[0]:
        step, real = f"{bias[0]}_step", f"{bias[0]}_real"
        nodes.append(Node("Mul", f"{node.name}_bias_scale", (x_scale, scale), (step,)))
        nodes.append(Node("DequantizeLinear", f"{node.name}_bias", (bias[0], step), (real,), {"axis": 0}, 13))
        inputs.append(real)
    return [*nodes, replace(node, operator="Conv", inputs=tuple(inputs))]
