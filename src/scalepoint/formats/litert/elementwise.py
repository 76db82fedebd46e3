"""Operations that work element by element. All operands are stored in the same order of axes, whichever it is.

add, sub, mul   are computed in int8 if both operands and the result are quantized; all others in float
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.graph_writer import GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.values import Order, QuantizedConstant, Value, model_order
from scalepoint.numerics import dtype_name

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
BROADCASTS = frozenset((*BINARY, *COMPARISONS, *SELECTIONS))  # these broadcast their operands themselves
LOGICAL = ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")
INTEGER_OPERATORS = ("ADD", "SUB", "MUL")


@writes(*UNARY)
def unary(writer: GraphWriter, node: fx.Node) -> Value:
    operator = UNARY[node.target]
    _check_not_bitwise(writer, node, operator)
    return writer.emit_elementwise(operator, writer.dequantize(writer.first_operand(node)))


def _check_not_bitwise(writer: GraphWriter, node: fx.Node, operator: str) -> None:
    if operator in LOGICAL and writer.shape_and_dtype(node)[1] != "bool":
        raise UnsupportedOperationError("computes with the bits of integers")


@writes(aten.gelu.default)
def gelu(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    options = {"approximate": arguments["approximate"] == "tanh"}
    return writer.emit_elementwise("GELU", writer.dequantize(arguments["self"]), options=options)


@writes(aten.leaky_relu.default)
def leaky_relu(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    options = {"alpha": float(arguments["negative_slope"])}
    return writer.emit_elementwise("LEAKY_RELU", writer.dequantize(arguments["self"]), options=options)


@writes(aten.elu.default)
def elu(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    if (arguments["alpha"], arguments["scale"], arguments["input_scale"]) != (1, 1, 1):
        raise UnsupportedOperationError("is an ELU whose alpha is not 1")
    return writer.emit_elementwise("ELU", writer.dequantize(arguments["self"]))


@writes(aten.prelu.default, aten._prelu_kernel.default)
def prelu(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, weight = writer.dequantize(arguments["self"]), arguments["weight"]
    if not isinstance(weight, Tensor):
        raise UnsupportedOperationError("has a slope that is computed from the data")
    slope_shape = [-1 if axis == 1 else 1 for axis in x.order[1:]]  # the stored order, without the batch
    slope = weight.reshape(-1).expand(x.shape[1]).reshape(slope_shape)
    return writer.emit_elementwise("PRELU", x, [writer.add_constant(slope, "slope")])


@writes(aten.clamp.default, aten.hardtanh.default, aten.clamp_min.default, aten.clamp_max.default)
def clamp(writer: GraphWriter, node: fx.Node) -> Any:
    arguments = writer.arguments(node)
    x = writer.dequantize(arguments["self"])
    low = arguments.get("min", arguments.get("min_val"))
    high = arguments.get("max", arguments.get("max_val"))
    if (low, high) in ((0, 6), (0, None)):
        return writer.emit_elementwise("RELU6" if high else "RELU", x)
    for operator, limit in (("MAXIMUM", low), ("MINIMUM", high)):
        if limit is not None:
            x = writer.emit_elementwise(operator, x, [writer.add_number(limit, x.dtype)])
    return x


@writes(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor)
def clamp_by_tensors(writer: GraphWriter, node: fx.Node) -> Any:
    """Write a clamp whose limits are tensors. torch's cosine_similarity bounds a norm from below this way."""
    arguments = writer.arguments(node)
    shape, dtype = writer.shape_and_dtype(node)
    x = arguments["self"]
    for operator, name in (("MAXIMUM", "min"), ("MINIMUM", "max")):
        if arguments.get(name) is not None:
            x = _to_dtype(writer, writer.dequantize(x), dtype)
            limit = _to_dtype(writer, writer.dequantize(arguments[name]), dtype)
            order = _common_order(x, limit, len(shape))
            inputs = _align_operands(writer, (x, limit), len(shape), order)
            x = writer.emit(operator, inputs, shape, dtype, order=order)
    return x


@writes(*BINARY)
def binary(writer: GraphWriter, node: fx.Node) -> Value:
    arguments, operator = writer.arguments(node), BINARY[node.target]
    x, y = arguments["self"], arguments["other"] if "other" in arguments else arguments["exponent"]
    _check_not_bitwise(writer, node, operator)
    alpha = arguments.get("alpha", 1)  # add and sub compute x +- alpha * y
    folds_activation = node.target in BINARY_WITH_ACTIVATION
    ending = writer.find_ending(node, folds_activation=folds_activation)
    is_integer = operator in INTEGER_OPERATORS and alpha == 1 and ending.quantization is not None
    is_integer = is_integer and _is_quantized(x) and _is_quantized(y)
    shape, dtype = writer.shape_and_dtype(node)
    if not is_integer:
        x, y = (_to_dtype(writer, writer.dequantize(operand), dtype) for operand in (x, y))
        y = y if alpha == 1 else _multiply(writer, y, alpha)
    order = _common_order(x, y, len(shape))
    result = writer.emit(
        operator,
        _align_operands(writer, (x, y), len(shape), order),
        shape,
        dtype,
        order=order,
        quantization=ending.quantization if is_integer else None,
        name=node.name,
        options={"fusedActivationFunction": ending.activation} if folds_activation else {},
    )
    return writer.set_result(node, ending, result)


