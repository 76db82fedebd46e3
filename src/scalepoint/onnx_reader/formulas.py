"""Finds formulas such as `x * Sigmoid(x)` among the nodes of a graph, in all orders of their factors and summands.

A formula is written in Python's syntax:

    x, y, ...          any value; the same one wherever the name occurs
    e                  a constant that is one number
    0.5                a constant with this number
    a * b / c, a ** 3  the product of these factors, in any grouping and order: Mul, Div, Pow, Reciprocal
    a + b, a - b       Add in both orders; Sub
    mean(a), Sqrt(a)   ReduceMean over the last axis; Sqrt, or Pow with 0.5
    Erf(a)             the operator of this name; keywords are its attributes
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from torch import Tensor

from scalepoint.onnx_reader.operators import Node
from scalepoint.onnx_reader.values import KnownArray

# Inputs of the operators that rules take apart; all others have at least one.
INPUT_COUNTS = {"Add": 2, "Div": 2, "MatMul": 2, "Mul": 2, "Pow": 2, "Sub": 2, "Where": 3}
_MAX_DEPTH = 3  # of products of products
_DEFAULTS = {"alpha": 0.2, "beta": 0.5}  # attributes of HardSigmoid
_TOLERANCE = 1e-4  # relative; exporters write constants such as sqrt(0.5) with few digits

Values = Mapping[str, Any]  # name in a formula -> name of a value in the graph, or a number
Factors = tuple[tuple[tuple[str, int], ...], float]  # values with an exponent of 1 or -1, and a number


def has_all_inputs(node: Node) -> bool:
    """Whether a node has as many inputs as its operator needs: those of a damaged file may not."""
    count = len(node.inputs)
    return count == INPUT_COUNTS.get(node.operator, max(count, 1))


def both_orders(node: Node) -> Sequence[tuple[str, str]]:
    """Return the inputs of a binary node in both orders; nothing for other nodes."""
    if len(node.inputs) != 2:
        return ()
    first, second = node.inputs
    return (first, second), (second, first)


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
        return value is not None and math.isclose(value, number, rel_tol=_TOLERANCE)

    def factors(self, name: str, exponent: int = 1, depth: int = _MAX_DEPTH) -> Iterator[Factors]:
        """Yield the ways to write a value as a product: 0.5 * (x * y) is [x, y] and 0.5, or [x * y] and 0.5."""
        number = self.number(name)
        if number:
            yield (), number**exponent
            return
        yield ((name, exponent),), 1.0
        node = self.producer(name, "Mul", "Div", "Pow", "Reciprocal") if depth else None
        if node is None:
            return
        exponents = [exponent] * 2
        if node.operator == "Pow":
            power = self.number(node.inputs[1])
            if power not in (2, 3):
                return
            parts = [node.inputs[0]] * int(power)
            exponents = [exponent] * len(parts)
        elif node.operator == "Reciprocal":
            parts, exponents = [node.inputs[0]], [-exponent]
        else:
            parts = list(node.inputs)
            exponents[1] = exponent if node.operator == "Mul" else -exponent
        products: list[Factors] = [((), 1.0)]
        for part, part_exponent in zip(parts, exponents, strict=True):
            more = list(self.factors(part, part_exponent, depth - 1))
            products = [(values + new, factor * by) for values, factor in products for new, by in more]
        yield from products

    def split_scale(self, name: str) -> tuple[str, float]:
        """Return x and the number if a value is x times a number, else the value and 1."""
        products = [(values[0], number) for values, number in self.factors(name) if len(values) == 1]
        (value, exponent), number = products[-1] if products else ((name, 1), 1.0)
        return (value, number) if exponent == 1 else (name, 1.0)


class Formula:
    """A formula that can be found in a graph."""

    def __init__(self, text: str) -> None:
        self.expression = ast.parse(text, mode="eval").body

    def match(self, name: str, graph: GraphLookup) -> Values | None:
        """Return what the names of the formula stand for if a value is computed by it, else None."""
        return next(_match(self.expression, name, graph, {}), None)


def _match(expression: ast.expr, name: str, graph: GraphLookup, known: Values) -> Iterator[Values]:
    """Yield the known values with those of the names in the expression, for each way in which it fits."""
    match expression:
        case ast.Constant(value=number):
            if graph.is_number(name, float(number)):  # type: ignore[arg-type]  # formulas have numbers only
                yield known
        case ast.Name(id="e"):
            if (value := graph.number(name)) is not None:
                yield {**known, "e": value}
        case ast.Name(id=variable):
            if known.get(variable, name) == name and graph.number(name) is None:
                yield {**known, variable: name}
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            node = graph.producer(name, "Add")
            for first, second in both_orders(node) if node is not None else ():
                yield from _match_all([left, right], [first, second], graph, known)
        case ast.BinOp(op=ast.Sub(), left=left, right=right):
            if (node := graph.producer(name, "Sub")) is not None:
                yield from _match_all([left, right], node.inputs, graph, known)
        case ast.BinOp():
            yield from _match_product(expression, name, graph, known)
        case ast.Call():
            yield from _match_call(expression, name, graph, known)


def _match_all(
    expressions: Sequence[ast.expr], names: Sequence[str], graph: GraphLookup, known: Values
) -> Iterator[Values]:
    if not expressions:
        yield known
        return
    for values in _match(expressions[0], names[0], graph, known):
        yield from _match_all(expressions[1:], names[1:], graph, values)


def _match_product(expression: ast.expr, name: str, graph: GraphLookup, known: Values) -> Iterator[Values]:
    factors, number = _expression_factors(expression)
    for candidates, value in graph.factors(name):
        if len(candidates) != len(factors) or not math.isclose(value, number, rel_tol=_TOLERANCE):
            continue
        for ordered in permutations(candidates):
            if all(exponent == other for (_, exponent), (_, other) in zip(factors, ordered, strict=True)):
                parts = [part for part, _ in factors]
                yield from _match_all(parts, [factor for factor, _ in ordered], graph, known)


def _expression_factors(expression: ast.expr, exponent: int = 1) -> tuple[list[tuple[ast.expr, int]], float]:
    """Return the factors of a product with their exponents 1 or -1, and its number."""
    match expression:
        case ast.Constant(value=number):
            return [], float(number) ** exponent  # type: ignore[arg-type]  # formulas have numbers only
        case ast.BinOp(op=ast.Pow(), left=base, right=ast.Constant(value=int(power))):
            return [(base, exponent)] * power, 1.0
        case ast.BinOp(op=ast.Mult() | ast.Div() as operation, left=left, right=right):
            first, number = _expression_factors(left, exponent)
            second, other = _expression_factors(right, exponent if isinstance(operation, ast.Mult) else -exponent)
            return first + second, number * other
    return [(expression, exponent)], 1.0


def _match_call(call: ast.Call, name: str, graph: GraphLookup, known: Values) -> Iterator[Values]:
    operator = ast.unparse(call.func)
    if operator == "mean":
        node = graph.producer(name, "ReduceMean")
        inputs = node.inputs[:1] if node is not None and _is_over_last_axis(node, graph) else ()
    elif operator == "Sqrt" and (power := graph.producer(name, "Pow")) is not None:
        inputs = power.inputs[:1] if graph.is_number(power.inputs[1], 0.5) else ()
    else:
        node = graph.producer(name, operator)
        inputs = () if node is None else node.inputs
        if node is not None and operator == "Clip" and "min" in node.attributes:  # before opset 11
            limits = [node.get("min"), node.get("max")]
            if limits == [ast.literal_eval(limit) for limit in call.args[1:]]:
                yield from _match(call.args[0], node.inputs[0], graph, known)
            return
        if node is not None and not all(_has_attribute(node, keyword) for keyword in call.keywords):
            return
    if len(inputs) == len(call.args):
        yield from _match_all(call.args, inputs, graph, known)


def _has_attribute(node: Node, keyword: ast.keyword) -> bool:
    name = str(keyword.arg)
    value = node.get(name, _DEFAULTS.get(name))
    return math.isclose(value, ast.literal_eval(keyword.value), rel_tol=_TOLERANCE)


def _is_over_last_axis(mean: Node, graph: GraphLookup) -> bool:
    axes = [graph.number(mean.inputs[1])] if len(mean.inputs) > 1 else list(mean.get("axes", ()))
    return bool(mean.get("keepdims", 1)) and axes == [-1]
