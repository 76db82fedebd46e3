"""Operators that compute each element by itself: arithmetic, comparisons, activations, casts."""

import math
import operator as python
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.operators import OPERATORS, Layer, Node, Operator, Run, operator, require
from scalepoint.onnx_reader.values import KnownArray, as_number, sym_float, sym_int, sym_max, sym_min, torch_dtype

# --- one input -----------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.linalg.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": F.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "HardSwish": F.hardswish,
}
# The same on numbers. Symbolic sizes take part in these only.
_NUMBER_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Abs": abs,
    "Ceil": math.ceil,
    "Floor": math.floor,
    "Neg": python.neg,
    "Not": python.not_,
    "Round": round,
    "Sqrt": math.sqrt,
}
# Activations that are modules of torch, so that they get the names of their nodes.
_ACTIVATION_MODULES: dict[str, type[nn.Module]] = {
    "Relu": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "HardSwish": nn.Hardswish,
    "Mish": nn.Mish,
}


def _add_unary_rows() -> None:
    for name, function in _FUNCTIONS.items():
        number_function = _NUMBER_FUNCTIONS.get(name)
        module = _ACTIVATION_MODULES.get(name)
        OPERATORS[name] = Operator(
            name,
            _unary(function),
            known=None if number_function is None else _unary_on_numbers(number_function),
            make_layer=None if module is None else _activation_layer(module),
        )


def _unary(function: Callable[[Tensor], Tensor]) -> Run:
    return lambda node, x: function(x)


def _unary_on_numbers(function: Callable[[Any], Any]) -> Run:
    def run(node: Node, x: KnownArray) -> Any:
        if function is math.sqrt and any(number < 0 for number in x.to_list()):
            return NotImplemented
        return x.map(function)

    return run


def _activation_layer(module: type[nn.Module]) -> Any:
    return lambda node, constants: Layer(module())


_add_unary_rows()


@operator("Identity", known=lambda node, x: x)
def identity(node: Node, x: Any) -> Any:
    return x


@operator("Elu")
def elu(node: Node, x: Tensor) -> Tensor:
    return F.elu(x, node.get("alpha", 1.0))


@operator("Selu")
def selu(node: Node, x: Tensor) -> Any:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return gamma * F.elu(x, alpha)


@operator("Celu")
def celu(node: Node, x: Tensor) -> Tensor:
    return F.celu(x, node.get("alpha", 1.0))


@operator("LeakyRelu", make_layer=lambda node, constants: Layer(nn.LeakyReLU(node.get("alpha", 0.01))))
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node.get("alpha", 0.01))


@operator("ThresholdedRelu")
def thresholded_relu(node: Node, x: Tensor) -> Tensor:
    return F.threshold(x, node.get("alpha", 1.0), 0.0)


@operator("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


def _gelu_layer(node: Node, constants: Any) -> Layer:
    return Layer(nn.GELU(approximate=node.get("approximate", "none")))


@operator("Gelu", "com.microsoft::Gelu", make_layer=_gelu_layer)
def gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", "none"))


@operator("Swish", make_layer=lambda node, constants: Layer(nn.SiLU()) if node.get("alpha", 1.0) == 1 else None)
def swish(node: Node, x: Tensor) -> Tensor:
    alpha = node.get("alpha", 1.0)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@operator("SwiGLU")
def swiglu(node: Node, x: Tensor, gate: Tensor | None = None) -> Tensor:
    alpha = node.get("alpha", 1.0)
    if gate is None or set(node.attributes) > {"alpha"}:
        raise OnnxReadError("SwiGLU of one joined input, or with limits, is not supported")
    return x * torch.sigmoid(x * alpha) * gate


@operator("Shrink")
def shrink(node: Node, x: Tensor) -> Tensor:
    limit, bias = node.get("lambd", 0.5), node.get("bias", 0.0)
    shrunk = torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x)))
    return shrunk.to(x.dtype)


@operator("IsInf")
def is_infinite(node: Node, x: Tensor) -> Tensor:
    is_positive = torch.isposinf(x) & bool(node.get("detect_positive", 1))
    return is_positive | (torch.isneginf(x) & bool(node.get("detect_negative", 1)))


@operator("PRelu")
def prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    if x.is_floating_point() and x.ndim > 1 and (slope.numel() == 1 or _is_channel_vector(slope, x)):
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, x * slope, x)


def _is_channel_vector(slope: Tensor, x: Tensor) -> bool:
    return slope.ndim == x.ndim - 1 and slope.shape[0] == x.shape[1] == slope.numel()


