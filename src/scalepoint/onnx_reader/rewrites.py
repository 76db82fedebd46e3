"""Rewrites: joins the nodes into which exporters split one layer, before modules are made.

    Linear      MatMul(x, W) + b                                 W and b constant
    Swish       x * Sigmoid(x)
    HardSwish   x * HardSigmoid(x),  x * Clip(x + 3, 0, 6) / 6
    Gelu        0.5 * x * (1 + Erf(x / sqrt(2)))  in its orders; also with Tanh
    LayerNormalization   (x - mean) / sqrt(mean((x - mean)^2) + e) * w + b
    RMSNormalization     x / sqrt(mean(x^2) + e) * w
    AttentionScores      Softmax(scale * q @ k + mask) @ v    k transposed

A rule gets the last node of such a group, finds the others by following inputs, and returns the node that replaces the
last one. The others are dropped later, unless another node reads them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from scalepoint.onnx_reader.operators import Node
from scalepoint.onnx_reader.values import KnownArray

# Inputs of the operators that rules take apart; all others have at least one.
INPUT_COUNTS = {"Add": 2, "Div": 2, "MatMul": 2, "Mul": 2, "Pow": 2, "Sub": 2, "Where": 3}


def has_all_inputs(node: Node) -> bool:
    """Whether a node has as many inputs as its operator needs: those of a damaged file may not."""
    count = len(node.inputs)
    return count == INPUT_COUNTS.get(node.operator, max(count, 1))


class GraphLookup:
    """The constants of a graph, and the node that computes each value: for rules that follow inputs."""

    def __init__(self, nodes: Sequence[Node], constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.producers = {name: node for node in nodes if has_all_inputs(node) for name in node.outputs if name}

    def producer(self, name: str, *operators: str) -> Node | None:
        """Return the node that computes a value if it is one of these operators."""
        node = self.producers.get(name)
        return node if node is not None and node.operator in operators else None

    def tensor(self, name: str) -> Tensor | None:
        value = self.constants.get(name)
        return value if isinstance(value, Tensor) else None

    def number(self, name: str) -> float | None:
        """Return a constant that is one number; None for other values."""
        value = self.constants.get(name)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.item())
        if isinstance(value, KnownArray) and value.numbers.size == 1 and isinstance(value.to_list()[0], int | float):
            return float(value.to_list()[0])
        return None

    def is_number(self, name: str, number: float) -> bool:
        value = self.number(name)
        return value is not None and math.isclose(value, number, rel_tol=1e-4)

    def split_constant(self, node: Node) -> tuple[str, float] | None:
        """Return the variable and the number that a binary node combines, in either order; None for other nodes."""
        if len(node.inputs) == 2:
            for value, constant in (node.inputs, node.inputs[::-1]):
                number = self.number(constant)
                if number is not None and self.number(value) is None:
                    return value, number
        return None


FLOAT = 1  # ONNX's number of float32
SOFTMAX_OF_LAST_AXIS = 13  # opset since which Softmax is over one axis, by default the last one
JOINED_OPSET = 24  # of the nodes that rules return: a new version, so that operators have their newest meaning

Rule = Callable[[Node, GraphLookup], Node | None]


def rewrite(nodes: Sequence[Node], constants: Mapping[str, Any]) -> list[Node]:
    """Apply each rule to all nodes. A later rule also sees the nodes that an earlier rule returned."""
    nodes = list(nodes)
    for rule in RULES:
        graph = GraphLookup(nodes, constants)
        for index, node in enumerate(nodes):
            replacement = rule(node, graph) if has_all_inputs(node) else None
            if replacement is not None:
                nodes[index] = replacement
                graph.producers.update(dict.fromkeys(filter(None, replacement.outputs), replacement))
    return nodes


def _replace(node: Node, operator: str, *inputs: str, **attributes: Any) -> Node:
    """Return a node of another operator with the same name and outputs."""
    return replace(node, operator=operator, inputs=inputs, attributes=attributes, opset=JOINED_OPSET)


def _other_input(node: Node, name: str) -> str | None:
    """Return the input of a binary node that is not `name`."""
    if len(node.inputs) != 2 or name not in node.inputs:
        return None
    return node.inputs[1] if node.inputs[0] == name else node.inputs[0]


def _both_orders(node: Node) -> Sequence[tuple[str, str]]:
    """Return the inputs of a binary node in both orders; nothing for other nodes."""
    if len(node.inputs) != 2:
        return ()
    first, second = node.inputs
    return (first, second), (second, first)


def join_linear(node: Node, graph: GraphLookup) -> Node | None:
    """Join MatMul(x, W) + b."""
    if node.operator != "Add":
        return None
    for product_name, bias_name in _both_orders(node):
        product, bias = graph.producer(product_name, "MatMul"), graph.tensor(bias_name)
        weight = None if product is None else graph.tensor(product.inputs[1])
        if product is None or weight is None or bias is None or weight.ndim != 2:
            continue
        if bias.ndim == 1 and bias.shape[0] == weight.shape[1] and weight.is_floating_point():
            return replace(_replace(node, "Linear", *product.inputs, bias_name), name=product.name)
    return None


def join_swish(node: Node, graph: GraphLookup) -> Node | None:
    """Join x * Sigmoid(x) and x * HardSigmoid(x)."""
    if node.operator != "Mul":
        return None
    for x, factor in _both_orders(node):
        gate = graph.producer(factor, "Sigmoid", "HardSigmoid")
        if gate is None or gate.inputs[0] != x:
            continue
        if gate.operator == "Sigmoid":
            return _replace(node, "Swish", x)
        if math.isclose(gate.get("alpha", 0.2), 1 / 6, rel_tol=1e-4) and gate.get("beta", 0.5) == 0.5:
            return _replace(node, "HardSwish", x)
    return None


def join_hard_swish(node: Node, graph: GraphLookup) -> Node | None:
    """Join x * Clip(x + 3, 0, 6) / 6, where the division may come before or after the product."""
    if node.operator not in ("Div", "Mul"):
        return None
    dividend = _divided_by_6(node, graph)
    product = None if dividend is None else graph.producer(dividend, "Mul")
    if product is not None:  # (x * clip) / 6
        for x, clip in _both_orders(product):
            if _is_clipped_shift(clip, x, graph):
                return _replace(node, "HardSwish", x)
    if node.operator == "Mul":  # x * (clip / 6)
        for x, factor in _both_orders(node):
            quotient = graph.producer(factor, "Div", "Mul")
            clip_name = None if quotient is None else _divided_by_6(quotient, graph)
            if clip_name is not None and _is_clipped_shift(clip_name, x, graph):
                return _replace(node, "HardSwish", x)
    return None


def _divided_by_6(node: Node, graph: GraphLookup) -> str | None:
    """Return x if a node computes x / 6 or x * (1 / 6)."""
    if node.operator == "Div" and len(node.inputs) == 2 and graph.is_number(node.inputs[1], 6):
        return node.inputs[0]
    parts = graph.split_constant(node) if node.operator == "Mul" else None
    return parts[0] if parts is not None and math.isclose(parts[1], 1 / 6, rel_tol=1e-4) else None


def _is_clipped_shift(name: str, x: str, graph: GraphLookup) -> bool:
    """Whether a value is Clip(x + 3, 0, 6)."""
    clip = graph.producer(name, "Clip")
    if clip is None:
        return False
    if len(clip.inputs) == 3:
        low, high = (graph.number(limit) for limit in clip.inputs[1:])
    else:
        low, high = clip.get("min"), clip.get("max")
    shift = graph.producer(clip.inputs[0], "Add")
    return (low, high) == (0, 6) and shift is not None and graph.split_constant(shift) == (x, 3.0)


def join_gelu(node: Node, graph: GraphLookup) -> Node | None:
    """Join the product of x, 0.5 and 1 + Erf(x / sqrt(2)) or 1 + Tanh(...), in any order."""
    if node.operator != "Mul":
        return None
    factors, number = _factors(node.outputs[0], graph)
    if len(factors) != 2 or not math.isclose(number, 0.5, rel_tol=1e-4):
        return None
    for x, gate in (factors, factors[::-1]):
        shift = graph.producer(gate, "Add")
        parts = None if shift is None else graph.split_constant(shift)
        if parts is None or parts[1] != 1:
            continue
        inner = graph.producer(parts[0], "Erf", "Tanh")
        if inner is not None and inner.operator == "Erf" and _is_scaled(inner.inputs[0], x, math.sqrt(0.5), graph):
            return _replace(node, "Gelu", x)
        if inner is not None and inner.operator == "Tanh" and _is_tanh_argument(inner.inputs[0], x, graph):
            return _replace(node, "Gelu", x, approximate="tanh")
    return None


def _factors(name: str, graph: GraphLookup, depth: int = 3) -> tuple[list[str], float]:
    """Split a product of products into its values and one number: 0.5 * (x * y) / 2 -> [x, y], 0.25."""
    node = graph.producer(name, "Mul", "Div") if depth else None
    if node is None or len(node.inputs) != 2:
        return [name], 1.0
    if node.operator == "Div":
        divisor = graph.number(node.inputs[1])
        if not divisor:
            return [name], 1.0
        values, number = _factors(node.inputs[0], graph, depth - 1)
        return values, number / divisor
    values, number = [], 1.0
    for factor in node.inputs:
        constant = graph.number(factor)
        if constant is not None:
            number *= constant
            continue
        inner_values, inner_number = _factors(factor, graph, depth - 1)
        values += inner_values
        number *= inner_number
    return values, number


def _is_scaled(name: str, x: str, factor: float, graph: GraphLookup) -> bool:
    """Whether a value is x * factor."""
    values, number = _factors(name, graph, depth=1)
    return values == [x] and math.isclose(number, factor, rel_tol=1e-4)


def _is_tanh_argument(name: str, x: str, graph: GraphLookup) -> bool:
    """Whether a value is sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    values, number = _factors(name, graph, depth=1)
    if len(values) != 1 or not math.isclose(number, math.sqrt(2 / math.pi), rel_tol=1e-4):
        return False
    total = graph.producer(values[0], "Add")
    cubic = None if total is None else _other_input(total, x)
    if cubic is None:
        return False
    factors, weight = _factors(cubic, graph)
    powers = [graph.producer(factor, "Pow") for factor in factors]
    is_power = len(powers) == 1 and powers[0] is not None and powers[0].inputs[0] == x
    is_cube = factors == [x] * 3 or (is_power and powers[0] is not None and graph.is_number(powers[0].inputs[1], 3))
    return is_cube and math.isclose(weight, 0.044715, rel_tol=1e-3)


