"""Rewrites: joins the nodes into which exporters split one layer, before modules are made.

    Linear      MatMul(x, W) + b                                 W and b constant
    Swish       x * Sigmoid(x)
    HardSwish   x * HardSigmoid(x),  x * Clip(x + 3, 0, 6) / 6
    Gelu        0.5 * x * (1 + Erf(x / sqrt(2)))  in its orders; also with Tanh
    LayerNormalization   (x - mean) / sqrt(mean((x - mean)^2) + e) * w + b
    RMSNormalization     x / sqrt(mean(x^2) + e) * w
    AttentionScores      Softmax(scale * q @ k + mask) @ v    k transposed

A rule gets the last node of such a group, finds the others by following inputs (`formulas.py`), and returns the node
that replaces the last one. The others are dropped later, unless another node reads them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalepoint.onnx_reader.formulas import Formula, GraphLookup, both_orders, has_all_inputs
from scalepoint.onnx_reader.operators import Node

FLOAT = 1  # ONNX's number of float32
SOFTMAX_OF_LAST_AXIS = 13  # opset since which Softmax is over one axis, by default the last one
JOINED_OPSET = 24  # of the nodes that rules return: a new version, so that operators have their newest meaning

Rule = Callable[[Node, GraphLookup], Node | None]

_ROOT_OF_HALF = math.sqrt(0.5)
_ROOT_OF_2_BY_PI = math.sqrt(2 / math.pi)
ACTIVATIONS: tuple[tuple[Formula, str, Mapping[str, Any]], ...] = (
    (Formula("x * Sigmoid(x)"), "Swish", {}),
    (Formula(f"x * HardSigmoid(x, alpha={1 / 6}, beta=0.5)"), "HardSwish", {}),
    (Formula("x * Clip(x + 3, 0, 6) / 6"), "HardSwish", {}),
    (Formula(f"0.5 * x * (1 + Erf({_ROOT_OF_HALF} * x))"), "Gelu", {}),
    (
        Formula(f"0.5 * x * (1 + Tanh({_ROOT_OF_2_BY_PI} * (x + 0.044715 * x ** 3)))"),
        "Gelu",
        {"approximate": "tanh"},
    ),
)
NORMS = (  # a centered x also fits the second formula
    ("LayerNormalization", Formula("(x - mean(x)) / Sqrt(mean((x - mean(x)) ** 2) + e)")),
    ("RMSNormalization", Formula("x / Sqrt(mean(x ** 2) + e)")),
)


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


def join_activation(node: Node, graph: GraphLookup) -> Node | None:
    """Join the nodes of an activation that is written as a formula."""
    if node.operator in ("Mul", "Div"):
        for formula, operator, attributes in ACTIVATIONS:
            values = formula.match(node.outputs[0], graph)
            if values is not None:
                return _replace(node, operator, values["x"], **attributes)
    return None


def join_linear(node: Node, graph: GraphLookup) -> Node | None:
    """Join MatMul(x, W) + b."""
    if node.operator != "Add":
        return None
    for product_name, bias_name in both_orders(node):
        product, bias = graph.producer(product_name, "MatMul"), graph.tensor(bias_name)
        weight = None if product is None else graph.tensor(product.inputs[1])
        if product is None or weight is None or bias is None or weight.ndim != 2:
            continue
        if bias.ndim == 1 and bias.shape[0] == weight.shape[1] and weight.is_floating_point():
            return replace(_replace(node, "Linear", *product.inputs, bias_name), name=product.name)
    return None


def join_norm_scale(node: Node, graph: GraphLookup) -> Node | None:
    """Join (normalized x) * w of a LayerNorm or RMSNorm over the last axis."""
    if node.operator != "Mul":
        return None
    for name, weight_name in both_orders(node):
        weight = graph.tensor(weight_name)
        if weight is None or weight.ndim != 1 or not weight.is_floating_point():
            continue
        cast = graph.producer(name, "Cast")  # some models compute norms in float32, whatever the other types are
        is_float = cast is not None and cast.get("to") == FLOAT
        normalized = cast.inputs[0] if cast is not None and is_float else name
        for operator, formula in NORMS:
            values = formula.match(normalized, graph)
            if values is not None:
                return _replace(node, operator, values["x"], weight_name, axis=-1, epsilon=values["e"])
    return None


def join_norm_shift(node: Node, graph: GraphLookup) -> Node | None:
    """Join a LayerNormalization without a bias and the Add of a constant vector."""
    if node.operator != "Add":
        return None
    for name, bias_name in both_orders(node):
        norm, bias = graph.producer(name, "LayerNormalization"), graph.tensor(bias_name)
        if norm is None or bias is None or bias.ndim != 1 or not bias.is_floating_point():
            continue
        if len(norm.inputs) != 2 or len(norm.outputs) != 1 or norm.get("axis", -1) != -1:
            continue
        weight = graph.tensor(norm.inputs[1])
        if weight is not None and weight.shape == bias.shape:
            return replace(norm, inputs=(*norm.inputs, bias_name), outputs=node.outputs)
    return None


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
    pairs = [(scores, "")] if masked is None else both_orders(masked)
    for scaled_product, mask in pairs:
        product_name, scale = graph.split_scale(scaled_product)
        product = graph.producer(product_name, "MatMul")
        if product is None:
            continue
        (query, query_scale), (key, key_scale) = map(graph.split_scale, product.inputs)
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


# join_norm_shift needs the result of join_norm_scale.
RULES: tuple[Rule, ...] = (
    join_activation,
    join_norm_scale,
    join_norm_shift,
    join_attention,
    join_linear,
)