@writes(aten.rsub.Scalar)
def subtract_reversed(writer: GraphWriter, node: fx.Node) -> Value:
    """Write other - x, where `other` is a number."""
    arguments = writer.arguments(node)
    shape, dtype = writer.shape_and_dtype(node)
    x = _to_dtype(writer, writer.dequantize(arguments["self"]), dtype)
    if arguments["alpha"] != 1:
        raise UnsupportedOperationError("subtracts a multiple")
    number = writer.add_number(arguments["other"], dtype)
    return writer.emit("SUB", [number, x.tensors[x.order]], shape, dtype, order=x.order)


@writes(aten.reciprocal.default)
def reciprocal(writer: GraphWriter, node: fx.Node) -> Value:
    x = writer.dequantize(writer.first_operand(node))
    return writer.emit("DIV", [writer.add_number(1, x.dtype), x.tensors[x.order]], x.shape, x.dtype, order=x.order)


@writes(aten.pow.Tensor_Scalar)
def power(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, exponent = writer.dequantize(arguments["self"]), arguments["exponent"]
    operators = {2: "SQUARE", 0.5: "SQRT", -0.5: "RSQRT"}
    if exponent in operators:
        return writer.emit_elementwise(operators[exponent], x)
    return writer.emit_elementwise("POW", x, [writer.add_number(exponent, x.dtype)])


@writes(*COMPARISONS)
def compare(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, y = writer.dequantize(arguments["self"]), writer.dequantize(arguments["other"])
    shape, _ = writer.shape_and_dtype(node)
    dtype = dtype_name(torch.result_type(_example(x), _example(y)))
    order = _common_order(x, y, len(shape))
    x_tensor = _align_operand(writer, _to_dtype(writer, x, dtype), len(shape), order)
    y_tensor = _align_operand(writer, _to_dtype(writer, y, dtype), len(shape), order)
    return writer.emit(COMPARISONS[node.target], [x_tensor, y_tensor], shape, "bool", order=order)


@writes(*SELECTIONS)
def where(writer: GraphWriter, node: fx.Node) -> Value:
    """Write where(mask, x, y), or masked_fill, which is where(mask, value, self)."""
    arguments, (shape, dtype) = writer.arguments(node), writer.shape_and_dtype(node)
    if node.target is aten.where.self:
        mask, x, y = arguments["condition"], arguments["self"], arguments["other"]
    else:
        mask, x, y = arguments["mask"], arguments["value"], arguments["self"]
    x, y = (_to_dtype(writer, writer.dequantize(operand), dtype) for operand in (x, y))
    with_all_axes = (value for value in (y, x, mask) if isinstance(value, Value) and value.rank == len(shape))
    first = next(with_all_axes, None)
    order = model_order(len(shape)) if first is None else first.order
    inputs = _align_operands(writer, (mask, x, y), len(shape), order)
    return writer.emit("SELECT_V2", inputs, shape, dtype, order=order)


@writes(aten._to_copy.default, aten.to.dtype, aten.type_as.default)
def cast(writer: GraphWriter, node: fx.Node) -> Any:
    x, (_, dtype) = writer.argument(node.args[0]), writer.shape_and_dtype(node)
    if isinstance(x, Value) and x.dtype == dtype:
        return x  # codes stay codes
    return _to_dtype(writer, writer.dequantize(x), dtype)


def _to_dtype(writer: GraphWriter, x: Any, dtype: str) -> Any:
    """Convert a constant, a number or a value to a tensor of this dtype."""
    if isinstance(x, Tensor):
        return x.to(getattr(torch, dtype))
    if not isinstance(x, Value):
        return torch.tensor(x, dtype=getattr(torch, dtype))
    return writer.cast(x, dtype)


def _multiply(writer: GraphWriter, x: Any, factor: float) -> Any:
    if isinstance(x, Tensor):
        return x * factor
    return writer.emit_elementwise("MUL", x, [writer.add_number(factor, x.dtype)])


def _is_quantized(x: Any) -> bool:
    """Whether an operand is int8 with one scale."""
    if isinstance(x, QuantizedConstant):
        return x.quantization.scale.ndim == 0
    return isinstance(x, Value) and x.quantization is not None


def _example(x: Any) -> Any:
    """Return a tensor of the same dtype and rank, for torch.result_type."""
    if isinstance(x, Value):
        return torch.empty([1] * x.rank, dtype=getattr(torch, x.dtype))
    return x


def _common_order(x: Any, y: Any, rank: int) -> Order:
    """Return the order of the larger operand that has all axes; the other one is transposed if necessary."""
    candidates = [value for value in (x, y) if isinstance(value, Value) and value.rank == rank]
    candidates.sort(key=lambda value: -np.prod([int(size) for size in value.shape]))
    return candidates[0].order if candidates else model_order(rank)


def _align_operands(writer: GraphWriter, operands: Sequence[Any], rank: int, order: Order) -> list[int]:
    return [_align_operand(writer, operand, rank, order) for operand in operands]


def _align_operand(writer: GraphWriter, x: Any, rank: int, order: Order) -> int:
    """Store an operand with `rank` axes in `order`, so that it broadcasts against the others."""
    if isinstance(x, QuantizedConstant):
        if x.codes.ndim != rank:
            raise UnsupportedOperationError("combines an int8 tensor with a constant of fewer axes")
        return writer.file.add_constant(x.name, x.codes.transpose(order), x.quantization, x.dtype)
    if isinstance(x, Tensor):
        if x.numel() == 1:
            return writer.add_constant(x.reshape(1))
        expanded = x.reshape([1] * (rank - x.ndim) + list(x.shape))
        return writer.add_constant(expanded.permute(order), writer.constant_names.get(id(x), "constant"))
    value: Value = x
    if value.rank < rank:
        value = writer.reshape(value, [1] * (rank - value.rank) + list(value.shape))
    return writer.materialize(value, order)