# --- norms ---------------------------------------------------------------------------------------------------------


def join_norm_scale(node: Node, graph: GraphLookup) -> Node | None:
    """Join (normalized x) * w of a LayerNorm or RMSNorm over the last axis."""
    if node.operator != "Mul":
        return None
    for name, weight_name in _both_orders(node):
        weight = graph.tensor(weight_name)
        if weight is None or weight.ndim != 1 or not weight.is_floating_point():
            continue
        cast = graph.producer(name, "Cast")  # some models compute norms in float32, whatever the other types are
        is_float = cast is not None and cast.get("to") == FLOAT
        normalized = _normalized(cast.inputs[0] if cast is not None and is_float else name, graph)
        if normalized is not None:
            operator, x, epsilon = normalized
            return _replace(node, operator, x, weight_name, axis=-1, epsilon=epsilon)
    return None


def join_norm_shift(node: Node, graph: GraphLookup) -> Node | None:
    """Join a LayerNormalization without a bias and the Add of a constant vector."""
    if node.operator != "Add":
        return None
    for name, bias_name in _both_orders(node):
        norm, bias = graph.producer(name, "LayerNormalization"), graph.tensor(bias_name)
        if norm is None or bias is None or bias.ndim != 1 or not bias.is_floating_point():
            continue
        if len(norm.inputs) != 2 or len(norm.outputs) != 1 or norm.get("axis", -1) != -1:
            continue
        weight = graph.tensor(norm.inputs[1])
        if weight is not None and weight.shape == bias.shape:
            return replace(norm, inputs=(*norm.inputs, bias_name), outputs=node.outputs)
    return None


