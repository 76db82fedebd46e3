"""What moves values and computes nothing: codes stay codes, with the parameters they had."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.products import quantize_result
from scalepoint.formats.litert.schema import QuantizationParameters
from scalepoint.formats.litert.values import DynamicExtent, FixedBatchError, QuantizedConstant, Value, model_order
from scalepoint.formats.litert.walk import FusedEnding, UnsupportedOperationError, Walk, writes

aten, own = torch.ops.aten, torch.ops.scalepoint


@writes(own.quantize.default)
def quantize(walk: Walk, node: fx.Node) -> Any:
    x, codes = walk.argument(node.args[0]), walk.parameters(node)
    if isinstance(x, QuantizedConstant) and codes.is_same(x.quantized):
        return x
    if isinstance(x, QuantizedConstant | Tensor):
        values = torch.from_numpy(x.values) if isinstance(x, QuantizedConstant) else x
        data = own.quantize(values, *map(walk.argument, node.args[1:]))
        return QuantizedConstant(node.name, data.numpy(), "int8", codes)
    if x.codes is not None and codes.is_same(x.codes):
        return x
    return requantize(walk, x, codes)


def requantize(walk: Walk, x: Any, codes: QuantizationParameters) -> Any:
    """The same values as other codes."""
    if isinstance(x, Value) and x.codes is not None and codes.is_same(x.codes):
        return x
    if not isinstance(x, Value):
        raise UnsupportedOperationError("joins constants and int8 tensors")
    order = x.order
    is_integer = x.codes is not None
    return walk.emit("QUANTIZE", [x.stored[order]], x.shape, "float32", order=order, codes=codes, is_integer=is_integer)


@writes(own.dequantize.default)
def dequantize(walk: Walk, node: fx.Node) -> Any:
    given = walk.arguments(node)
    codes = given["codes"]
    if not isinstance(codes, Tensor):
        return codes
    scale, zero = given["scale"], given["zero_point"]
    zeros = 0 if zero is None else int(zero.reshape(-1)[0])
    told = QuantizationParameters(
        scale.detach().to(torch.float32).numpy(), zeros, int(given["axis"]), int(given["block"])
    )
    name = walk.names.get(id(codes), node.name).removesuffix(".codes")
    return QuantizedConstant(name, codes.detach().numpy(), str(given["fmt"]), told)


@writes(own.rows.default)
def quantize_rows(walk: Walk, node: fx.Node) -> Any:
    x = walk.dequantized(walk.arguments(node)["x"])
    return Value(x.shape, x.kind, x.stored, is_rows=True) if isinstance(x, Value) else x


@writes(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
)
def copy_value(walk: Walk, node: fx.Node) -> Any:
    return walk.argument(node.args[0])


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
def reshape(walk: Walk, node: fx.Node) -> Any:
    x = walk.first(node)
    shape, _ = walk.shape_and_dtype(node)
    if tuple(shape) == tuple(x.shape):
        return x
    return walk.reshaped(x, shape)


@writes(aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default)
def permute(walk: Walk, node: fx.Node) -> Any:
    x, given = walk.first(node), walk.arguments(node)
    axes = list(model_order(x.rank))
    if "dims" in given:
        axes = [axis % x.rank for axis in given["dims"]]
    elif x.rank > 1:
        one, other = (given.get("dim0", -2) % x.rank, given.get("dim1", -1) % x.rank)
        axes[one], axes[other] = axes[other], axes[one]
    return x.permuted(axes)


@writes(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(walk: Walk, node: fx.Node) -> Any:
    """Not at all where all readers broadcast by themselves."""
    x, (shape, kind) = walk.argument(node.args[0]), walk.shape_and_dtype(node)
    if tuple(shape) == tuple(x.shape):
        return x
    from scalepoint.formats.litert.elementwise import BROADCASTS  # noqa: PLC0415  # which knows this module

    if all(each.target in BROADCASTS for each in node.users):
        return x
    return broadcast_to(walk, walk.dequantized(x), shape, kind)


def broadcast_to(walk: Walk, x: Any, shape: Sequence[int], kind: str) -> Value:
    """With every extent of one as long as the shape says."""
    rank = len(shape)
    here = [1] * (rank - len(x.shape)) + list(x.shape)
    free = [
        axis
        for axis in range(rank)
        if isinstance(shape[axis], DynamicExtent) and not isinstance(here[axis], DynamicExtent)
    ]
    x = x.reshape(here) if isinstance(x, Tensor) else x if x.rank == rank else walk.reshaped(x, here)
    if free and (free != [0] or kind != "float32"):
        raise FixedBatchError("a tensor is repeated along the batch")
    many = [1 if isinstance(n, DynamicExtent) else n // int(was) for n, was in zip(shape, here, strict=True)]
    if any(each > 1 for each in many):
        grown = [
            n if isinstance(n, DynamicExtent) and axis not in free else int(here[axis]) * many[axis]
            for axis, n in enumerate(shape)
        ]
        x = walk.emit("TILE", [walk.take(x), walk.ints(many)], grown, kind)
    if free:
        x = walk.emit("ADD", [walk.take(x), walk.take(walk.batch_of_zeros(rank))], shape, kind)
    return x if isinstance(x, Value) else Value(tuple(shape), kind, {model_order(rank): walk.take(x)})


@writes(aten.repeat.default, aten.tile.default)
def repeat(walk: Walk, node: fx.Node) -> Value:
    x, (shape, kind) = walk.dequantized(walk.first(node)), walk.shape_and_dtype(node)
    many = [1] * (len(shape) - x.rank) + list(x.shape)
    if any(
        isinstance(each, DynamicExtent) != isinstance(was, DynamicExtent) for each, was in zip(shape, many, strict=True)
    ):
        raise FixedBatchError("a tensor is repeated along the batch")
    times = [1 if isinstance(n, DynamicExtent) else n // was for n, was in zip(shape, many, strict=True)]
    x = x if x.rank == len(shape) else walk.reshaped(x, many)
    return walk.emit("TILE", [walk.take(x), walk.ints(times)], shape, kind)


@writes(aten.slice.Tensor, aten.narrow.default)
def slice_axis(walk: Walk, node: fx.Node) -> Any:
    x, given = walk.first(node), walk.arguments(node)
    shape, _ = walk.shape_and_dtype(node)
    axis = int(given["dim"]) % x.rank
    step = int(given.get("step", 1))
    start = given["start"] or 0
    if tuple(shape) == tuple(x.shape) and not start and step == 1:
        return x
    if isinstance(x.shape[axis], DynamicExtent) or isinstance(start, DynamicExtent):
        raise FixedBatchError("a slice of the batch")
    start = int(start) + (x.shape[axis] if start < 0 else 0)
    return write_slice(walk, x, axis, min(start, x.shape[axis]), (shape[axis], step))


def write_slice(walk: Walk, x: Value, axis: int, start: int, extent: tuple[int, int]) -> Value:
    """So many elements of an axis from one on, each `step` from the last."""
    (count, step), order = extent, x.order
    shape = [count if place == axis else size for place, size in enumerate(x.shape)]
    begin = [start if place == axis else 0 for place in order]
    end = [start + (count - 1) * step + 1 if place == axis else 0 for place in order]
    steps = [step if place == axis else 1 for place in order]
    others = sum(1 << at for at, place in enumerate(order) if place != axis)  # which are whole
    inputs = [x.stored[order], *(walk.ints(each) for each in (begin, end, steps))]
    masks = {"beginMask": others, "endMask": others}
    return walk.emit("STRIDED_SLICE", inputs, shape, x.kind, order=order, codes=x.codes, options=masks)


@writes(aten.select.int)
def select(walk: Walk, node: fx.Node) -> Value:
    x, given = walk.first(node), walk.arguments(node)
    axis, index = int(given["dim"]) % x.rank, int(given["index"])
    return _write_select(walk, x, axis, index)


def _write_select(walk: Walk, x: Value, axis: int, index: int) -> Value:
    if isinstance(x.shape[axis], DynamicExtent):
        raise FixedBatchError("one sample of the batch is picked")
    found = write_slice(walk, x, axis, index % x.shape[axis], (1, 1))
    order = tuple(each - (each > axis) for each in found.order if each != axis)
    shape = [size for place, size in enumerate(found.shape) if place != axis]
    target = [-1 if isinstance(shape[each], DynamicExtent) else shape[each] for each in order]
    inputs = [found.stored[found.order], walk.ints(target)]
    return walk.emit("RESHAPE", inputs, shape, x.kind, order=order, codes=x.codes)


@writes(aten.unbind.int)
def unbind(walk: Walk, node: fx.Node) -> list[Value]:
    x, given = walk.first(node), walk.arguments(node)
    axis = int(given["dim"]) % x.rank
    return [_write_select(walk, x, axis, index) for index in range(x.shape[axis])]


@writes(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def split(walk: Walk, node: fx.Node) -> list[Value]:
    x, given = walk.first(node), walk.arguments(node)
    axis = int(given["dim"]) % x.rank
    if isinstance(x.shape[axis], DynamicExtent):
        raise FixedBatchError("the batch is split")
    made, start = [], 0
    for part in node.meta["val"]:
        size = int(part.shape[axis])
        made.append(write_slice(walk, x, axis, start, (size, 1)))
        start += size
    return made


@writes(operator.getitem)
def item(walk: Walk, node: fx.Node) -> Any:
    found: Any = walk.argument(node.args[0])
    place: Any = node.args[1]
    return found[place]


@writes(aten.cat.default)
def concat(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    parts = [each for each in given["tensors"] if tuple(each.shape) != (0,)]
    shape, kind = walk.shape_and_dtype(node)
    axis, end = int(given["dim"]) % len(shape), walk.ending(node, folds=False)
    listed: Any = node.args[0]
    sources = [each for each in listed if tuple(each.meta["val"].shape) != (0,)]
    codes = _common_parameters(parts, end)
    if codes is not None:
        parts = [requantize(walk, each, codes) for each in parts]
    else:
        wanted = [walk.shape_and_dtype(each)[0] for each in sources]
        parts = [
            each if isinstance(each, Value) and tuple(each.shape) == whole else broadcast_to(walk, each, whole, kind)
            for each, whole in zip(map(walk.dequantized, parts), wanted, strict=True)
        ]
    order = parts[0].order
    inputs = [walk.take(each, order) for each in parts]
    made = walk.emit(
        "CONCATENATION", inputs, shape, kind, order=order, codes=codes, options={"axis": order.index(axis)}
    )
    return quantize_result(walk, node, end, made)


def _common_parameters(parts: Sequence[Any], end: FusedEnding) -> QuantizationParameters | None:
    """The codes that all parts can have: those of the result, or those that they have already."""
    own_codes = [each.codes if isinstance(each, Value) else None for each in parts]
    if any(each is None for each in own_codes):
        return None
    if end.codes is not None:
        return end.codes
    first = own_codes[0]
    return first if first is not None and all(first.is_same(each) for each in own_codes) else None


@writes(aten.stack.default)
def stack(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    shape, kind = walk.shape_and_dtype(node)
    axis = int(given["dim"]) % len(shape)
    wide = [1 if place == axis else size for place, size in enumerate(shape)]
    parts = [walk.dequantized(each) for each in given["tensors"]]
    whole = [each.reshape(wide) if isinstance(each, Tensor) else walk.reshaped(each, wide) for each in parts]
    return walk.emit("CONCATENATION", [walk.take(each) for each in whole], shape, kind, options={"axis": axis})


@writes(aten.constant_pad_nd.default)
def pad(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, amounts, value = given["self"], list(given["pad"]), float(given["value"])
    pairs = [(0, 0)] * (x.rank - len(amounts) // 2) + [
        (amounts[at], amounts[at + 1]) for at in range(len(amounts) - 2, -1, -2)
    ]
    shape, kind = walk.shape_and_dtype(node)
    if any(each < 0 for pair in pairs for each in pair):
        return _write_crop(walk, x, pairs, shape)
    end = walk.ending(node, folds=False)
    x = (
        walk.dequantized(x) if value != 0 else x if end.codes is None else requantize(walk, x, end.codes)
    )  # zeros have a code
    order = x.order
    inputs = [x.stored[order], walk.constant(np.array([pairs[axis] for axis in order], np.int32), "paddings")]
    if value == 0:
        made = walk.emit("PAD", inputs, shape, kind, order=order, codes=x.codes)
        return quantize_result(walk, node, end, made)
    filled = walk.number(value, kind)
    return walk.emit("PADV2", [*inputs, filled], shape, kind, order=order)


def _write_crop(walk: Walk, x: Value, pairs: Sequence[tuple[int, int]], shape: Sequence[int]) -> Value:
    if any(each > 0 for pair in pairs for each in pair):
        raise UnsupportedOperationError("pads and crops at once")
    for axis, (before, _) in enumerate(pairs):
        if tuple(pairs[axis]) != (0, 0):
            x = write_slice(walk, x, axis, -before, (int(shape[axis]), 1))
    return x


@writes(aten.flip.default)
def flip(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x: Value = walk.dequantized(given["self"])
    for axis in given["dims"]:
        x = walk.same("REVERSE_V2", x, [walk.ints([x.order.index(axis % x.rank)])])
    return x
