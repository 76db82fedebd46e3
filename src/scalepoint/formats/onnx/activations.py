"""Rewrites activation functions into operators for which ONNX Runtime has fast kernels.

rewrite               from                                             to
activations_of_codes  DequantizeLinear -> x * sigmoid(x)               QuickGelu(alpha=1) of com.microsoft
                      DequantizeLinear -> x * (0.5 * (1 + erf(..)))    Gelu of com.microsoft
                      DequantizeLinear -> x * (0.5 * (1 + tanh(..)))   FastGelu of com.microsoft
gelu_halved_last      x * (0.5 * (1 + erf(..)))                        (x * (1 + erf(..))) * 0.5
exp_activations       Mish                                             x * p / (p + 2), p = e * (e + 2), e = exp(x)
                      Elu with alpha of at most 1                      max(x, alpha * (exp(min(x, 0)) - 1))

gelu_halved_last changes no bit; results of the others are equal up to roundings of float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import pi, sqrt
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from scalepoint.formats.onnx.graph_edits import add_constant, find_only_reader, find_producer, replace_node

MICROSOFT_DOMAIN = "com.microsoft"
RELATIVE_TOLERANCE = 1e-6  # constants are stored as float32
MAX_MISH_EXPONENT = 20.0  # mish(x) is x in float32 above; exp(x)^2 overflows above 44


def activations_of_codes(model: Any) -> None:
    """Write SiLU and GELU of a dequantized tensor as one operator."""
    for multiply in list(model.graph):
        x = _find_silu_input(multiply)
        if find_producer(x, "DequantizeLinear"):
            _replace_by_kernel(model, multiply, "QuickGelu", x, {"alpha": 1.0})
    for is_curve, operator in ((_is_erf_of_gelu, "Gelu"), (_is_tanh_of_gelu, "FastGelu")):
        for gelu in _find_gelus(model, is_curve):
            if find_producer(gelu.x, "DequantizeLinear"):
                _replace_by_kernel(model, gelu.outer, operator, gelu.x)


def gelu_halved_last(model: Any) -> None:
    """Multiply by 0.5 last. No bit changes, because 0.5 is a power of two."""
    for gelu in _find_gelus(model, _is_erf_of_gelu):
        gelu.inner.replace_input_with(0, gelu.x)
        gelu.inner.replace_input_with(1, gelu.total)
        gelu.outer.replace_input_with(0, gelu.inner.outputs[0])
        gelu.outer.replace_input_with(1, gelu.half)


def exp_activations(model: Any) -> None:
    """Write Mish and Elu with Exp, which is vectorized; their own kernels, and that of Softplus, are not."""
    for node in list(model.graph):
        if node.op_type == "Mish":
            _write_mish(model.graph, node)
        elif node.op_type == "Elu":
            alpha = node.attributes.get_float("alpha", 1.0)
            if 0 < alpha <= 1:
                _write_elu(model.graph, node, alpha)


class _Gelu(NamedTuple):
    """outer = x * inner, inner = half * total, total = 1 + erf(..) or 1 + tanh(..)"""

    inner: Any
    outer: Any
    x: Any
    total: Any
    half: Any


def _find_gelus(model: Any, is_curve: Callable[[Any, Any], bool]) -> Iterator[_Gelu]:
    """Find x * (0.5 * (1 + curve)), as torch writes GELU. `is_curve` returns whether a node is the erf or tanh of x."""
    for inner in list(model.graph):
        half, total = _match_product(inner, partial(_is_number, number=0.5))
        outer = None if half is None else find_only_reader(inner)
        _, x = _match_product(outer, partial(is_, inner.outputs[0]))
        add = None if x is None else find_producer(total, "Add")
        if add is None or not any(_is_number(value, 1) for value in add.inputs):
            continue
        curves = [value.producer() for value in add.inputs]
        if any(curve is not None and is_curve(curve, x) for curve in curves):
            yield _Gelu(inner, outer, x, total, half)


def _is_erf_of_gelu(node: Any, x: Any) -> bool:
    """Whether a node is erf(x / sqrt(2)), with a quotient or a product."""
    if node.op_type != "Erf":
        return False
    quotient = find_producer(node.inputs[0], "Div")
    if quotient is not None:
        return x in quotient.inputs and _is_number(quotient.inputs[1], sqrt(2))
    factor, _ = _match_product(node.inputs[0].producer(), partial(_is_number, number=sqrt(0.5)))
    return factor is not None and x in node.inputs[0].producer().inputs


def _is_tanh_of_gelu(node: Any, x: Any) -> bool:
    """Whether a node is tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))."""
    scaled = node.inputs[0].producer() if node.op_type == "Tanh" else None
    _, total = _match_product(scaled, partial(_is_number, number=sqrt(2 / pi)))
    add = find_producer(total, "Add")
    if add is None or x not in add.inputs:
        return False
    cubic = next((value.producer() for value in add.inputs if value is not x), None)
    _, power = _match_product(cubic, partial(_is_number, number=0.044715))
    cube = find_producer(power, "Pow")
    return cube is not None and cube.inputs[0] is x and _is_number(cube.inputs[1], 3)


def _find_silu_input(multiply: Any) -> Any:
    """Return x of x * sigmoid(x); None for another node."""
    if multiply.op_type != "Mul" or None in multiply.inputs:
        return None
    for x, gate in (multiply.inputs, multiply.inputs[::-1]):
        sigmoid = find_producer(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            return x
    return None


def _match_product(node: Any, is_first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return the operand of a Mul for which `is_first` holds, and the other operand.

    Returns (None, None) for another node, for None, and if `is_first` holds for no operand.
    """
    if node is None or node.op_type != "Mul" or None in node.inputs:
        return None, None
    left, right = node.inputs
    if is_first(left):
        return left, right
    return (right, left) if is_first(right) else (None, None)


