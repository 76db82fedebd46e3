"""Removes the quantizers of a quantized file, so that it can be quantized again.

quantizer of an activation, DynamicQuantizeLinear     Identity
DequantizeLinear of codes that the file contains      stays: it is computed while the module is built
DequantizeLinear of an activation                     Identity
operator on codes, such as QLinearConv                DequantizeLinear of its constants, then the float operator
quantizer or operator whose codes start at 0.0        the same and Relu, or Clip(0, 6)

The last row: quantize_static removes a Relu or Clip before a quantizer whose range has the same limits. A Clip to
other limits cannot be told from an ordinary range, so it is lost.

In a dynamically quantized file the scale of a weight is read after its integer product:

    DynamicQuantizeLinear(x) -> codes, x_scale;   Cast(MatMulInteger(codes, weight)) * (x_scale * weight_scale)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose

import torch
from onnx_ir import DataType

from scalepoint.errors import OnnxReadError, short_repr
from scalepoint.onnx_reader.fused import SPLIT_OPSET, Parts
from scalepoint.onnx_reader.graph import Graph, collect_names, constant_value
from scalepoint.onnx_reader.operators import Node, require
from scalepoint.onnx_reader.quantized import CODE_RANGES, DEQUANTIZE_NBITS, QUANTIZED_OPERATORS

# Operators after which an activation makes a difference; the results of others, such as Softmax, have limits already.
_BEFORE_ACTIVATIONS = frozenset(
    ("Add", "BatchNormalization", "Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "MatMul", "Mul", "Sub")
)
# Of the unsigned types that QuantizeLinear can have as output_dtype.
_HIGHEST_CODES = {DataType.UINT8: 255, DataType.UINT16: 65535, DataType.UINT4: 15, DataType.UINT2: 3}


@dataclass(frozen=True)
class Codes:
    """Positions of an input of codes, of its scale and of its zero point. A scale of None is read after the product."""

    value: int
    scale: int | None
    zero_point: int


def _codes(first: int) -> Codes:
    return Codes(first, first + 1, first + 2)


@dataclass(frozen=True)
class FloatForm:
    """What a quantized operator computes in float.

    Attributes:
        operator: The float operator.
        inputs: Its inputs: codes, or the position of an input that is not quantized.
        bias: Position of a float bias that is added to the result.
        integer_bias: Position of a bias of codes, whose scale is the product of the scales of input and weight.
        result_scale: Position of the scale of the result; the next input is its zero point.
    """

    operator: str
    inputs: tuple[Codes | int, ...]
    bias: int | None = None
    integer_bias: int | None = None
    result_scale: int | None = None


_ONE, _TWO = (_codes(0),), (_codes(0), _codes(3))
_FLOAT_FORMS: Mapping[str, FloatForm] = {
    "ConvInteger": FloatForm("Conv", (Codes(0, None, 2), Codes(1, None, 3))),
    "MatMulInteger": FloatForm("MatMul", (Codes(0, None, 2), Codes(1, None, 3))),
    "DynamicQuantizeMatMul": FloatForm("MatMul", (0, Codes(1, 2, 3)), bias=4),
    "MatMulIntegerToFloat": FloatForm("MatMul", (Codes(0, 2, 4), Codes(1, 3, 5)), bias=6),
    "QAttention": FloatForm("com.microsoft::Attention", (Codes(0, 3, 6), Codes(1, 4, 7), 2, 5, 8)),
    "QGemm": FloatForm("Gemm", _TWO, integer_bias=6, result_scale=7),
    "QLinearAdd": FloatForm("Add", _TWO, result_scale=6),
    "QLinearAveragePool": FloatForm("AveragePool", _ONE),
    "QLinearConv": FloatForm("Conv", _TWO, integer_bias=8, result_scale=6),
    "QLinearGlobalAveragePool": FloatForm("GlobalAveragePool", _ONE),
    "QLinearLeakyRelu": FloatForm("LeakyRelu", _ONE),
    "QLinearMatMul": FloatForm("MatMul", _TWO, result_scale=6),
    "QLinearMul": FloatForm("Mul", _TWO, result_scale=6),
    "QLinearSigmoid": FloatForm("Sigmoid", _ONE),
    "QLinearSoftmax": FloatForm("Softmax", _ONE),
    "QLinearWhere": FloatForm("Where", (0, _codes(1), _codes(4))),
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
    return replace(graph, nodes=tuple(_QuantizerRemoval(graph).remove()))


class _QuantizerRemoval:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = {name: node for node in graph.nodes for name in node.outputs if name}
        self.products = _find_scaled_products(graph.nodes, self.producers)
        self.constants = dict(graph.constants)
        for node in graph.nodes:
            if node.operator == "Constant" and "value" in node.attributes:
                self.constants[node.outputs[0]] = constant_value(node)
        self.used_names = collect_names(graph)
        self.real: set[str] = set()  # values that are codes in the file, and real numbers without its quantizers

    def remove(self) -> list[Node]:
        scaled = {product.output for product in self.products.values()}
        nodes: list[Node] = []
        for node in self.graph.nodes:
            is_cast = node.operator == "Cast" and node.inputs[:1] and node.inputs[0] in self.products
            if is_cast or (node.outputs and node.outputs[0] in scaled):
                continue  # the float operator computes what these two compute
            is_quantized = node.operator in QUANTIZED_OPERATORS
            is_damaged = is_quantized and (not node.inputs or not node.outputs)
            require(not is_damaged, f"{node}: a quantized node without inputs or outputs")
            nodes += self._to_float_nodes(node) if is_quantized else [node]
            data_inputs = node.inputs if node.operator in ("Concat", "Where") else node.inputs[:1]
            if (is_quantized and not self._is_of_constant(node)) or self.real.intersection(data_inputs):
                self.real.update(filter(None, node.outputs))
        return nodes

    def _is_of_constant(self, node: Node) -> bool:
        """Whether a node dequantizes codes that the file contains, or that are an input of it."""
        return node.operator.endswith("DequantizeLinear") and node.inputs[0] not in self.real

    def _to_float_nodes(self, node: Node) -> list[Node]:
        """Return the nodes that replace a quantizer or an operator on codes."""
        kind, parts = node.operator.removeprefix("com.microsoft::"), Parts(node, self.used_names)
        if kind == "DequantizeLinear" and self._is_of_constant(node):
            if node.get("block_size", 0):
                return [node]
            codes, scale, zero_point = map(parts.input, range(3))
            self._add_dequantize(parts, codes, scale, zero_point, axis=node.get("axis", 1))
        elif kind == "QuantizeLinear":
            parts.add("Identity", node.inputs[0])
            source = self.producers.get(node.inputs[0])
            if source is not None and source.operator in _BEFORE_ACTIVATIONS:
                self._add_activation(parts, node.inputs[0], 1)
        elif kind == "DequantizeLinear":
            parts.add("Identity", node.inputs[0])
        elif kind == "DynamicQuantizeLinear":
            for name in filter(None, node.outputs[1:]):
                parts.add("Constant", output=name, value_float=1.0)
            parts.add("Identity", node.inputs[0])
        elif kind == "MatMulNBits":
            weight = parts.add(DEQUANTIZE_NBITS, *map(parts.input, (1, 2, 3)), **node.attributes)
            product = parts.add("MatMul", node.inputs[0], weight)
            if parts.input(5):
                parts.add("Add", product, parts.input(5))
        elif kind == "QLinearConcat":
            form = FloatForm("Concat", tuple(_codes(index) for index in range(2, len(node.inputs), 3)))
            self._add_float_form(parts, form)
        elif kind in _FLOAT_FORMS:
            self._add_float_form(parts, _FLOAT_FORMS[kind])
        elif kind == "DynamicQuantizeLSTM":
            return _float_lstm(parts)
        else:
            raise OnnxReadError(f"{node}: the weights of {node.operator} cannot be dequantized")
        return parts.finish()

    def _add_dequantize(self, parts: Parts, codes: str, scale: str, zero_point: str, axis: int) -> str:
        """Add DequantizeLinear; before a Gather of a table of codes, so that the Gather becomes an embedding."""
        gather, number = self.producers.get(codes), self.constants.get(scale)
        is_gather = gather is not None and gather.operator == "Gather" and len(gather.inputs) == 2
        is_of_table = gather is not None and is_gather and gather.inputs[0] in self.constants
        if gather is None or not is_of_table or number is None or number.numel() != 1:
            return parts.add("DequantizeLinear", codes, scale, zero_point, axis=axis)
        table = parts.add("DequantizeLinear", gather.inputs[0], scale, zero_point)
        return parts.add("Gather", table, gather.inputs[1], **gather.attributes)

    def _add_float_form(self, parts: Parts, form: FloatForm) -> None:
        """Add DequantizeLinear of the codes that are constants, the float operator, and its bias."""
        node = parts.node
        require(not node.get("channels_last", 0), f"{node}: channels_last")
        product = self.products.get(node.outputs[0])
        inputs = [
            parts.input(source) if isinstance(source, int) else self._real_value(parts, source, index, form, product)
            for index, source in enumerate(form.inputs)
        ]
        if form.integer_bias is not None and parts.input(form.integer_bias):
            scale = parts.add("Mul", parts.input(1), parts.input(4))
            inputs.append(parts.add("DequantizeLinear", parts.input(form.integer_bias), scale, axis=0))
        result = parts.add(form.operator, *inputs, **node.attributes)
        if form.operator == "Softmax" and node.get("opset", SPLIT_OPSET) < 13:
            parts.nodes[-1] = replace(parts.nodes[-1], opset=node.get("opset"))
        if form.result_scale is not None:
            self._add_activation(parts, result, form.result_scale)
        if form.bias is not None and parts.input(form.bias):
            parts.add("Add", result, parts.input(form.bias))
        if product is not None:
            parts.node = replace(node, outputs=(product.output,))

    def _add_activation(self, parts: Parts, result: str, scale_index: int) -> None:
        """Add the activation that a range from 0 replaces: Relu, or Clip(0, 6)."""
        scale = self.constants.get(parts.input(scale_index))
        if parts.input(scale_index + 1):
            step_count = self._steps_above_zero(parts.input(scale_index + 1))
        else:
            step_count = self._default_steps_above_zero(parts.node)
        if scale is None or scale.numel() != 1 or step_count is None:
            return
        if isclose(step_count * scale.item(), 6, rel_tol=1e-3):
            parts.add("Clip", result, min=0.0, max=6.0)
            parts.nodes[-1] = replace(parts.nodes[-1], opset=6)  # where limits are attributes
        else:
            parts.add("Relu", result)

    def _steps_above_zero(self, zero_point_name: str) -> int | None:
        """Return by how much the highest code exceeds the zero point, or None if that is not the lowest code."""
        zero_point = self.constants.get(zero_point_name)
        if zero_point is None or zero_point.numel() != 1 or zero_point.dtype not in CODE_RANGES:
            return None
        lowest, highest = CODE_RANGES[zero_point.dtype]
        return highest - lowest if zero_point.item() == lowest else None

    def _default_steps_above_zero(self, node: Node) -> int | None:
        """Return the same for an omitted zero point. It is 0, which is not the lowest code of a signed type."""
        if node.operator.endswith("QuantizeLinear"):
            output_type = node.get("output_dtype", 0) or DataType.UINT8
            require(isinstance(output_type, int), f"{node}: the output_dtype {short_repr(output_type)}")
            return _HIGHEST_CODES.get(output_type)
        if node.operator not in ("com.microsoft::QLinearAdd", "com.microsoft::QLinearMul"):
            return None  # the result of QGemm is real without a zero point
        # The result of these two has the type of their inputs, whose zero points are the inputs 2 and 5.
        zero_points = [self.constants.get(name) for name in (*node.inputs[2:3], *node.inputs[5:6])]
        is_unsigned = any(zero_point is not None and zero_point.dtype == torch.uint8 for zero_point in zero_points)
        return _HIGHEST_CODES[DataType.UINT8] if is_unsigned else None

    def _real_value(
        self, parts: Parts, codes: Codes, index: int, form: FloatForm, product: ScaledProduct | None
    ) -> str:
        """Return an input as real numbers."""
        name = parts.input(codes.value)
        if name in self.real or not name:
            return name
        if codes.scale is not None:
            scale = parts.input(codes.scale)
        else:
            scale = parts.add_number(1.0) if product is None or index == 0 else product.weight_scale
        # Scales per channel are those of the outputs of a weight.
        is_transposed = form.operator == "Conv" or (form.operator == "Gemm" and parts.node.get("transB", 0))
        axis = 0 if is_transposed else -1
        return self._add_dequantize(parts, name, scale, parts.input(codes.zero_point), axis=axis)


def _find_scaled_products(nodes: Sequence[Node], producers: Mapping[str, Node]) -> dict[str, ScaledProduct]:
    """Find the integer products of a dynamically quantized file that are multiplied with scales, by output."""
    dynamic = {node.outputs[1] for node in nodes if node.operator == "DynamicQuantizeLinear" and len(node.outputs) > 1}
    weight_scales: dict[str, str] = {}  # x_scale * weight_scale -> weight_scale
    products: dict[str, ScaledProduct] = {}
    for node in nodes:
        if node.operator != "Mul" or len(node.inputs) != 2 or not node.outputs:
            continue
        for first, second in (node.inputs, node.inputs[::-1]):
            cast = producers.get(second)
            if first in dynamic and second not in dynamic:
                weight_scales[node.outputs[0]] = second
            elif first in weight_scales and cast is not None and cast.operator == "Cast" and cast.inputs:
                products[cast.inputs[0]] = ScaledProduct(weight_scales[first], node.outputs[0])
    return products


def _float_lstm(parts: Parts) -> list[Node]:
    """Return an LSTM with dequantized weights. Those of a DynamicQuantizeLSTM are transposed."""
    node = parts.node
    inputs = [parts.input(index) for index in range(8)]
    for index, scale in ((1, 8), (2, 10)):
        weight = parts.add("DequantizeLinear", inputs[index], parts.input(scale), parts.input(scale + 1), axis=0)
        inputs[index] = parts.add("TransposeLast", weight)
    parts.add("LSTM", *inputs, **node.attributes)
    parts.nodes[-1] = replace(parts.nodes[-1], outputs=node.outputs)
    return parts.nodes
