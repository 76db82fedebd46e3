"""Reductions over axes, softmax, argmax, cumulative sums, and resizing of images."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from scalepoint.formats.litert.graph_writer import GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.products import CHANNELS_LAST_ORDER
from scalepoint.formats.litert.values import Order, Value, model_order

aten = torch.ops.aten
REDUCTION_OPERATORS: dict[Any, str] = {
    aten.mean.dim: "MEAN", aten.mean.default: "MEAN", aten.sum.dim_IntList: "SUM", aten.sum.default: "SUM",
    aten.amax.default: "REDUCE_MAX", aten.amin.default: "REDUCE_MIN", aten.any.dim: "REDUCE_ANY",
    aten.all.dim: "REDUCE_ALL",
}  # fmt: skip


@writes(*REDUCTION_OPERATORS)
def reduce(writer: GraphWriter, node: fx.Node) -> Value:
    """Write a reduction, over all axes if `dim` is empty or missing; a MEAN between quantizers is computed in int8."""
    arguments, operator = writer.arguments(node), REDUCTION_OPERATORS[node.target]
    x, (shape, dtype) = arguments["self"], writer.shape_and_dtype(node)
    dims = arguments.get("dim")
    if dims is None:
        dims = []
    elif not isinstance(dims, list | tuple):
        dims = [dims]
    axes = sorted({axis % x.rank for axis in dims}) or list(range(x.rank))
    ending = writer.find_ending(node, folds_activation=False)
    is_integer = operator == "MEAN" and x.quantization is not None and ending.quantization is not None
    x = writer.cast(x if is_integer else writer.dequantize(x), dtype)
    keeps_axes, order = bool(arguments.get("keepdim")), x.order
    result = writer.emit(
        operator,
        [x.tensors[order], writer.add_int_list([order.index(axis) for axis in axes])],
        shape,
        dtype,
        order=order if keeps_axes else _remaining_order(order, axes),
        quantization=ending.quantization if is_integer else None,
        name=node.name,
        options={"keepDims": keeps_axes},
    )
    return writer.set_result(node, ending, result)


def _remaining_order(order: Order, reduced_axes: list[int]) -> Order:
    """Return the order of the axes that are not reduced, renumbered from 0."""
    remaining = [axis for axis in order if axis not in reduced_axes]
    new_numbers = {axis: number for number, axis in enumerate(sorted(remaining))}
    return tuple(new_numbers[axis] for axis in remaining)


@writes(aten.softmax.int, aten._softmax.default)
def softmax(writer: GraphWriter, node: fx.Node) -> Value:
    return _write_along_last_axis(writer, node, "SOFTMAX", {"beta": 1.0})


@writes(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(writer: GraphWriter, node: fx.Node) -> Value:
    return _write_along_last_axis(writer, node, "LOG_SOFTMAX", {})


def _write_along_last_axis(writer: GraphWriter, node: fx.Node, operator: str, options: Mapping[str, Any]) -> Value:
    """Write an operator that works along the last axis of the stored tensor, on an order with that axis last."""
    arguments = writer.arguments(node)
    x, (shape, dtype) = writer.dequantize(arguments["self"]), writer.shape_and_dtype(node)
    axis = int(arguments["dim"]) % x.rank
    order = next((stored for stored in x.tensors if stored[-1] == axis), None)
    if order is None:
        order = (*(other for other in model_order(x.rank) if other != axis), axis)
    return writer.emit(operator, [writer.materialize(x, order)], shape, dtype, order=order, options=options)


@writes(aten.argmax.default)
def argmax(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, (shape, _) = writer.dequantize(arguments["self"]), writer.shape_and_dtype(node)
    if arguments["dim"] is None:
        raise UnsupportedOperationError("looks for the largest of all elements, without an axis")
    axis = int(arguments["dim"]) % x.rank
    remaining_sizes = [size for other, size in enumerate(x.shape) if other != axis]
    options = {"outputType": writer.file.schema.TensorType.INT64}
    inputs = [writer.materialize(x), writer.add_int_list([axis])]
    indices = writer.emit("ARG_MAX", inputs, remaining_sizes, "int64", options=options)
    return writer.reshape(indices, shape) if arguments["keepdim"] else indices


@writes(aten.cumsum.default)
def cumsum(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, (shape, dtype) = writer.dequantize(arguments["self"]), writer.shape_and_dtype(node)
    x = writer.cast(x, dtype)
    axis = writer.file.add_constant("axis", np.array(int(arguments["dim"]) % x.rank, np.int32))
    return writer.emit("CUMSUM", [writer.materialize(x), axis], shape, dtype)


@writes(aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec)
def resize_nearest(writer: GraphWriter, node: fx.Node) -> Value:
    return _write_resize(writer, node, "RESIZE_NEAREST_NEIGHBOR", {})


@writes(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec)
def resize_bilinear(writer: GraphWriter, node: fx.Node) -> Value:
    aligns_corners = bool(writer.arguments(node)["align_corners"])
    options = {"alignCorners": aligns_corners, "halfPixelCenters": not aligns_corners}
    return _write_resize(writer, node, "RESIZE_BILINEAR", options)


def _write_resize(writer: GraphWriter, node: fx.Node, operator: str, options: Mapping[str, Any]) -> Value:
    arguments = writer.arguments(node)
    x = arguments["self"] if "self" in arguments else arguments["input"]
    shape, dtype = writer.shape_and_dtype(node)
    if operator != "RESIZE_NEAREST_NEIGHBOR":
        x = writer.dequantize(x)
    inputs = [
        writer.materialize(x, CHANNELS_LAST_ORDER),
        writer.add_int_list([int(size) for size in shape[2:]]),
    ]
    return writer.emit(
        operator, inputs, shape, dtype, order=CHANNELS_LAST_ORDER, quantization=x.quantization, options=options
    )
