"""Operators that compute each element from the elements at the same position: arithmetic, activations, casts."""

import math
import operator as python_operator  # `operator` is the decorator of the table
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.operators import OPERATORS, Layer, Node, Operator, RunFunction, operator, require
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
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
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
}
# The operators that also compute sizes of tensors, as functions of Python numbers and symbolic sizes.
_NUMBER_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Abs": abs,
    "Ceil": math.ceil,
    "Floor": math.floor,
    "Neg": python_operator.neg,
    "Not": python_operator.not_,
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
            on_numbers=None if number_function is None else _unary_on_numbers(number_function),
            make_layer=None if module is None else _activation_layer(module),
        )


def _unary(function: Callable[[Tensor], Tensor]) -> RunFunction:
    return lambda node, x: function(x)


def _unary_on_numbers(function: Callable[[Any], Any]) -> RunFunction:
    def run(node: Node, x: KnownArray) -> Any:
        if function is math.sqrt and any(number < 0 for number in x.to_list()):
            return NotImplemented  # math.sqrt raises an error; torch.sqrt returns NaN
        return x.map(function)

    return run


def _activation_layer(module: type[nn.Module]) -> Any:
    return lambda node, constants: Layer(module())


_add_unary_rows()


@operator("Identity", on_numbers=lambda node, x: x)
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
        return F.hardsigmoid(x)  # torch's function has these values built in
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
    if gate is None:
        raise OnnxReadError("SwiGLU whose only input contains both values and gates is not supported")
    unsupported = sorted(set(node.attributes) - {"alpha"})
    require(not unsupported, f"SwiGLU with {', '.join(unsupported)}")
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
        y = int(y)  # torch computes x**2 as x * x
    result = torch.pow(x, y)
    return result.to(x.dtype) if isinstance(x, Tensor) else result.to(y.dtype)


