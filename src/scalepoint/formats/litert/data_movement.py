"""Operations that move values without computing: quantized values keep their codes and parameters.

Quantize and dequantize are here too, because they only change the form of a value.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.elementwise import BROADCASTS
from scalepoint.formats.litert.graph_writer import FusedEnding, GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.schema import DynamicExtent, QuantizationParameters
from scalepoint.formats.litert.values import FixedBatchError, QuantizedConstant, Value, model_order

aten, scalepoint_ops = torch.ops.aten, torch.ops.scalepoint


@writes(scalepoint_ops.quantize.default)
def quantize(writer: GraphWriter, node: fx.Node) -> Any:
    x, quantization = writer.argument(node.args[0]), writer.read_quantization(node)
    if isinstance(x, QuantizedConstant) and quantization.equals(x.quantization):
        return x
    if isinstance(x, QuantizedConstant | Tensor):
        values = torch.from_numpy(x.values) if isinstance(x, QuantizedConstant) else x
        codes = scalepoint_ops.quantize(values, *map(writer.argument, node.args[1:]))
        return QuantizedConstant(node.name, codes.numpy(), "int8", quantization)
    return requantize(writer, x, quantization)


def requantize(writer: GraphWriter, x: Any, quantization: QuantizationParameters) -> Any:
    """Convert floats or other codes to codes with these parameters."""
    if isinstance(x, Value) and x.quantization is not None and quantization.equals(x.quantization):
        return x
    if not isinstance(x, Value):
        raise UnsupportedOperationError("joins constants and int8 tensors")
    return writer.quantize(x, quantization)


@writes(scalepoint_ops.dequantize.default)
def dequantize(writer: GraphWriter, node: fx.Node) -> Any:
    """Represent constant codes as a QuantizedConstant. A computed value stays codes until an operation needs floats."""
    arguments = writer.arguments(node)
    codes = arguments["codes"]
    if not isinstance(codes, Tensor):
        return codes
    scale, zero_point = arguments["scale"], arguments["zero_point"]
    quantization = QuantizationParameters(
        scale=scale.detach().to(torch.float32).numpy(),
        zero_point=0 if zero_point is None else int(zero_point.reshape(-1)[0]),
        axis=int(arguments["axis"]),
        block=int(arguments["block"]),
    )
    name = writer.constant_names.get(id(codes), node.name).removesuffix(".codes")
    return QuantizedConstant(name, codes.detach().numpy(), str(arguments["fmt"]), quantization)


@writes(scalepoint_ops.rows.default)
def quantize_rows(writer: GraphWriter, node: fx.Node) -> Any:
    """Mark a value whose rows are quantized by the kernel that reads it."""
    x = writer.dequantize(writer.arguments(node)["x"])
    return Value(x.shape, x.dtype, x.tensors, is_quantized_per_row=True) if isinstance(x, Value) else x


@writes(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
)
def copy_value(writer: GraphWriter, node: fx.Node) -> Any:
    return writer.argument(node.args[0])


@writes(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def reshape(writer: GraphWriter, node: fx.Node) -> Any:
    x = writer.first_operand(node)
    shape, _ = writer.shape_and_dtype(node)
    if tuple(shape) == tuple(x.shape):
        return x
    return writer.reshape(x, shape)


@writes(aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default)
def permute(writer: GraphWriter, node: fx.Node) -> Any:
    x, arguments = writer.first_operand(node), writer.arguments(node)
    axes = list(model_order(x.rank))
    if "dims" in arguments:
        axes = [axis % x.rank for axis in arguments["dims"]]
    elif x.rank > 1:
        first, second = arguments.get("dim0", -2) % x.rank, arguments.get("dim1", -1) % x.rank
        axes[first], axes[second] = axes[second], axes[first]
    return x.permuted(axes)


@writes(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(writer: GraphWriter, node: fx.Node) -> Any:
    """Write an expand, unless all readers broadcast their operands themselves."""
    x, (shape, dtype) = writer.argument(node.args[0]), writer.shape_and_dtype(node)
    if tuple(shape) == tuple(x.shape):
        return x
    if all(reader.target in BROADCASTS for reader in node.users):
        return x
    return broadcast_to(writer, writer.dequantize(x), shape, dtype)


def broadcast_to(writer: GraphWriter, x: Any, shape: Sequence[int], dtype: str) -> Value:
    """Repeat `x` along its axes of extent 1 until it has this shape.

    TILE takes constant factors. Along a dynamic batch `x` is repeated by adding it to zeros for each sample.
    """
    rank = len(shape)
    x_shape = [1] * (rank - len(x.shape)) + list(x.shape)
    dynamic_axes = [
        axis
        for axis in range(rank)
        if isinstance(shape[axis], DynamicExtent) and not isinstance(x_shape[axis], DynamicExtent)
    ]
    if isinstance(x, Tensor):
        x = x.reshape(x_shape)
    elif x.rank != rank:
        x = writer.reshape(x, x_shape)
    if dynamic_axes and (dynamic_axes != [0] or dtype != "float32"):
        raise FixedBatchError("a tensor is repeated along the batch")
    factors = [
        1 if isinstance(size, DynamicExtent) else size // int(x_size)
        for size, x_size in zip(shape, x_shape, strict=True)
    ]
    if any(factor > 1 for factor in factors):
        tiled_shape = []
        for axis, size in enumerate(shape):
            stays_dynamic = isinstance(size, DynamicExtent) and axis not in dynamic_axes
            tiled_shape.append(size if stays_dynamic else int(x_shape[axis]) * factors[axis])
        x = writer.emit("TILE", [writer.materialize(x), writer.add_int_list(factors)], tiled_shape, dtype)
    if dynamic_axes:
        inputs = [writer.materialize(x), writer.materialize(writer.zeros_per_sample(rank))]
        x = writer.emit("ADD", inputs, shape, dtype)
    return writer.as_value(x)


@writes(aten.repeat.default, aten.tile.default)
def repeat(writer: GraphWriter, node: fx.Node) -> Value:
    x, (shape, dtype) = writer.dequantize(writer.first_operand(node)), writer.shape_and_dtype(node)
    x_shape = [1] * (len(shape) - x.rank) + list(x.shape)
    factors = []
    for size, x_size in zip(shape, x_shape, strict=True):
        if isinstance(size, DynamicExtent) != isinstance(x_size, DynamicExtent):
            raise FixedBatchError("a tensor is repeated along the batch")
        factors.append(1 if isinstance(size, DynamicExtent) else size // x_size)
    if x.rank != len(shape):
        x = writer.reshape(x, x_shape)
    return writer.emit("TILE", [writer.materialize(x), writer.add_int_list(factors)], shape, dtype)


@writes(aten.slice.Tensor, aten.narrow.default)
def slice_axis(writer: GraphWriter, node: fx.Node) -> Any:
    x, arguments = writer.first_operand(node), writer.arguments(node)
    shape, _ = writer.shape_and_dtype(node)
    axis = int(arguments["dim"]) % x.rank
    step = int(arguments.get("step", 1))
    start = arguments["start"] or 0
    if tuple(shape) == tuple(x.shape) and not start and step == 1:
        return x
    if isinstance(x.shape[axis], DynamicExtent) or isinstance(start, DynamicExtent):
        raise FixedBatchError("a slice of the batch")
    start = int(start) + (x.shape[axis] if start < 0 else 0)
    return write_slice(writer, x, axis, min(start, x.shape[axis]), shape[axis], step)


def write_slice(writer: GraphWriter, x: Value, axis: int, start: int, count: int, step: int = 1) -> Value:
    """Write STRIDED_SLICE: `count` elements of an axis, from `start` on, `step` apart."""
    order = x.order
    shape = [count if dim == axis else size for dim, size in enumerate(x.shape)]
    begin = [start if dim == axis else 0 for dim in order]
    end = [start + (count - 1) * step + 1 if dim == axis else 0 for dim in order]
    steps = [step if dim == axis else 1 for dim in order]
    whole_axes = sum(1 << position for position, dim in enumerate(order) if dim != axis)  # a bit for each axis
    return writer.emit(
        "STRIDED_SLICE",
        [x.tensors[order], *map(writer.add_int_list, (begin, end, steps))],
        shape,
        x.dtype,
        order=order,
        quantization=x.quantization,
        options={"beginMask": whole_axes, "endMask": whole_axes},
    )


@writes(aten.select.int)
def select(writer: GraphWriter, node: fx.Node) -> Value:
    x, arguments = writer.first_operand(node), writer.arguments(node)
    return _write_select(writer, x, int(arguments["dim"]) % x.rank, int(arguments["index"]))


def _write_select(writer: GraphWriter, x: Value, axis: int, index: int) -> Value:
    """Write a slice of one element, and a RESHAPE that removes its axis in the order in which it is stored."""
    if isinstance(x.shape[axis], DynamicExtent):
        raise FixedBatchError("one sample of the batch is picked")
    sliced = write_slice(writer, x, axis, index % x.shape[axis], 1)
    shape = [size for dim, size in enumerate(sliced.shape) if dim != axis]
    order = tuple(dim - (dim > axis) for dim in sliced.order if dim != axis)
    return writer.reshape_stored(sliced, sliced.tensors[sliced.order], shape, order)


@writes(aten.unbind.int)
def unbind(writer: GraphWriter, node: fx.Node) -> list[Value]:
    x, arguments = writer.first_operand(node), writer.arguments(node)
    axis = int(arguments["dim"]) % x.rank
    return [_write_select(writer, x, axis, index) for index in range(x.shape[axis])]


@writes(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def split(writer: GraphWriter, node: fx.Node) -> list[Value]:
    x, arguments = writer.first_operand(node), writer.arguments(node)
    axis = int(arguments["dim"]) % x.rank
    if isinstance(x.shape[axis], DynamicExtent):
        raise FixedBatchError("the batch is split")
    parts, start = [], 0
    for part in node.meta["val"]:
        size = int(part.shape[axis])
        parts.append(write_slice(writer, x, axis, start, size))
        start += size
    return parts


@writes(operator.getitem)
def get_item(writer: GraphWriter, node: fx.Node) -> Any:
    """Return one result of an operation with several results."""
    results: Any = writer.argument(node.args[0])
    index: Any = node.args[1]
    return results[index]


@writes(aten.cat.default)
def concat(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    # torch.cat ignores tensors of shape (0,).
    parts = [part for part in arguments["tensors"] if tuple(part.shape) != (0,)]
    part_nodes: Any = node.args[0]
    part_nodes = [part for part in part_nodes if tuple(part.meta["val"].shape) != (0,)]
    shape, dtype = writer.shape_and_dtype(node)
    axis, ending = int(arguments["dim"]) % len(shape), writer.find_ending(node, folds_activation=False)
    quantization = _common_quantization(parts, ending)
    if quantization is not None:
        parts = [requantize(writer, part, quantization) for part in parts]
    else:
        for index, part_node in enumerate(part_nodes):
            part = writer.dequantize(parts[index])
            part_shape, _ = writer.shape_and_dtype(part_node)
            if not isinstance(part, Value) or tuple(part.shape) != part_shape:  # a constant, or a skipped expand
                part = broadcast_to(writer, part, part_shape, dtype)
            parts[index] = part
    order = parts[0].order
    result = writer.emit(
        "CONCATENATION",
        [writer.materialize(part, order) for part in parts],
        shape,
        dtype,
        order=order,
        quantization=quantization,
        options={"axis": order.index(axis)},
    )
    return writer.set_result(node, ending, result)


def _common_quantization(parts: Sequence[Any], ending: FusedEnding) -> QuantizationParameters | None:
    """Return the parameters for a concat in int8: those of the result, or those that all parts have. None: float."""
    quantizations = [part.quantization if isinstance(part, Value) else None for part in parts]
    if any(quantization is None for quantization in quantizations):
        return None
    if ending.quantization is not None:
        return ending.quantization
    first = quantizations[0]
    if first is not None and all(first.equals(quantization) for quantization in quantizations):
        return first
    return None


@writes(aten.stack.default)
def stack(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    shape, dtype = writer.shape_and_dtype(node)
    axis = int(arguments["dim"]) % len(shape)
    part_shape = [1 if dim == axis else size for dim, size in enumerate(shape)]
    parts = [writer.dequantize(part) for part in arguments["tensors"]]
    parts = [
        part.reshape(part_shape) if isinstance(part, Tensor) else writer.reshape(part, part_shape) for part in parts
    ]
    inputs = [writer.materialize(part) for part in parts]
    return writer.emit("CONCATENATION", inputs, shape, dtype, options={"axis": axis})


@writes(aten.constant_pad_nd.default)
def pad(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, amounts, fill_value = arguments["self"], list(arguments["pad"]), float(arguments["value"])
    # torch lists pairs from the last axis to the first one that is padded.
    pairs = [(0, 0)] * (x.rank - len(amounts) // 2)
    pairs += [(amounts[index], amounts[index + 1]) for index in range(len(amounts) - 2, -1, -2)]
    shape, dtype = writer.shape_and_dtype(node)
    if any(amount < 0 for pair in pairs for amount in pair):
        return _write_crop(writer, x, pairs, shape)
    ending = writer.find_ending(node, folds_activation=False)
    if fill_value != 0:
        x = writer.dequantize(x)
    elif ending.quantization is not None:  # zero has an exact code, the zero point
        x = requantize(writer, x, ending.quantization)
    order = x.order
    paddings = writer.add_constant(np.array([pairs[axis] for axis in order], np.int32), "paddings")
    inputs = [x.tensors[order], paddings]
    if fill_value == 0:
        padded = writer.emit("PAD", inputs, shape, dtype, order=order, quantization=x.quantization)
        return writer.set_result(node, ending, padded)
    return writer.emit("PADV2", [*inputs, writer.add_number(fill_value, dtype)], shape, dtype, order=order)


def _write_crop(writer: GraphWriter, x: Value, pairs: Sequence[tuple[int, int]], shape: Sequence[int]) -> Value:
    if any(amount > 0 for pair in pairs for amount in pair):
        raise UnsupportedOperationError("pads and crops at once")
    for axis, (before, after) in enumerate(pairs):
        if (before, after) != (0, 0):
            x = write_slice(writer, x, axis, -before, int(shape[axis]))
    return x


@writes(aten.flip.default)
def flip(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x: Value = writer.dequantize(arguments["self"])
    for axis in arguments["dims"]:
        x = writer.emit_elementwise("REVERSE_V2", x, [writer.add_int_list([x.order.index(axis % x.rank)])])
    return x
