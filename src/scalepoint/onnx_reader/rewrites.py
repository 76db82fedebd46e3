"""Rewrites: what exporters spell out in several nodes becomes one node again, before layers are made.

    Linear      MatMul(x, W) + b                                 W and b constant
    Swish       x * Sigmoid(x)
    HardSwish   x * HardSigmoid(x),  x * Clip(x + 3, 0, 6) / 6
    Gelu        0.5 * x * (1 + Erf(x / sqrt(2)))  in its orders; also with Tanh
    LayerNormalization   (x - mean) / sqrt(mean((x - mean)^2) + e) * w + b
    RMSNormalization     x / sqrt(mean(x^2) + e) * w
    AttentionScores      Softmax(scale * q @ k + mask) @ v    k transposed

A rule looks at the last node of a spelling and returns the node that replaces it. Nodes in between stay if others read
them, and are dropped as unused if not.
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


class Spelling:
    """The nodes of a graph by what they make, and its constants, for rules that look upwards."""

    def __init__(self, nodes: Sequence[Node], constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.makers = {name: node for node in nodes if has_all_inputs(node) for name in node.outputs if name}

    def maker(self, name: str, *operators: str) -> Node | None:
        """Return the node that makes a value if it is one of these operators."""
        node = self.makers.get(name)
        return node if node is not None and node.operator in operators else None

    def tensor(self, name: str) -> Tensor | None:
        value = self.constants.get(name)
        return value if isinstance(value, Tensor) else None

    def number(self, name: str) -> float | None:
        """Return the number of a constant that has one."""
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
        """Return the value and the number of a node that joins the two, in either order."""
        if len(node.inputs) == 2:
            for value, constant in (node.inputs, node.inputs[::-1]):
                number = self.number(constant)
                if number is not None and self.number(value) is None:
                    return value, number
        return None


FLOAT = 1  # ONNX's number of float32
SOFTMAX_OF_LAST_AXIS = 13  # opset since which Softmax is over one axis, by default the last one

Rule = Callable[[Node, Spelling], Node | None]


def rewrite(nodes: Sequence[Node], constants: Mapping[str, Any]) -> list[Node]:
    """Apply each rule to all nodes. A node that a rule made can be part of a later spelling."""
    nodes = list(nodes)
    for rule in RULES:
        spelling = Spelling(nodes, constants)
        for index, node in enumerate(nodes):
            replacement = rule(node, spelling) if has_all_inputs(node) else None
            if replacement is not None:
                nodes[index] = replacement
                spelling.makers.update(dict.fromkeys(filter(None, replacement.outputs), replacement))
    return nodes


def _replace(node: Node, operator: str, *inputs: str, **attributes: Any) -> Node:
    return replace(node, operator=operator, inputs=inputs, attributes=attributes, opset=24)


def _other_input(node: Node, name: str) -> str | None:
    """Return the input of a binary node that is not `name`."""
    if len(node.inputs) != 2 or name not in node.inputs:
        return None
    return node.inputs[1] if node.inputs[0] == name else node.inputs[0]


def join_linear(node: Node, spelling: Spelling) -> Node | None:
    if node.operator != "Add" or len(node.inputs) != 2:
        return None
    for product_name, bias_name in (node.inputs, node.inputs[::-1]):
        product, bias = spelling.maker(product_name, "MatMul"), spelling.tensor(bias_name)
        weight = None if product is None else spelling.tensor(product.inputs[1])
        if product is None or weight is None or bias is None or weight.ndim != 2:
            continue
        if bias.ndim == 1 and bias.shape[0] == weight.shape[1] and weight.is_floating_point():
            return replace(_replace(node, "Linear", *product.inputs, bias_name), name=product.name)
    return None


def join_swish(node: Node, spelling: Spelling) -> Node | None:
    if node.operator != "Mul" or len(node.inputs) != 2:
        return None
    for x, factor in (node.inputs, node.inputs[::-1]):
        gate = spelling.maker(factor, "Sigmoid", "HardSigmoid")
        if gate is None or gate.inputs[0] != x:
            continue
        if gate.operator == "Sigmoid":
            return _replace(node, "Swish", x)
        if math.isclose(gate.get("alpha", 0.2), 1 / 6, rel_tol=1e-4) and gate.get("beta", 0.5) == 0.5:
            return _replace(node, "HardSwish", x)
    return None


def join_hard_swish(node: Node, spelling: Spelling) -> Node | None:
    """x * Clip(x + 3, 0, 6) / 6, where the division may come before or after the product."""
    if node.operator not in ("Div", "Mul"):
        return None
    scaled = _divided_by_6(node, spelling)
    if scaled is not None:
        product = spelling.maker(scaled, "Mul")
        for x, gate in () if product is None or len(product.inputs) != 2 else (product.inputs, product.inputs[::-1]):
            if _is_clipped_shift(gate, x, spelling):
                return _replace(node, "HardSwish", x)
    for x, factor in () if len(node.inputs) != 2 or node.operator != "Mul" else (node.inputs, node.inputs[::-1]):
        gate_node = spelling.maker(factor, "Div", "Mul")
        gate_name = None if gate_node is None else _divided_by_6(gate_node, spelling)
        if gate_name is not None and _is_clipped_shift(gate_name, x, spelling):
            return _replace(node, "HardSwish", x)
    return None


def _divided_by_6(node: Node, spelling: Spelling) -> str | None:
    if node.operator == "Div" and len(node.inputs) == 2 and spelling.is_number(node.inputs[1], 6):
        return node.inputs[0]
    parts = spelling.split_constant(node) if node.operator == "Mul" else None
    return parts[0] if parts is not None and math.isclose(parts[1], 1 / 6, rel_tol=1e-4) else None


def _is_clipped_shift(name: str, x: str, spelling: Spelling) -> bool:
    """Whether a value is Clip(x + 3, 0, 6)."""
    clip = spelling.maker(name, "Clip")
    if clip is None:
        return False
    if len(clip.inputs) == 3:
        low, high = (spelling.number(limit) for limit in clip.inputs[1:])
    else:
        low, high = clip.get("min"), clip.get("max")
    shift = spelling.maker(clip.inputs[0], "Add")
    return (low, high) == (0, 6) and shift is not None and spelling.split_constant(shift) == (x, 3.0)


def join_gelu(node: Node, spelling: Spelling) -> Node | None:
    """A product of x, 0.5 and 1 + Erf(x / sqrt(2)) or 1 + Tanh(...), in any order."""
    if node.operator != "Mul":
        return None
    factors, number = _factors(node.outputs[0], spelling)
    if len(factors) != 2 or not math.isclose(number, 0.5, rel_tol=1e-4):
        return None
    for x, gate in (factors, factors[::-1]):
        shift = spelling.maker(gate, "Add")
        parts = None if shift is None else spelling.split_constant(shift)
        if parts is None or parts[1] != 1:
            continue
        inner = spelling.maker(parts[0], "Erf", "Tanh")
        if inner is not None and inner.operator == "Erf" and _is_scaled(inner.inputs[0], x, math.sqrt(0.5), spelling):
            return _replace(node, "Gelu", x)
        if inner is not None and inner.operator == "Tanh" and _is_tanh_argument(inner.inputs[0], x, spelling):
            return _replace(node, "Gelu", x, approximate="tanh")
    return None


def _factors(name: str, spelling: Spelling, depth: int = 3) -> tuple[list[str], float]:
    """Take a product apart into values and the product of its numbers."""
    node = spelling.maker(name, "Mul", "Div") if depth else None
    if node is None or len(node.inputs) != 2:
        return [name], 1.0
    if node.operator == "Div":
        divisor = spelling.number(node.inputs[1])
        if not divisor:
            return [name], 1.0
        values, number = _factors(node.inputs[0], spelling, depth - 1)
        return values, number / divisor
    total, values = 1.0, []
    for part in node.inputs:
        constant = spelling.number(part)
        if constant is not None:
            total *= constant
            continue
        inner, number = _factors(part, spelling, depth - 1)
        values += inner
        total *= number
    return values, total


def _is_scaled(name: str, x: str, factor: float, spelling: Spelling) -> bool:
    values, number = _factors(name, spelling, depth=1)
    return values == [x] and math.isclose(number, factor, rel_tol=1e-4)


def _is_tanh_argument(name: str, x: str, spelling: Spelling) -> bool:
    """Whether a value is sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    values, number = _factors(name, spelling, depth=1)
    if len(values) != 1 or not math.isclose(number, math.sqrt(2 / math.pi), rel_tol=1e-4):
        return False
    total = spelling.maker(values[0], "Add")
    cubic = None if total is None else _other_input(total, x)
    if cubic is None:
        return False
    factors, weight = _factors(cubic, spelling)
    powers = [spelling.maker(factor, "Pow") for factor in factors]
    is_power = len(powers) == 1 and powers[0] is not None and powers[0].inputs[0] == x
    is_cube = factors == [x] * 3 or (is_power and powers[0] is not None and spelling.is_number(powers[0].inputs[1], 3))
    return is_cube and math.isclose(weight, 0.044715, rel_tol=1e-3)