def _tensor_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a commutative function take a number second: torch.onnx cannot write a product with a number first."""
    return lambda x, y: function(x, y) if isinstance(x, Tensor) else function(y, x)


_BINARY_FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": _tensor_first(torch.add),
    "Sub": python_operator.sub,
    "Mul": _tensor_first(torch.mul),
    "Div": _divide,
    "Pow": _power,
    "Equal": python_operator.eq,
    "Less": python_operator.lt,
    "LessOrEqual": python_operator.le,
    "Greater": python_operator.gt,
    "GreaterOrEqual": python_operator.ge,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseAnd": python_operator.and_,
    "BitwiseOr": python_operator.or_,
    "BitwiseXor": python_operator.xor,
}
_BINARY_NUMBER_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": python_operator.add,
    "Sub": python_operator.sub,
    "Mul": python_operator.mul,
    "Pow": python_operator.pow,
    "Equal": python_operator.eq,
    "Less": python_operator.lt,
    "LessOrEqual": python_operator.le,
    "Greater": python_operator.gt,
    "GreaterOrEqual": python_operator.ge,
    "And": lambda x, y: bool(x) and bool(y),
    "Or": lambda x, y: bool(x) or bool(y),
    "Xor": lambda x, y: bool(x) != bool(y),
}
_LOGICAL = ("And", "Or", "Xor")  # torch's functions for these take no Python numbers
_RETURNS_BOOL = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", *_LOGICAL)


def _add_binary_rows() -> None:
    for name, function in _BINARY_FUNCTIONS.items():
        number_function = _BINARY_NUMBER_FUNCTIONS.get(name)
        OPERATORS[name] = Operator(
            name,
            _binary(function),
            on_numbers=None
            if number_function is None
            else _binary_on_numbers(number_function, returns_bool=name in _RETURNS_BOOL),
            takes_numbers=name not in _LOGICAL,
        )


def _binary(function: Callable[[Any, Any], Tensor]) -> RunFunction:
    def run(node: Node, x: Any, y: Any) -> Tensor:
        axis = node.get("axis")
        if node.opset < 7 and axis is not None and isinstance(y, Tensor):
            # Before opset 7 the axes of y are those of x from `axis` on: add axes of size 1 after them.
            new_axes = x.ndim - axis - y.ndim
            y = y.reshape(*y.shape, *[1] * new_axes)
        return function(x, y)

    return run


def _binary_on_numbers(function: Callable[[Any, Any], Any], *, returns_bool: bool) -> RunFunction:
    def run(node: Node, x: KnownArray, y: KnownArray) -> Any:
        if function is python_operator.pow and any(number < 0 for number in (*x.to_list(), *y.to_list())):
            return NotImplemented  # Python may return a complex number or divide by zero
        return x.map(function, y, dtype=torch.bool if returns_bool else None)

    return run


_add_binary_rows()


def _divide_numbers(node: Node, x: KnownArray, y: KnownArray) -> Any:
    if any(isinstance(number, int | float) and number == 0 for number in y.to_list()):
        return NotImplemented  # Python raises an error; torch returns infinity or NaN
    if x.dtype.is_floating_point:
        return x.map(lambda a, b: a / b, y)
    return x.map(_truncated_quotient, y)


def _truncated_quotient(x: Any, y: Any) -> Any:
    """Divide integers and round towards zero."""
    # Symbolic sizes are never negative, so // rounds them towards zero, too.
    if isinstance(x, int) and isinstance(y, int) and (x < 0) != (y < 0):
        return -(abs(x) // abs(y))
    return x // y


OPERATORS["Div"] = Operator("Div", _binary(_divide), on_numbers=_divide_numbers, takes_numbers=True)


def _modulo_numbers(node: Node, x: KnownArray, y: KnownArray) -> Any:
    is_integer_modulo = not node.get("fmod", 0) and not x.dtype.is_floating_point and 0 not in y.to_list()
    return x.map(python_operator.mod, y) if is_integer_modulo else NotImplemented


@operator("Mod", on_numbers=_modulo_numbers)
def modulo(node: Node, x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("BitShift")
def bit_shift(node: Node, x: Tensor, y: Tensor) -> Any:
    bits = torch.iinfo(x.dtype).bits
    require(bits < 64, "a shift of 64-bit numbers")
    wide, shift = x.to(torch.int64), y.to(torch.int64)  # torch has no shifts for uint16 and uint32
    shifted = wide << shift if node.get("direction") == "LEFT" else wide >> shift
    return (shifted & (2**bits - 1)).to(x.dtype)


def _select_numbers(node: Node, condition: KnownArray, x: KnownArray, y: KnownArray) -> KnownArray:
    return condition.map(lambda is_true, a, b: a if is_true else b, x, y, dtype=x.dtype)


@operator("Where", on_numbers=_select_numbers)
def where(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


# --- several inputs ------------------------------------------------------------------------------------------------


def _add_variadic_row(
    name: str, function: Callable[[Any, Any], Any], number_function: Callable[[Any, Any], Any]
) -> None:
    def run(node: Node, *tensors: Tensor) -> Tensor:
        return reduce(function, tensors)

    def run_on_numbers(node: Node, *arrays: KnownArray) -> Any:
        return reduce(lambda x, y: x.map(number_function, y), arrays)

    OPERATORS[name] = Operator(name, run, on_numbers=run_on_numbers)


_add_variadic_row("Max", torch.maximum, sym_max)
_add_variadic_row("Min", torch.minimum, sym_min)
_add_variadic_row("Sum", torch.add, python_operator.add)


@operator("Mean")
def mean(node: Node, *tensors: Tensor) -> Tensor:
    return reduce(torch.add, tensors) / len(tensors)


# --- limits and types ----------------------------------------------------------------------------------------------


_NO_UPPER_LIMIT = 3.4e38  # exporters write the largest float32 for a limit that is not there


def _clip_numbers(node: Node, x: KnownArray, low: KnownArray | None = None, high: KnownArray | None = None) -> Any:
    if low is None and high is None:
        return NotImplemented  # before opset 11 the limits are attributes; `clip` reads them
    if low is not None:
        x = x.map(sym_max, low)
    if high is not None:
        x = x.map(sym_min, high)
    return x


def _clip_limits(node: Node, low: Any, high: Any) -> tuple[Any, Any]:
    """Return both limits: each a number, None, or a tensor that is computed from data."""
    if node.opset < 11:
        return node.get("min"), node.get("max")
    low, high = (as_number(limit, "limit") if isinstance(limit, KnownArray) else limit for limit in (low, high))
    return low, high


def _clip_layer(node: Node, constants: Any) -> Layer | None:
    has_computed_limit = any(name and constants[index] is None for index, name in enumerate(node.inputs) if index > 0)
    if has_computed_limit:
        return None
    limits = constants[1:3]
    numbers = [limit.item() if limit is not None and limit.numel() == 1 else None for limit in limits]
    low, high = _clip_limits(node, *numbers)
    if low != 0:
        return None
    if high == 6:
        return Layer(nn.ReLU6())
    return Layer(nn.ReLU()) if high is None or high >= _NO_UPPER_LIMIT else None


@operator("Clip", on_numbers=_clip_numbers, known_inputs=(1, 2), make_layer=_clip_layer)
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
        return x.map(_number_to_float, dtype=dtype)
    if dtype == torch.bool:
        return x.map(bool, dtype=dtype)
    if any(isinstance(number, float) and not math.isfinite(number) for number in x.to_list()):
        return NotImplemented
    return x.map(_number_to_int, dtype=dtype)


def _number_to_float(number: Any) -> Any:
    return sym_float(number) if isinstance(number, torch.SymInt) else float(number)


def _number_to_int(number: Any) -> Any:
    if isinstance(number, torch.SymInt):
        return number
    return sym_int(number) if isinstance(number, torch.SymFloat) else int(number)


@operator("Cast", on_numbers=_cast_numbers)
def cast(node: Node, x: Tensor) -> Tensor:
    return _to_dtype(node, x, torch_dtype(node.get("to")))


@operator("CastLike", on_numbers=_cast_numbers)
def cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return _to_dtype(node, x, like.dtype)


def _to_dtype(node: Node, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return _to_float8(node, x, dtype)
    return x.to(dtype)


def _to_float8(node: Node, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to an 8-bit float, where numbers out of range become the largest one. torch does so for some types only."""
    require(node.get("round_mode", "nearest") == "nearest", "a cast with another round_mode than nearest")
    require(node.get("saturate", 1), "a cast to an 8-bit float without saturation")
    wide, largest = x.to(torch.float32), torch.finfo(dtype).max
    return torch.where(wide.isnan(), wide, wide.clamp(-largest, largest)).to(dtype)


@operator("BitCast")
def bit_cast(node: Node, x: Tensor) -> Tensor:
    return x.view(torch_dtype(node.get("to")))
