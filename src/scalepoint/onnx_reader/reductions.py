"""Operators that reduce axes or work along an axis: sums, extremes, softmax, cumulative sums, dropout."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.onnx_reader.operators import (
    OPERATORS,
    Layer,
    Node,
    Operator,
    RunFunction,
    add_operator,
    operator,
    outputs_of,
    require,
)
from scalepoint.onnx_reader.values import KnownArray, Value, as_list, as_number, known_array, round_number

Axes = tuple[int, ...]


def reduction_axes(node: Node, axes: Value | None) -> list[int] | None:
    """Return the axes of a reduction, from the input or the attribute; None if there are none."""
    values = node.get("axes") if axes is None else as_list(axes, "list of axes")
    return list(values) if values else None


def _product(x: Tensor, axes: Axes, keepdim: bool) -> Tensor:
    # torch.prod takes one axis: reduce the last axis first, so that the others keep their positions.
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdim, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: Axes, keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdim, dtype=x.dtype)


def _smallest_number(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _largest_number(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extreme(
    function: Callable[..., Tensor], result_if_empty: Callable[[torch.dtype], float | int | bool]
) -> Callable[[Tensor, Axes, bool], Tensor]:
    """Return a maximum or minimum that also takes axes of size 0, which torch refuses."""

    def reduce(x: Tensor, axes: Axes, keepdim: bool) -> Tensor:
        if any(x.shape[axis] == 0 for axis in axes):
            reduced_axes = [axis % x.ndim for axis in axes]
            shape = [1 if axis in reduced_axes else size for axis, size in enumerate(x.shape)]
            result = x.new_full(shape, result_if_empty(x.dtype))
            return result if keepdim else result.squeeze(tuple(axes))
        return function(x, axes, keepdim)

    return reduce


_REDUCTIONS: dict[str, Callable[[Tensor, Axes, bool], Tensor]] = {
    "ReduceMean": lambda x, axes, keep: (
        torch.mean(x, axes, keep) if x.is_floating_point() else torch.mean(x.double(), axes, keep).to(x.dtype)
    ),
    "ReduceSum": _sum,
    "ReduceMax": _extreme(torch.amax, _smallest_number),
    "ReduceMin": _extreme(torch.amin, _largest_number),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.sqrt(_sum(x * x, axes, keep)).to(x.dtype),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}
_NUMBER_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "ReduceSum": sum,
    "ReduceProd": math.prod,
    "ReduceMax": lambda numbers: max(numbers) if len(numbers) > 1 else numbers[0],
    "ReduceMin": lambda numbers: min(numbers) if len(numbers) > 1 else numbers[0],
}


def _reduction(function: Callable[[Tensor, Axes, bool], Tensor]) -> RunFunction:
    def run(node: Node, x: Tensor, axes: Value | None = None) -> Tensor:
        chosen_axes, keepdim = reduction_axes(node, axes), bool(node.get("keepdims", 1))
        if chosen_axes is None and node.get("noop_with_empty_axes", 0):
            # No axis is reduced, but for example ReduceL1 still computes |x|.
            if x.ndim == 0 or node.operator in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
                return x
            return function(x.unsqueeze(-1), (-1,), False)
        if x.ndim == 0:
            return function(x.reshape(1), (0,), False)
        return function(x, tuple(range(x.ndim)) if chosen_axes is None else tuple(chosen_axes), keepdim)

    return run


def _reduction_on_numbers(function: Callable[[Sequence[Any]], Any]) -> RunFunction:
    def run(node: Node, x: KnownArray, axes: KnownArray | None = None) -> Any:
        """Reduce a vector, such as a shape; other arrays become tensors."""
        chosen_axes = reduction_axes(node, axes)
        if x.ndim != 1 or not x.numbers.size or (chosen_axes is None and node.get("noop_with_empty_axes", 0)):
            return NotImplemented
        shape = (1,) if node.get("keepdims", 1) else ()
        return known_array([round_number(function(x.to_list()), x.dtype)], shape, x.dtype)

    return run


def _add_reduction_rows() -> None:
    for name, function in _REDUCTIONS.items():
        number_function = _NUMBER_REDUCTIONS.get(name)
        OPERATORS[name] = Operator(
            name,
            _reduction(function),
            on_numbers=None if number_function is None else _reduction_on_numbers(number_function),
            known_inputs=(1,),
        )


_add_reduction_rows()


def _extreme_index(node: Node, x: Tensor, function: Callable[..., Tensor]) -> Any:
    axis, keepdim = node.get("axis", 0), bool(node.get("keepdims", 1))
    if node.get("select_last_index", 0):
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim)
    return function(x, axis, keepdim)


add_operator("ArgMax", lambda node, x: _extreme_index(node, x, torch.argmax))
add_operator("ArgMin", lambda node, x: _extreme_index(node, x, torch.argmin))


@operator("TopK", known_inputs=(1,))
def top_k(node: Node, x: Tensor, k: Value | None = None) -> Any:
    count = node.get("k") if k is None else as_number(k, "number of values")
    axis, is_largest = node.get("axis", -1), bool(node.get("largest", 1))
    if x.is_floating_point():
        return tuple(torch.topk(x, count, axis, is_largest, sorted=True))
    # Integers are often equal. ONNX puts the smaller index first; torch.topk does not promise that.
    values, indices = torch.sort(x, dim=axis, descending=is_largest, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@operator("CumSum", known_inputs=(1,))
def cumulative_sum(node: Node, x: Tensor, axis: Value) -> Tensor:
    return _cumulate(node, x, as_number(axis, "axis"), torch.cumsum, start=0)


@operator("CumProd", known_inputs=(1,))
def cumulative_product(node: Node, x: Tensor, axis: Value) -> Tensor:
    return _cumulate(node, x, as_number(axis, "axis"), torch.cumprod, start=1)


def _cumulate(node: Node, x: Tensor, axis: int, function: Callable[..., Tensor], start: int) -> Tensor:
    is_reversed = bool(node.get("reverse", 0))
    x = x.flip(axis) if is_reversed else x
    if node.get("exclusive", 0):  # each result leaves out its own element
        first = torch.full_like(x.narrow(axis, 0, 1), start)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    result = function(x, axis, dtype=x.dtype)
    return result.flip(axis) if is_reversed else result


def _along_axis(node: Node, x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """Apply a function such as softmax along an axis; before opset 13, along `axis` and all axes after it as one."""
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % max(x.ndim, 1)
    if axis == x.ndim - 1:
        return function(x, -1)
    return function(x.flatten(axis), -1).reshape(x.shape)


def _softmax_layer(node: Node, constants: Any) -> Layer | None:
    return Layer(nn.Softmax(node.get("axis", -1))) if node.opset >= 13 else None


@operator("Softmax", make_layer=_softmax_layer)
def softmax(node: Node, x: Tensor) -> Tensor:
    return _along_axis(node, x, F.softmax)


add_operator("LogSoftmax", lambda node, x: _along_axis(node, x, F.log_softmax))


@operator("Hardmax")
def hardmax(node: Node, x: Tensor) -> Tensor:
    def largest_is_one(x: Tensor, axis: int) -> Tensor:
        return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)

    return _along_axis(node, x, largest_is_one)


@operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, node.get("p", 2), node.get("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(node: Node, x: Tensor) -> Tensor:
    axes = tuple(node.get("axes", (0, 2, 3)))
    mean = x.mean(axes, keepdim=True)
    variance = (x * x).mean(axes, keepdim=True) - mean * mean
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


@operator("Dropout", known_inputs=(1, 2))
def dropout(node: Node, x: Tensor, ratio: Value | None = None, training: Value | None = None) -> Any:
    if training is not None and as_number(training, "training mode"):
        rate = 0.5 if ratio is None else as_number(ratio, "ratio")
        require(rate == 0, "dropout in training mode")
    mask = torch.ones_like(x, dtype=torch.bool) if node.opset >= 10 else torch.ones_like(x)
    return outputs_of(node, x, mask)