# --- norms ---------------------------------------------------------------------------------------------------------


def join_norm_scale(node: Node, spelling: Spelling) -> Node | None:
    """(normalized x) * w of a LayerNorm or RMSNorm over the last axis."""
    if node.operator != "Mul" or len(node.inputs) != 2:
        return None
    for name, weight_name in (node.inputs, node.inputs[::-1]):
        weight = spelling.tensor(weight_name)
        if weight is None or weight.ndim != 1 or not weight.is_floating_point():
            continue
        cast = spelling.maker(name, "Cast")  # of models that compute norms in float32 whatever the other types are
        is_float = cast is not None and cast.get("to") == FLOAT
        normalized = _normalized(cast.inputs[0] if cast is not None and is_float else name, spelling)
        if normalized is not None:
            kind, x, epsilon = normalized
            return _replace(node, kind, x, weight_name, axis=-1, epsilon=epsilon)
    return None


def join_norm_shift(node: Node, spelling: Spelling) -> Node | None:
    """LayerNormalization without a bias, plus a constant vector."""
    if node.operator != "Add" or len(node.inputs) != 2:
        return None
    for name, bias_name in (node.inputs, node.inputs[::-1]):
        norm, bias = spelling.maker(name, "LayerNormalization"), spelling.tensor(bias_name)
        is_free = norm is not None and len(norm.inputs) == 2 and len(norm.outputs) == 1 and norm.get("axis", -1) == -1
        if norm is None or not is_free or bias is None or bias.ndim != 1 or not bias.is_floating_point():
            continue
        weight = spelling.tensor(norm.inputs[1])
        if weight is not None and weight.shape == bias.shape:
            return replace(norm, inputs=(*norm.inputs, bias_name), outputs=node.outputs)
    return None