# --- two inputs ----------------------------------------------------------------------------------------------------


def _divide(x: Any, y: Any) -> Any:
    tensor = x if isinstance(x, Tensor) else y
    return torch.div(x, y) if tensor.is_floating_point() else torch.div(x, y, rounding_mode="trunc").to(tensor.dtype)


def _power(x: Any, y: Any) -> Tensor:
    if isinstance(y, float) and y.is_integer():
        y = int(y)
    result = torch.pow(x, y)
    return result.to(x.dtype) if isinstance(x, Tensor) else result.to(y.dtype)


_BINARY_FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": torch.add,
    "Sub": python.sub,
    "Mul": torch.mul,
    "Div": _divide,
    "Pow": _power,
    "Equal": python.eq,
    "Less": python.lt,
    "LessOrEqual": python.le,
    "Greater": python.gt,
    "GreaterOrEqual": python.ge,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": python.and_,
    "BitwiseOr": python.or_,
    "BitwiseXor": python.xor,
}
_NUMBER_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": python.add,
    "Sub": python.sub,
    "Mul": python.mul,
    "Pow": python.pow,
    "Equal": python.eq,
    "Less": python.lt,
    "LessOrEqual": python.le,
    "Greater": python.gt,
    "GreaterOrEqual": python.ge,
    "And": lambda x, y: bool(x) and bool(y),
    "Or": lambda x, y: bool(x) or bool(y),
    "Xor": lambda x, y: bool(x) != bool(y),
}
_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor")
_TENSORS_ONLY = ("And", "Or", "Xor")


def _add_binary_rows() -> None:
    for name, function in _BINARY_FUNCTIONS.items():
        operation = _NUMBER_OPERATIONS.get(name)
        OPERATORS[name] = Operator(
            name,
            _binary(function),
            known=None if operation is None else _binary_on_numbers(operation, is_comparison=name in _COMPARISONS),
            takes_numbers=name not in _TENSORS_ONLY,
        )


def _binary(function: Callable[[Any, Any], Tensor]) -> Run:
    def run(node: Node, x: Any, y: Any) -> Tensor:
        if node.opset < 7 and node.get("axis") is not None and isinstance(y, Tensor):
            y = y.reshape(*y.shape, *(1 for _ in range(x.ndim - node.get("axis") - y.ndim)))
        return function(x, y)

    return run


def _binary_on_numbers(operation: Callable[[Any, Any], Any], *, is_comparison: bool) -> Run:
    def run(node: Node, x: KnownArray, y: KnownArray) -> Any:
        if operation is python.pow and any(number < 0 for number in (*x.to_list(), *y.to_list())):
            return NotImplemented
        return x.map(operation, y, dtype=torch.bool if is_comparison else None)

    return run


_add_binary_rows()


def _divide_numbers(node: Node, x: KnownArray, y: KnownArray) -> Any:
    if any(isinstance(number, int | float) and number == 0 for number in y.to_list()):
        return NotImplemented
    if x.dtype.is_floating_point:
        return x.map(lambda a, b: a / b, y)
    return x.map(_truncated_quotient, y)


