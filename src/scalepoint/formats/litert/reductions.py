"""Sums over axes, softmax, and pictures made larger."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from scalepoint.formats.litert.products import CHANNELS_LAST_ORDER, quantize_result
from scalepoint.formats.litert.values import Order, Value, model_order
from scalepoint.formats.litert.walk import UnsupportedOperationError, Walk, writes

aten = torch.ops.aten
REDUCTION_OPERATORS: dict[Any, str] = {
    aten.mean.dim: "MEAN", aten.mean.default: "MEAN", aten.sum.dim_IntList: "SUM", aten.sum.default: "SUM",
    aten.amax.default: "REDUCE_MAX", aten.amin.default: "REDUCE_MIN", aten.any.dim: "REDUCE_ANY",
    aten.all.dim: "REDUCE_ALL",
}  # fmt: skip


@writes(*REDUCTION_OPERATORS)
def reduce(walk: Walk, node: fx.Node) -> Value:
    given, operator = walk.arguments(node), REDUCTION_OPERATORS[node.target]
    x, (shape, kind) = given["self"], walk.shape_and_dtype(node)
    dims = given.get("dim")
    listed = dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    axes = sorted({axis % x.rank for axis in listed}) or list(range(x.rank))
    end = walk.ending(node, folds=False)
    is_integer = operator == "MEAN" and x.codes is not None and end.codes is not None
    x = x if is_integer else walk.dequantized(x)
    x = walk.cast(x, kind)
    is_kept, order = bool(given.get("keepdim")), x.order
    inputs = [x.stored[order], walk.ints([order.index(axis) for axis in axes])]
    after = order if is_kept else _remaining_order(order, axes)
    codes = end.codes if is_integer else None
    made = walk.emit(
        operator, inputs, shape, kind, order=after, codes=codes, name=node.name, options={"keepDims": is_kept}
    )
    return quantize_result(walk, node, end, made)


def _remaining_order(order: Order, axes: list[int]) -> Order:
    """The order of the axes that are not reduced."""
    kept = [axis for axis in order if axis not in axes]
    places = {axis: place for place, axis in enumerate(sorted(kept))}
    return tuple(places[axis] for axis in kept)


@writes(aten.softmax.int, aten._softmax.default)
def softmax(walk: Walk, node: fx.Node) -> Value:
    return _write_along_last_axis(walk, node, "SOFTMAX", {"beta": 1.0})


@writes(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(walk: Walk, node: fx.Node) -> Value:
    return _write_along_last_axis(walk, node, "LOG_SOFTMAX", {})


def _write_along_last_axis(walk: Walk, node: fx.Node, operator: str, options: Mapping[str, Any]) -> Value:
    """An operator that works along the last axis of what is stored."""
    given = walk.arguments(node)
    x, (shape, kind) = walk.dequantized(given["self"]), walk.shape_and_dtype(node)
    axis = int(given["dim"]) % x.rank
    fitting = next((order for order in x.stored if order[-1] == axis), None)
    order = fitting or (*(each for each in model_order(x.rank) if each != axis), axis)
    return walk.emit(operator, [walk.take(x, order)], shape, kind, order=order, options=options)


@writes(aten.argmax.default)
def argmax(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, (shape, _) = walk.dequantized(given["self"]), walk.shape_and_dtype(node)
    if given["dim"] is None:
        raise UnsupportedOperationError("looks for the largest of all elements")
    axis = int(given["dim"]) % x.rank
    kept = [size for place, size in enumerate(x.shape) if place != axis]
    options = {"outputType": walk.file.schema.TensorType.INT64}
    found = walk.emit("ARG_MAX", [walk.take(x), walk.ints([axis])], kept, "int64", options=options)
    return walk.reshaped(found, shape) if given["keepdim"] else found


@writes(aten.cumsum.default)
def cumsum(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, (shape, kind) = walk.dequantized(given["self"]), walk.shape_and_dtype(node)
    x = walk.cast(x, kind)
    axis = walk.file.constant("axis", np.array(int(given["dim"]) % x.rank, np.int32))
    return walk.emit("CUMSUM", [walk.take(x), axis], shape, kind)


@writes(aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec)
def resize_nearest(walk: Walk, node: fx.Node) -> Value:
    return _write_resize(walk, node, "RESIZE_NEAREST_NEIGHBOR", {})


@writes(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec)
def resize_bilinear(walk: Walk, node: fx.Node) -> Value:
    is_aligned = bool(walk.arguments(node)["align_corners"])
    return _write_resize(
        walk, node, "RESIZE_BILINEAR", {"alignCorners": is_aligned, "halfPixelCenters": not is_aligned}
    )


def _write_resize(walk: Walk, node: fx.Node, operator: str, options: Mapping[str, Any]) -> Value:
    given = walk.arguments(node)
    x, (shape, kind) = given["self"] if "self" in given else given["input"], walk.shape_and_dtype(node)
    x = x if operator.startswith("RESIZE_NEAREST") else walk.dequantized(x)
    inputs = [walk.take(x, CHANNELS_LAST_ORDER), walk.ints([int(each) for each in shape[2:]])]
    return walk.emit(operator, inputs, shape, kind, order=CHANNELS_LAST_ORDER, codes=x.codes, options=options)