def _normalized(name: str, spelling: Spelling) -> tuple[str, str, float] | None:
    """Return the operator, its input and epsilon if a value is x / sqrt(mean(x^2) + e), perhaps of x - mean(x)."""
    node = spelling.maker(name, "Div", "Mul")
    if node is None or len(node.inputs) != 2:
        return None
    pairs = [node.inputs] if node.operator == "Div" else [node.inputs, node.inputs[::-1]]
    for x, root in pairs:
        root_name = root
        if node.operator == "Mul":
            inverse = spelling.maker(root, "Reciprocal", "Div")
            if inverse is None or (inverse.operator == "Div" and not spelling.is_number(inverse.inputs[0], 1)):
                continue
            root_name = inverse.inputs[-1]
        squares = _root_of_shifted(root_name, spelling)
        mean = None if squares is None else _mean_over_last(squares[0], spelling)
        if squares is None or mean is None or not _is_square(mean, x, spelling):
            continue
        centered = _centered(x, spelling)
        if centered is not None:
            return "LayerNormalization", centered, squares[1]
        return "RMSNormalization", x, squares[1]
    return None


def _root_of_shifted(name: str, spelling: Spelling) -> tuple[str, float] | None:
    """Return v and e of sqrt(v + e)."""
    root = spelling.maker(name, "Sqrt", "Pow")
    if root is None or (root.operator == "Pow" and not spelling.is_number(root.inputs[1], 0.5)):
        return None
    shift = spelling.maker(root.inputs[0], "Add")
    return None if shift is None else spelling.split_constant(shift)