def _is_number(value: Any, number: float) -> bool:
    """Whether a value is a constant with this one element."""
    tensor = value.const_value
    if tensor is None or tensor.size != 1:
        return False
    return abs(float(tensor.numpy().reshape(())) - number) <= RELATIVE_TOLERANCE * number


def _replace_by_kernel(model: Any, last: Any, operator: str, x: Any, attributes: dict[str, Any] | None = None) -> None:
    """Replace the operations that end in `last` by one operator of ONNX Runtime. The first ones become unread."""
    replace_node(last, ir.node(operator, [x], attributes or {}, domain=MICROSOFT_DOMAIN))
    model.opset_imports[MICROSOFT_DOMAIN] = 1


def _write_mish(graph: Any, node: Any) -> None:
    x, two = node.inputs[0], _make_number(graph, 2.0)
    limited = ir.node("Min", [x, _make_number(graph, MAX_MISH_EXPONENT)])
    exponential = ir.node("Exp", [limited.outputs[0]])
    increased = ir.node("Add", [exponential.outputs[0], two])
    product = ir.node("Mul", [exponential.outputs[0], increased.outputs[0]])
    total = ir.node("Add", [product.outputs[0], two])
    gate = ir.node("Div", [product.outputs[0], total.outputs[0]])
    result = ir.node("Mul", [x, gate.outputs[0]])
    replace_node(node, limited, exponential, increased, product, total, gate, result)


def _write_elu(graph: Any, node: Any, alpha: float) -> None:
    x = node.inputs[0]
    limited = ir.node("Min", [x, _make_number(graph, 0.0)])
    exponential = ir.node("Exp", [limited.outputs[0]])
    new_nodes = [limited, exponential, ir.node("Sub", [exponential.outputs[0], _make_number(graph, 1.0)])]
    if alpha != 1:
        new_nodes.append(ir.node("Mul", [new_nodes[-1].outputs[0], _make_number(graph, alpha)]))
    replace_node(node, *new_nodes, ir.node("Max", [x, new_nodes[-1].outputs[0]]))


def _make_number(graph: Any, number: float) -> Any:
    """Return a float32 constant. Equal ones are shared."""
    return add_constant(graph, f"number.{number!r}", np.array(number, np.float32))