def _normalized(name: str, graph: GraphLookup) -> tuple[str, str, float] | None:
    """Return the operator, its input and epsilon if a value is normalized over its last axis; else None.

    Such a value is v / sqrt(mean(v^2) + e) or v * (1 / sqrt(mean(v^2) + e)), where v is x - mean(x) for
    LayerNormalization and x for RMSNormalization.
    """
    node = graph.producer(name, "Div", "Mul")
    if node is None or len(node.inputs) != 2:
        return None
    pairs = _both_orders(node) if node.operator == "Mul" else [(node.inputs[0], node.inputs[1])]
    for v, factor in pairs:
        root = _inverted(factor, graph) if node.operator == "Mul" else factor
        mean_and_epsilon = None if root is None else _root_of_shifted(root, graph)
        if mean_and_epsilon is None:
            continue
        mean, epsilon = mean_and_epsilon
        square = _mean_over_last(mean, graph)
        if square is None or not _is_square(square, v, graph):
            continue
        x = _centered(v, graph)
        return ("RMSNormalization", v, epsilon) if x is None else ("LayerNormalization", x, epsilon)
    return None


def _inverted(name: str, graph: GraphLookup) -> str | None:
    """Return x if a value is 1 / x."""
    inverse = graph.producer(name, "Reciprocal", "Div")
    if inverse is None or (inverse.operator == "Div" and not graph.is_number(inverse.inputs[0], 1)):
        return None
    return inverse.inputs[-1]