def _mean_over_last(name: str, spelling: Spelling) -> str | None:
    mean = spelling.maker(name, "ReduceMean")
    if mean is None or not mean.get("keepdims", 1):
        return None
    axes = [spelling.number(mean.inputs[1])] if len(mean.inputs) > 1 else list(mean.get("axes", ()))
    return mean.inputs[0] if axes == [-1] else None


def _is_square(name: str, x: str, spelling: Spelling) -> bool:
    square = spelling.maker(name, "Pow", "Mul")
    if square is None:
        return False
    if square.operator == "Mul":
        return square.inputs == (x, x)
    return spelling.is_number(square.inputs[1], 2) and _same_difference(square.inputs[0], x, spelling)


def _same_difference(name: str, x: str, spelling: Spelling) -> bool:
    """Whether two values are the same: some exporters write x - mean twice."""
    first, second = spelling.maker(name, "Sub"), spelling.maker(x, "Sub")
    return name == x or (first is not None and second is not None and first.inputs == second.inputs)


def _centered(name: str, spelling: Spelling) -> str | None:
    """Return x if a value is x - mean(x)."""
    difference = spelling.maker(name, "Sub")
    if difference is None or _mean_over_last(difference.inputs[1], spelling) != difference.inputs[0]:
        return None
    return difference.inputs[0]


# --- attention -----------------------------------------------------------------------------------------------------


def join_attention(node: Node, spelling: Spelling) -> Node | None:
    """Softmax(scale * q @ k + mask) @ v. torch multiplies q and k by the root of the scale, and turns NaN rows to 0."""
    if node.operator != "MatMul":
        return None
    softmax = spelling.maker(_without_nan(node.inputs[0], spelling), "Softmax")
    if softmax is None or softmax.get("axis", -1 if softmax.opset >= SOFTMAX_OF_LAST_AXIS else 1) not in (-1, 3):
        return None
    scores = softmax.inputs[0]
    masked = spelling.maker(scores, "Add")
    pairs = [(scores, "")] if masked is None else [masked.inputs, masked.inputs[::-1]]
    for scaled_product, mask in pairs:
        products, scale = _factors(scaled_product, spelling)
        product = spelling.maker(products[0], "MatMul") if len(products) == 1 else None
        if product is None:
            continue
        (query, query_scale), (key, key_scale) = (_scaled_value(name, spelling) for name in product.inputs)
        inputs = (query, key, node.inputs[1], *([mask] if mask else []))
        scale *= query_scale * key_scale
        return _replace(node, "AttentionScores", *inputs, scale=scale, axis=softmax.get("axis", -1))
    return None


def _without_nan(name: str, spelling: Spelling) -> str:
    """Return p if a value is Where(IsNaN(p), 0, p)."""
    choice = spelling.maker(name, "Where")
    test = None if choice is None else spelling.maker(choice.inputs[0], "IsNaN")
    if choice is None or test is None or test.inputs[0] != choice.inputs[2]:
        return name
    return choice.inputs[2] if spelling.is_number(choice.inputs[1], 0) else name


def _scaled_value(name: str, spelling: Spelling) -> tuple[str, float]:
    values, number = _factors(name, spelling)
    return (values[0], number) if len(values) == 1 else (name, 1.0)


RULES: tuple[Rule, ...] = (
    join_swish,
    join_hard_swish,
    join_gelu,
    join_norm_scale,
    join_norm_shift,
    join_attention,
    join_linear,
)
