"""Operators that compute each element from the elements at the same position: arithmetic, activations, casts."""

import math
import operator as python_operator  # `operator` is the decorator of the table
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.onnx_reader.operators import (
    OPERATORS,
    Layer,
    Node,
    Operator,
    add_operator,
    operator,
    require,
)
from scalepoint.onnx_reader.values import KnownArray, as_number, sym_float, sym_int, sym_max, sym_min, torch_dtype

# --- one input -----------------------------------------------------------------------------------------------------


def _add_unary(
    name: str,
    function: Callable[[Tensor], Tensor],
    on_numbers: Callable[[Any], Any] | None = None,
    module: type[nn.Module] | None = None,
) -> None:
    """Add a row for a function of one tensor.

    Args:
        name: Name of the operator.
        function: Computes it on a tensor.
        on_numbers: The same for a Python number or symbolic size, for operators that also compute sizes of tensors.
        module: The activation as a module of torch, so that it gets the name of its node.
    """

    def run_on_numbers(node: Node, x: KnownArray) -> Any:
        if on_numbers is math.sqrt and any(number < 0 for number in x.to_list()):
            return NotImplemented  # math.sqrt raises an error; torch.sqrt returns NaN
        return x.map(on_numbers)  # type: ignore[arg-type]  # is not called if on_numbers is None

    add_operator(
        name,
        lambda node, x: function(x),
        on_numbers=None if on_numbers is None else run_on_numbers,
        make_layer=None if module is None else lambda node, constants: Layer(module()),
    )


_add_unary("Abs", torch.abs, abs)
_add_unary("Acos", torch.acos)
_add_unary("Acosh", torch.acosh)
_add_unary("Asin", torch.asin)
_add_unary("Asinh", torch.asinh)
_add_unary("Atan", torch.atan)
_add_unary("Atanh", torch.atanh)
_add_unary("BitwiseNot", torch.bitwise_not)
_add_unary("Ceil", torch.ceil, math.ceil)
_add_unary("Cos", torch.cos)
_add_unary("Cosh", torch.cosh)
_add_unary("Erf", torch.erf)
_add_unary("Exp", torch.exp)
_add_unary("Floor", torch.floor, math.floor)
_add_unary("HardSwish", F.hardswish, module=nn.Hardswish)
_add_unary("IsNaN", torch.isnan)
_add_unary("Log", torch.log)
_add_unary("Mish", F.mish, module=nn.Mish)
_add_unary("Neg", torch.neg, python_operator.neg)
_add_unary("Not", torch.logical_not, python_operator.not_)
_add_unary("Reciprocal", torch.reciprocal)
_add_unary("Relu", F.relu, module=nn.ReLU)
_add_unary("Round", torch.round, round)
_add_unary("Sigmoid", torch.sigmoid, module=nn.Sigmoid)
_add_unary("Sign", torch.sign)
_add_unary("Sin", torch.sin)
_add_unary("Sinh", torch.sinh)
_add_unary("Softplus", F.softplus)
_add_unary("Softsign", F.softsign)
_add_unary("Sqrt", torch.sqrt, math.sqrt)
_add_unary("Tan", torch.tan)
_add_unary("Tanh", torch.tanh, module=nn.Tanh)
add_operator("Identity", lambda node, x: x, on_numbers=lambda node, x: x)
add_operator("Elu", lambda node, x: F.elu(x, node.get("alpha", 1.0)))


@operator("Selu")
def selu(node: Node, x: Tensor) -> Any:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return gamma * F.elu(x, alpha)


@operator("LeakyRelu", make_layer=lambda node, constants: Layer(nn.LeakyReLU(node.get("alpha", 0.01))))
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node.get("alpha", 0.01))


add_operator("ThresholdedRelu", lambda node, x: F.threshold(x, node.get("alpha", 1.0), 0.0))


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


def _add_binary(
    name: str,
    function: Callable[[Any, Any], Tensor],
    on_numbers: Callable[[Any, Any], Any] | None = None,
    *,
    returns_bool: bool = False,
    takes_numbers: bool = True,
) -> None:
    """Add a row for a function of two tensors; `on_numbers` is the same for Python numbers and symbolic sizes."""

    def run(node: Node, x: Any, y: Any) -> Tensor:
        axis = node.get("axis")
        if node.opset < 7 and axis is not None and isinstance(y, Tensor):
            # Before opset 7 the axes of y are those of x from `axis` on: add axes of size 1 after them.
            new_axes = x.ndim - axis - y.ndim
            y = y.reshape(*y.shape, *[1] * new_axes)
        return function(x, y)

    def run_on_numbers(node: Node, x: KnownArray, y: KnownArray) -> Any:
        if on_numbers is python_operator.pow and any(number < 0 for number in (*x.to_list(), *y.to_list())):
            return NotImplemented  # Python may return a complex number or divide by zero
        if on_numbers is _divide_integers:
            if any(isinstance(n, int | float) and n == 0 for n in y.to_list()):
                return NotImplemented  # Python raises an error; torch returns infinity or NaN
            if x.dtype.is_floating_point:  # also of numbers that are whole: Floor of a SymFloat is a SymInt
                return x.map(python_operator.truediv, y)
        dtype = torch.bool if returns_bool else None
        return x.map(on_numbers, y, dtype=dtype)  # type: ignore[arg-type]  # is not called if on_numbers is None

    add_operator(name, run, on_numbers=None if on_numbers is None else run_on_numbers, takes_numbers=takes_numbers)


def _divide_integers(x: Any, y: Any) -> Any:
    """Divide integers, and round the result towards zero."""
    # Symbolic sizes are never negative, so // rounds them towards zero, too.
    if isinstance(x, int) and isinstance(y, int) and (x < 0) != (y < 0):
        return -(abs(x) // abs(y))
    return x // y


_add_binary("Add", _tensor_first(torch.add), python_operator.add)
_add_binary("Sub", python_operator.sub, python_operator.sub)
_add_binary("Mul", _tensor_first(torch.mul), python_operator.mul)
_add_binary("Div", _divide, _divide_integers)
_add_binary("Pow", _power, python_operator.pow)
_add_binary("Equal", python_operator.eq, python_operator.eq, returns_bool=True)
_add_binary("Less", python_operator.lt, python_operator.lt, returns_bool=True)
_add_binary("LessOrEqual", python_operator.le, python_operator.le, returns_bool=True)
_add_binary("Greater", python_operator.gt, python_operator.gt, returns_bool=True)
_add_binary("GreaterOrEqual", python_operator.ge, python_operator.ge, returns_bool=True)
# torch's functions for these take no Python numbers.
_add_binary("And", torch.logical_and, lambda x, y: bool(x and y), returns_bool=True, takes_numbers=False)
_add_binary("Or", torch.logical_or, lambda x, y: bool(x or y), returns_bool=True, takes_numbers=False)
_add_binary("Xor", torch.logical_xor, lambda x, y: bool(x) != bool(y), returns_bool=True, takes_numbers=False)
_add_binary("BitwiseAnd", python_operator.and_)
_add_binary("BitwiseOr", python_operator.or_)
_add_binary("BitwiseXor", python_operator.xor)


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


add_operator("CastLike", lambda node, x, like: _to_dtype(node, x, like.dtype), on_numbers=_cast_numbers)


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


add_operator("BitCast", lambda node, x: x.view(torch_dtype(node.get("to"))))