def _root_of_shifted(name: str, graph: GraphLookup) -> tuple[str, float] | None:
    """Return v and e of sqrt(v + e)."""
    root = graph.producer(name, "Sqrt", "Pow")
    if root is None or (root.operator == "Pow" and not graph.is_number(root.inputs[1], 0.5)):
        return None
    shift = graph.producer(root.inputs[0], "Add")
    return None if shift is None else graph.split_constant(shift)


def _mean_over_last(name: str, graph: GraphLookup) -> str | None:
    """Return x if a value is the mean of x over the last axis."""
    mean = graph.producer(name, "ReduceMean")
    if mean is None or not mean.get("keepdims", 1):
        return None
    axes = [graph.number(mean.inputs[1])] if len(mean.inputs) > 1 else list(mean.get("axes", ()))
    return mean.inputs[0] if axes == [-1] else None


def _is_square(name: str, x: str, graph: GraphLookup) -> bool:
    """Whether a value is x * x or x^2."""
    square = graph.producer(name, "Pow", "Mul")
    if square is None:
        return False
    if square.operator == "Mul":
        return square.inputs == (x, x)
    return graph.is_number(square.inputs[1], 2) and _are_equal(square.inputs[0], x, graph)


def _are_equal(name: str, x: str, graph: GraphLookup) -> bool:
    """Whether two values are the same, or the same difference: some exporters write x - mean(x) twice."""
    first, second = graph.producer(name, "Sub"), graph.producer(x, "Sub")
    return name == x or (first is not None and second is not None and first.inputs == second.inputs)


def _centered(name: str, graph: GraphLookup) -> str | None:
    """Return x if a value is x - mean(x)."""
    difference = graph.producer(name, "Sub")
    if difference is None or _mean_over_last(difference.inputs[1], graph) != difference.inputs[0]:
        return None
    return difference.inputs[0]


# --- attention -----------------------------------------------------------------------------------------------------


def join_attention(node: Node, graph: GraphLookup) -> Node | None:
    """Join Softmax(scale * q @ k + mask) @ v.

    torch multiplies q and k by the root of the scale, and replaces the NaN of rows without any key by 0.
    """
    if node.operator != "MatMul":
        return None
    softmax = graph.producer(_without_nan_check(node.inputs[0], graph), "Softmax")
    if softmax is None or softmax.get("axis", -1 if softmax.opset >= SOFTMAX_OF_LAST_AXIS else 1) not in (-1, 3):
        return None
    scores = softmax.inputs[0]
    masked = graph.producer(scores, "Add")
    pairs = [(scores, "")] if masked is None else _both_orders(masked)
    for scaled_product, mask in pairs:
        products, scale = _factors(scaled_product, graph)
        product = graph.producer(products[0], "MatMul") if len(products) == 1 else None
        if product is None:
            continue
        (query, query_scale), (key, key_scale) = (_split_scale(name, graph) for name in product.inputs)
        inputs = (query, key, node.inputs[1], *([mask] if mask else []))
        scale *= query_scale * key_scale
        return _replace(node, "AttentionScores", *inputs, scale=scale, axis=softmax.get("axis", -1))
    return None


def _without_nan_check(name: str, graph: GraphLookup) -> str:
    """Return p if a value is Where(IsNaN(p), 0, p), else the value itself."""
    choice = graph.producer(name, "Where")
    is_nan = None if choice is None else graph.producer(choice.inputs[0], "IsNaN")
    if choice is None or is_nan is None or is_nan.inputs[0] != choice.inputs[2]:
        return name
    return choice.inputs[2] if graph.is_number(choice.inputs[1], 0) else name


def _split_scale(name: str, graph: GraphLookup) -> tuple[str, float]:
    """Return x and the number if a value is x times a number, else the value and 1."""
    values, number = _factors(name, graph)
    return (values[0], number) if len(values) == 1 else (name, 1.0)


# join_norm_shift needs the result of join_norm_scale.
RULES: tuple[Rule, ...] = (
    join_swish,
    join_hard_swish,
    join_gelu,
    join_norm_scale,
    join_norm_shift,
    join_attention,
    join_linear,
)