def _truncated_quotient(x: Any, y: Any) -> Any:
    """Integer division towards zero. Sizes are never negative, so a floor is the same for them."""
    if isinstance(x, int) and isinstance(y, int) and (x < 0) != (y < 0):
        return -(abs(x) // abs(y))
    return x // y


OPERATORS["Div"] = Operator("Div", _binary(_divide), known=_divide_numbers, takes_numbers=True)


def _modulo_numbers(node: Node, x: KnownArray, y: KnownArray) -> Any:
    is_plain = not node.get("fmod", 0) and not x.dtype.is_floating_point and 0 not in y.to_list()
    return x.map(python.mod, y) if is_plain else NotImplemented


@operator("Mod", known=_modulo_numbers)
def modulo(node: Node, x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("BitShift")
def bit_shift(node: Node, x: Tensor, y: Tensor) -> Any:
    bits = torch.iinfo(x.dtype).bits
    wide, shift = x.to(torch.int64), y.to(torch.int64)
    require(bits < 64, "a shift of 64-bit numbers")
    shifted = wide << shift if node.get("direction") == "LEFT" else wide >> shift
    return (shifted & (2**bits - 1)).to(x.dtype)


def _select_numbers(node: Node, condition: KnownArray, x: KnownArray, y: KnownArray) -> KnownArray:
    return condition.map(lambda chosen, a, b: a if chosen else b, x, y, dtype=x.dtype)


@operator("Where", known=_select_numbers)
def where(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


# --- several inputs ------------------------------------------------------------------------------------------------


def _variadic(
    function: Callable[[Any, Any], Any], number_function: Callable[[Any, Any], Any] | None, name: str
) -> None:
    def run(node: Node, *tensors: Tensor) -> Tensor:
        return reduce(function, tensors)

    def on_numbers(node: Node, *arrays: KnownArray) -> Any:
        assert number_function is not None  # noqa: S101  # see the row
        return reduce(lambda x, y: x.map(number_function, y), arrays)

    OPERATORS[name] = Operator(name, run, known=None if number_function is None else on_numbers)


_variadic(torch.maximum, sym_max, "Max")
_variadic(torch.minimum, sym_min, "Min")
_variadic(torch.add, python.add, "Sum")


@operator("Mean")
def mean(node: Node, *tensors: Tensor) -> Tensor:
    return reduce(torch.add, tensors) / len(tensors)


# --- limits and types ----------------------------------------------------------------------------------------------


def _clip_numbers(node: Node, x: KnownArray, low: KnownArray | None = None, high: KnownArray | None = None) -> Any:
    result = x
    if low is not None:
        result = result.map(sym_max, low)
    if high is not None:
        result = result.map(sym_min, high)
    return result if low is not None or high is not None else NotImplemented


def _clip_limits(node: Node, low: Any, high: Any) -> tuple[Any, Any]:
    """Return the limits: numbers or None, or tensors that are computed from data."""
    limits = (node.get("min"), node.get("max")) if node.opset < 11 else (low, high)
    low, high = (as_number(limit, "limit") if isinstance(limit, KnownArray) else limit for limit in limits)
    return low, high


def _clip_layer(node: Node, constants: Any) -> Layer | None:
    if any(name and constants[index + 1] is None for index, name in enumerate(node.inputs[1:])):
        return None
    numbers = [None if limit is None or limit.numel() != 1 else limit.item() for limit in (*constants, None, None)[1:3]]
    low, high = _clip_limits(node, *numbers)
    if low == 0 and high == 6:
        return Layer(nn.ReLU6())
    return Layer(nn.ReLU()) if low == 0 and (high is None or high >= 3.4e38) else None


@operator("Clip", known=_clip_numbers, known_inputs=(1, 2), make_layer=_clip_layer)
def clip(node: Node, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = _clip_limits(node, low, high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low = x.new_tensor(low) if isinstance(low, int | float) else low
        high = x.new_tensor(high) if isinstance(high, int | float) else high
    if low is None and high is None:
        return x
    if not x.is_floating_point():
        low, high = (int(limit) if isinstance(limit, float) else limit for limit in (low, high))
    return torch.clamp(x, low, high)


def _cast_numbers(node: Node, x: KnownArray, *like: KnownArray) -> Any:
    dtype = like[0].dtype if like else torch_dtype(node.get("to"))
    if dtype not in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool):
        return NotImplemented
    if dtype.is_floating_point:
        return x.map(lambda n: sym_float(n) if isinstance(n, torch.SymInt) else float(n), dtype=dtype)
    if dtype == torch.bool:
        return x.map(bool, dtype=dtype)
    if any(isinstance(number, float) and not math.isfinite(number) for number in x.to_list()):
        return NotImplemented
    return x.map(
        lambda n: sym_int(n) if isinstance(n, torch.SymFloat) else n if isinstance(n, torch.SymInt) else int(n),
        dtype=dtype,
    )


@operator("Cast", known=_cast_numbers)
def cast(node: Node, x: Tensor) -> Tensor:
    return _to_dtype(node, x, torch_dtype(node.get("to")))


@operator("CastLike", known=_cast_numbers)
def cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return _to_dtype(node, x, like.dtype)


def _to_dtype(node: Node, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return _to_float8(node, x, dtype)
    return x.to(dtype)


def _to_float8(node: Node, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to an 8-bit float. By default numbers out of range saturate, which torch's cast does for some types only."""
    require(node.get("round_mode", "nearest") == "nearest", "round_mode")
    wide = x.to(torch.float32)
    if node.get("saturate", 1):
        largest = torch.finfo(dtype).max
        return torch.where(wide.isnan(), wide, wide.clamp(-largest, largest)).to(dtype)
    require(False, "a cast to an 8-bit float without saturation")
    return wide


@operator("BitCast")
def bit_cast(node: Node, x: Tensor) -> Tensor:
    return x.view(torch_dtype(node.get("to")))
