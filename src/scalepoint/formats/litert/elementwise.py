"""What is computed element by element: operands of one order, whichever they have.

add, sub, mul    int8 where both operands have codes and the result gets some; others in float
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.products import quantize_result
from scalepoint.formats.litert.values import Order, QuantizedConstant, Value, model_order, to_numpy_name
from scalepoint.formats.litert.walk import UnsupportedOperationError, Walk, writes

aten = torch.ops.aten
UNARY: dict[Any, str] = {
    aten.relu.default: "RELU", aten.relu6.default: "RELU6", aten.sigmoid.default: "LOGISTIC", aten.tanh.default: "TANH",
    aten.exp.default: "EXP", aten.log.default: "LOG", aten.sqrt.default: "SQRT", aten.rsqrt.default: "RSQRT",
    aten.neg.default: "NEG", aten.abs.default: "ABS", aten.sin.default: "SIN", aten.cos.default: "COS",
    aten.floor.default: "FLOOR", aten.ceil.default: "CEIL", aten.round.default: "ROUND", aten.sign.default: "SIGN",
    aten.square.default: "SQUARE", aten.hardswish.default: "HARD_SWISH", aten.logical_not.default: "LOGICAL_NOT",
    aten.bitwise_not.default: "LOGICAL_NOT",
}  # fmt: skip
BINARY_WITH_ACTIVATION: dict[Any, str] = {
    aten.add.Tensor: "ADD", aten.add.Scalar: "ADD", aten.sub.Tensor: "SUB", aten.sub.Scalar: "SUB",
    aten.mul.Tensor: "MUL", aten.mul.Scalar: "MUL", aten.div.Tensor: "DIV", aten.div.Scalar: "DIV",
}  # fmt: skip
BINARY: dict[Any, str] = BINARY_WITH_ACTIVATION | {
    aten.maximum.default: "MAXIMUM", aten.minimum.default: "MINIMUM", aten.pow.Tensor_Tensor: "POW",
    aten.logical_and.default: "LOGICAL_AND", aten.logical_or.default: "LOGICAL_OR",
    aten.bitwise_and.Tensor: "LOGICAL_AND", aten.bitwise_or.Tensor: "LOGICAL_OR",
}  # fmt: skip
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), overload): operator
    for name, operator in {
        "eq": "EQUAL", "ne": "NOT_EQUAL", "lt": "LESS", "le": "LESS_EQUAL", "gt": "GREATER", "ge": "GREATER_EQUAL"
    }.items()
    for overload in ("Tensor", "Scalar")
}  # fmt: skip
SELECTIONS = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
BROADCASTS = frozenset((*BINARY, *COMPARISONS, *SELECTIONS))
LOGICAL = ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")


@writes(*UNARY)
def unary(walk: Walk, node: fx.Node) -> Value:
    operator = UNARY[node.target]
    if operator in LOGICAL and walk.shape_and_dtype(node)[1] != "bool":
        raise UnsupportedOperationError("computes with the bits of whole numbers")
    return walk.same(operator, walk.dequantized(walk.first(node)))


@writes(aten.gelu.default)
def gelu(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    options = {"approximate": given["approximate"] == "tanh"}
    return walk.same("GELU", walk.dequantized(given["self"]), options=options)


@writes(aten.leaky_relu.default)
def leaky_relu(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    options = {"alpha": float(given["negative_slope"])}
    return walk.same("LEAKY_RELU", walk.dequantized(given["self"]), options=options)


@writes(aten.elu.default)
def elu(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    if (given["alpha"], given["scale"], given["input_scale"]) != (1, 1, 1):
        raise UnsupportedOperationError("is an ELU with an alpha other than 1")
    return walk.same("ELU", walk.dequantized(given["self"]))


@writes(aten.prelu.default, aten._prelu_kernel.default)
def prelu(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, weight = walk.dequantized(given["self"]), given["weight"]
    if not isinstance(weight, Tensor):
        raise UnsupportedOperationError("has a slope that is computed from the data")
    slope = weight.reshape(-1).expand(x.shape[1]).reshape([-1 if axis == 1 else 1 for axis in x.order[1:]])
    return walk.same("PRELU", x, [walk.constant(slope, "slope")])


@writes(aten.clamp.default, aten.hardtanh.default, aten.clamp_min.default, aten.clamp_max.default)
def clamp(walk: Walk, node: fx.Node) -> Any:
    given = walk.arguments(node)
    x = walk.dequantized(given["self"])
    low, high = (given.get(each, given.get(f"{each}_val")) for each in ("min", "max"))
    if (low, high) in ((0, 6), (0, None)):
        return walk.same("RELU6" if high else "RELU", x)
    for operator, limit in (("MAXIMUM", low), ("MINIMUM", high)):
        if limit is not None:
            x = walk.same(operator, x, [walk.number(limit, x.kind)])
    return x


@writes(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor)
def clamp_by_tensors(walk: Walk, node: fx.Node) -> Any:
    """As cosine_similarity and others keep a norm from zero."""
    given = walk.arguments(node)
    shape, kind = walk.shape_and_dtype(node)
    x = given["self"]
    for operator, name in (("MAXIMUM", "min"), ("MINIMUM", "max")):
        if given.get(name) is not None:
            one, other = (_to_dtype(walk, walk.dequantized(each), kind) for each in (x, given[name]))
            order = _common_order(one, other, len(shape))
            x = walk.emit(
                operator,
                [_align_operand(walk, each, len(shape), order) for each in (one, other)],
                shape,
                kind,
                order=order,
            )
    return x


@writes(*BINARY)
def binary(walk: Walk, node: fx.Node) -> Value:
    given, operator = walk.arguments(node), BINARY[node.target]
    x, y = given["self"], given["other"] if "other" in given else given["exponent"]
    if operator in LOGICAL and walk.shape_and_dtype(node)[1] != "bool":
        raise UnsupportedOperationError("computes with the bits of whole numbers")
    alpha = given.get("alpha", 1)
    end = walk.ending(node, folds=operator in ("ADD", "SUB", "MUL", "DIV"))
    is_integer = operator in ("ADD", "SUB", "MUL") and alpha == 1 and end.codes is not None
    is_integer = is_integer and all(map(_has_codes, (x, y)))
    shape, kind = walk.shape_and_dtype(node)
    if not is_integer:
        x, y = (_to_dtype(walk, walk.dequantized(each), kind) for each in (x, y))
        y = y if alpha == 1 else _multiply(walk, y, alpha)
    order = _common_order(x, y, len(shape))
    inputs = [_align_operand(walk, each, len(shape), order) for each in (x, y)]
    options = {"fusedActivationFunction": end.activation} if node.target in BINARY_WITH_ACTIVATION else {}
    codes = end.codes if is_integer else None
    made = walk.emit(operator, inputs, shape, kind, order=order, codes=codes, name=node.name, options=options)
    return quantize_result(walk, node, end, made)


@writes(aten.rsub.Scalar)
def subtract_reversed(walk: Walk, node: fx.Node) -> Value:
    """other - x."""
    given = walk.arguments(node)
    shape, kind = walk.shape_and_dtype(node)
    x = _to_dtype(walk, walk.dequantized(given["self"]), kind)
    if given["alpha"] != 1:
        raise UnsupportedOperationError("subtracts a multiple")
    held = walk.number(given["other"], kind)
    return walk.emit("SUB", [held, x.stored[x.order]], shape, kind, order=x.order)


@writes(aten.reciprocal.default)
def reciprocal(walk: Walk, node: fx.Node) -> Value:
    x = walk.dequantized(walk.first(node))
    return walk.emit("DIV", [walk.number(1, x.kind), x.stored[x.order]], x.shape, x.kind, order=x.order)


@writes(aten.pow.Tensor_Scalar)
def power(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x = walk.dequantized(given["self"])
    known = {2: "SQUARE", 0.5: "SQRT", -0.5: "RSQRT"}
    if given["exponent"] in known:
        return walk.same(known[given["exponent"]], x)
    return walk.same("POW", x, [walk.number(given["exponent"], x.kind)])


@writes(*COMPARISONS)
def compare(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, y = (walk.dequantized(given[each]) for each in ("self", "other"))
    shape, _ = walk.shape_and_dtype(node)
    kind = to_numpy_name(torch.result_type(*(_example(each) for each in (x, y))))
    order = _common_order(x, y, len(shape))
    inputs = [_align_operand(walk, _to_dtype(walk, each, kind), len(shape), order) for each in (x, y)]
    return walk.emit(COMPARISONS[node.target], inputs, shape, "bool", order=order)


@writes(*SELECTIONS)
def choose(walk: Walk, node: fx.Node) -> Value:
    given, (shape, kind) = walk.arguments(node), walk.shape_and_dtype(node)
    if node.target is aten.where.self:
        mask, x, y = given["condition"], given["self"], given["other"]
    else:
        mask, x, y = given["mask"], given["value"], given["self"]
    x, y = (_to_dtype(walk, walk.dequantized(each), kind) for each in (x, y))
    ranked = [each for each in (y, x, mask) if isinstance(each, Value) and each.rank == len(shape)]
    order = ranked[0].order if ranked else model_order(len(shape))
    inputs = [_align_operand(walk, each, len(shape), order) for each in (mask, x, y)]
    return walk.emit("SELECT_V2", inputs, shape, kind, order=order)


@writes(aten._to_copy.default, aten.to.dtype, aten.type_as.default)
def cast(walk: Walk, node: fx.Node) -> Any:
    x, (_, kind) = walk.argument(node.args[0]), walk.shape_and_dtype(node)
    return _to_dtype(walk, walk.dequantized(x) if not _is_kind(x, kind) else x, kind)


def _is_kind(x: Any, kind: str) -> bool:
    return isinstance(x, Value) and x.kind == kind


def _to_dtype(walk: Walk, x: Any, kind: str) -> Any:
    """As a tensor of this type."""
    if isinstance(x, Tensor):
        return x.to(getattr(torch, kind))
    if not isinstance(x, Value):
        return torch.tensor(x, dtype=getattr(torch, kind))
    if x.kind == kind:
        return x
    return walk.cast(x, kind)


def _multiply(walk: Walk, x: Any, factor: float) -> Any:
    if isinstance(x, Tensor):
        return x * factor
    return walk.same("MUL", x, [walk.number(factor, x.kind)])


def _has_codes(x: Any) -> bool:
    return (isinstance(x, Value) and x.codes is not None) or (
        isinstance(x, QuantizedConstant) and x.quantized.scale.ndim == 0
    )


def _example(x: Any) -> Any:
    """Something of the same type, for torch's rules of promotion."""
    if isinstance(x, Value):
        return torch.empty([1] * x.rank, dtype=getattr(torch, x.kind))
    return x


def _common_order(x: Any, y: Any, rank: int) -> Order:
    """That of the operand which has all axes, the larger one first."""
    found = [each for each in (x, y) if isinstance(each, Value) and each.rank == rank]
    found.sort(key=lambda each: -np.prod([int(size) for size in each.shape]))
    return found[0].order if found else model_order(rank)


def _align_operand(walk: Walk, x: Any, rank: int, order: Order) -> int:
    """An operand as it broadcasts against others in this order."""
    if isinstance(x, QuantizedConstant):
        if x.data.ndim != rank:
            raise UnsupportedOperationError("joins a constant of fewer axes and an int8 tensor")
        return walk.file.constant(x.name, x.data.transpose(order), x.quantized, x.kind)
    if isinstance(x, Tensor):
        if x.numel() == 1:
            return walk.constant(x.reshape(1))
        return walk.constant(
            x.reshape([1] * (rank - x.ndim) + list(x.shape)).permute(order), walk.names.get(id(x), "constant")
        )
    value: Value = x
    if value.rank < rank:
        value = walk.reshaped(value, [1] * (rank - value.rank) + list(value.shape))
    return walk.take(value, order)
