"""Operators that change shapes or move values (reshape, slice, gather, scatter, pad), or create tensors.

A function with the suffix _numbers computes its operator on KnownArrays: see `Operator.on_numbers`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.operators import Layer, Node, add_operator, operator, outputs_of, require
from scalepoint.onnx_reader.values import (
    KnownArray,
    Value,
    as_list,
    as_number,
    as_tensor,
    check_size,
    known_array,
    torch_dtype,
)

_MIN_OPEN_END = 2**31 - 1  # exporters write this number or a larger one for a slice "to the end"
_MAX_KNOWN_NUMBERS = 256  # of the result of Expand and Tile; a larger one is data, not a shape


# --- shapes --------------------------------------------------------------------------------------------------------


def _shape(node: Node, x: Any) -> KnownArray:
    sizes = list(x.shape)
    return known_array(sizes[slice(node.get("start", 0), node.get("end"))])


@operator("Shape", on_numbers=_shape)
def shape(node: Node, x: Tensor) -> KnownArray:
    return _shape(node, x)


def _count(node: Node, x: Any) -> KnownArray:
    return known_array([math.prod(x.shape)], ())


@operator("Size", on_numbers=_count)
def count(node: Node, x: Tensor) -> KnownArray:
    return _count(node, x)


def _reshape_numbers(node: Node, x: KnownArray, sizes: KnownArray | None = None) -> KnownArray:
    return KnownArray(x.numbers.reshape([int(size) for size in _new_sizes(node, x, sizes)]), x.dtype)


def _new_sizes(node: Node, x: Any, sizes: Value | None) -> list[Any]:
    """Return the sizes of a Reshape. A size of 0 means that the axis keeps its size, unless allowzero=1."""
    new_sizes = list(node.get("shape", ())) if sizes is None else as_list(sizes, "shape")
    if node.get("allowzero", 0):
        return new_sizes
    copies = [isinstance(size, int) and size == 0 for size in new_sizes]
    return [x.shape[axis] if copies[axis] else size for axis, size in enumerate(new_sizes)]


@operator("Reshape", on_numbers=_reshape_numbers, known_inputs=(1,))
def reshape(node: Node, x: Tensor, sizes: Value | None = None) -> Tensor:
    return x.reshape(_new_sizes(node, x, sizes))


@operator("Flatten", make_layer=lambda node, constants: Layer(nn.Flatten()) if node.get("axis", 1) == 1 else None)
def flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    if axis == 1 and x.ndim > 1:
        return x.flatten(1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _axes(node: Node, axes: Value | None) -> list[int] | None:
    """Return the axes, which are an attribute in old opsets and an input in new ones; None if there are none."""
    return node.get("axes") if axes is None else as_list(axes, "list of axes")


def _squeeze_numbers(node: Node, x: KnownArray, axes: KnownArray | None = None) -> KnownArray:
    squeezed_axes = _axes(node, axes)
    return KnownArray(np.squeeze(x.numbers, None if squeezed_axes is None else tuple(squeezed_axes)), x.dtype)


@operator("Squeeze", on_numbers=_squeeze_numbers, known_inputs=(1,))
def squeeze(node: Node, x: Tensor, axes: Value | None = None) -> Tensor:
    squeezed_axes = _axes(node, axes)
    return x.squeeze() if squeezed_axes is None else x.squeeze(tuple(squeezed_axes))


def _positions_of_new_axes(node: Node, ndim: int, axes: Value | None) -> list[int]:
    new_axes = _axes(node, axes) or []
    return sorted(axis % (ndim + len(new_axes)) for axis in new_axes)


def _unsqueeze_numbers(node: Node, x: KnownArray, axes: KnownArray | None = None) -> KnownArray:
    numbers = x.numbers
    for axis in _positions_of_new_axes(node, x.ndim, axes):
        numbers = np.expand_dims(numbers, axis)
    return KnownArray(numbers, x.dtype)


@operator("Unsqueeze", on_numbers=_unsqueeze_numbers, known_inputs=(1,))
def unsqueeze(node: Node, x: Tensor, axes: Value | None = None) -> Tensor:
    for axis in _positions_of_new_axes(node, x.ndim, axes):
        x = x.unsqueeze(axis)
    return x


def _transpose_numbers(node: Node, x: KnownArray) -> KnownArray:
    return KnownArray(x.numbers.transpose(node.get("perm")), x.dtype)


@operator("Transpose", on_numbers=_transpose_numbers)
def transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or list(reversed(range(x.ndim))))


@operator("TransposeLast")
def transpose_last(node: Node, x: Tensor) -> Tensor:
    """Exchange the last two axes. `fused.py` makes this operator."""
    return x.transpose(-1, -2)


def _broadcast_sizes(x: Any, sizes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the shape of x with new axes of size 1 at its beginning, and the shape after broadcasting to `sizes`."""
    rank = max(len(sizes), x.ndim)
    x_sizes = [1] * (rank - x.ndim) + list(x.shape)
    target_sizes = [1] * (rank - len(sizes)) + list(sizes)
    broadcast = [
        own_size if isinstance(target, int) and target == 1 else target
        for own_size, target in zip(x_sizes, target_sizes, strict=True)
    ]
    return x_sizes, broadcast


def _expand_numbers(node: Node, x: KnownArray, sizes: KnownArray) -> Any:
    x_sizes, broadcast = _broadcast_sizes(x, as_list(sizes))
    if not all(isinstance(size, int) for size in broadcast) or math.prod(broadcast) > _MAX_KNOWN_NUMBERS:
        return NotImplemented
    return KnownArray(np.broadcast_to(x.numbers.reshape(x_sizes), broadcast), x.dtype)


@operator("Expand", on_numbers=_expand_numbers, known_inputs=(1,))
def expand(node: Node, x: Tensor, sizes: Value) -> Tensor:
    _, broadcast = _broadcast_sizes(x, as_list(sizes, "shape"))
    check_size(broadcast)
    return x.expand(broadcast)


def _tile_numbers(node: Node, x: KnownArray, repeats: KnownArray) -> Any:
    counts = as_list(repeats)
    if not all(isinstance(repeat, int) for repeat in counts) or x.numbers.size * math.prod(counts) > _MAX_KNOWN_NUMBERS:
        return NotImplemented
    return KnownArray(np.tile(x.numbers, counts), x.dtype)


@operator("Tile", on_numbers=_tile_numbers, known_inputs=(1,))
def tile(node: Node, x: Tensor, repeats: Value) -> Tensor:
    counts = as_list(repeats, "list of repeats")
    check_size([size * repeat for size, repeat in zip(x.shape, counts, strict=True)])
    return x.repeat(counts)


# --- joining and cutting -------------------------------------------------------------------------------------------


def _concat_numbers(node: Node, *arrays: KnownArray) -> KnownArray:
    return KnownArray(np.concatenate([array.numbers for array in arrays], node.get("axis")), arrays[0].dtype)


@operator("Concat", on_numbers=_concat_numbers)
def concat(node: Node, *tensors: Tensor) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, node.get("axis"))


def _part_sizes(node: Node, x: Any, sizes: Value | None) -> list[Any]:
    """Return the sizes of the parts of a Split. By default they are equal, except for a smaller last one."""
    axis = node.get("axis", 0)
    part_sizes = node.get("split") if sizes is None else as_list(sizes, "list of sizes")
    if part_sizes is not None:
        return list(part_sizes)
    parts = node.get("num_outputs") or len(node.outputs)
    size = -(-x.shape[axis] // parts)
    return [size] * (parts - 1) + [x.shape[axis] - size * (parts - 1)]


def _split_numbers(node: Node, x: KnownArray, sizes: KnownArray | None = None) -> tuple[KnownArray, ...]:
    ends = np.cumsum(_part_sizes(node, x, sizes))[:-1]
    return tuple(KnownArray(part, x.dtype) for part in np.split(x.numbers, ends, node.get("axis", 0)))


@operator("Split", on_numbers=_split_numbers, known_inputs=(1,))
def split(node: Node, x: Tensor, sizes: Value | None = None) -> Any:
    return tuple(torch.split(x, _part_sizes(node, x, sizes), node.get("axis", 0)))


class AxisSlice(NamedTuple):
    """The slice of one axis. The end is None for a slice to the end."""

    axis: int
    start: Any
    end: Any
    step: int


def _list_slices(node: Node, ndim: int, limits: Sequence[Value | None]) -> list[AxisSlice]:
    """Return the slices of a node. `limits` are its inputs after the first one; before opset 10 they are attributes."""
    lists: list[list[Any] | None]
    if limits:
        names = ("starts", "ends", "list of axes", "list of steps")
        lists = [None if limit is None else as_list(limit, name) for limit, name in zip(limits, names, strict=False)]
    else:
        lists = [node.get("starts"), node.get("ends"), node.get("axes")]
    starts, ends, axes, steps = lists + [None] * (4 - len(lists))  # axes and steps may be left out
    if starts is None or ends is None:
        raise OnnxReadError("a slice needs starts and ends")
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    return [
        AxisSlice(axis % ndim, start, _open_end(end, step), step)
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]


def _open_end(end: Any, step: int) -> Any:
    """Return None for a slice to the end."""
    is_open = isinstance(end, int) and (end >= _MIN_OPEN_END if step > 0 else end <= -_MIN_OPEN_END)
    return None if is_open else end


def _slice_numbers(node: Node, x: KnownArray, *limits: KnownArray | None) -> KnownArray:
    index = [slice(None)] * x.ndim
    for axis, start, end, step in _list_slices(node, x.ndim, limits):
        index[axis] = slice(start, end, step)
    return KnownArray(x.numbers[tuple(index)], x.dtype)


@operator("Slice", on_numbers=_slice_numbers, known_inputs=(1, 2, 3, 4))
def slice_(node: Node, x: Tensor, *limits: Value | None) -> Tensor:
    index = [slice(None)] * x.ndim
    for axis, start, end, step in _list_slices(node, x.ndim, limits):
        if step > 0:
            is_first = isinstance(start, int) and start == 0
            index[axis] = slice(None if is_first else start, end, None if step == 1 else step)
        else:  # torch has no negative steps
            positions = range(x.shape[axis])[slice(start, end, step)]
            x = x.index_select(axis, torch.tensor(list(positions), dtype=torch.int64, device=x.device))
    return x if all(part == slice(None) for part in index) else x[tuple(index)]


_PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}  # ONNX's name -> torch's name


@operator("Pad", known_inputs=(1, 2, 3))
def pad(node: Node, x: Tensor, pads: Value | None = None, fill: Value | None = None, axes: Value | None = None) -> Any:
    amounts = list(node.get("pads")) if pads is None else as_list(pads, "list of pads")
    padded_axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in as_list(axes, "list of axes")]
    mode = node.get("mode", "constant")
    by_axis = {axis: (amounts[index], amounts[index + len(padded_axes)]) for index, axis in enumerate(padded_axes)}
    axis_pads = [by_axis.get(axis, (0, 0)) for axis in range(x.ndim)]
    check_size([size + before + after for size, (before, after) in zip(x.shape, axis_pads, strict=True)])
    if mode == "constant":
        value = node.get("value", 0.0) if fill is None else as_number(fill, "fill value")
        return F.pad(x, [amount for pair in reversed(axis_pads) for amount in pair], value=value)
    return _pad_with_own_values(x, axis_pads, _PAD_MODES[mode])


def _pad_with_own_values(x: Tensor, axis_pads: Sequence[tuple[Any, Any]], mode: str) -> Any:
    """Pad with values of the tensor, one axis after the other: torch limits which axes it pads together."""
    for axis, (before, after) in enumerate(axis_pads):
        if isinstance(before, int) and isinstance(after, int) and before <= 0 and after <= 0:
            x = x.narrow(axis, -before, x.shape[axis] + before + after) if before or after else x
            continue
        last = x.transpose(axis, -1)
        flat = last.reshape(1, -1, last.shape[-1])  # F.pad needs (batch, channels, values) to pad the last axis
        padded = F.pad(flat, (before, after), mode=mode)
        x = padded.reshape(*last.shape[:-1], padded.shape[-1]).transpose(axis, -1)
    return x


# --- gather and scatter --------------------------------------------------------------------------------------------


def _gather_numbers(node: Node, x: KnownArray, indices: KnownArray) -> KnownArray:
    positions = np.array([int(index) for index in indices.to_list()], dtype=np.int64).reshape(indices.shape)
    return KnownArray(np.asarray(np.take(x.numbers, positions, node.get("axis", 0)), dtype=object), x.dtype)


def _embedding_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[0]
    if weight is None or weight.ndim != 2 or node.get("axis", 0) != 0 or not weight.is_floating_point():
        return None
    return Layer(nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight), (1,))


@operator("Gather", on_numbers=_gather_numbers, known_inputs=(1,), make_layer=_embedding_layer)
def gather(node: Node, x: Any, indices: Value) -> Any:
    axis = node.get("axis", 0) % x.ndim
    if isinstance(indices, KnownArray) and indices.ndim == 0:
        return x.select(axis, as_number(indices))
    index = as_tensor(indices, x).long()
    if not isinstance(indices, KnownArray) or any(isinstance(i, int) and i < 0 for i in indices.to_list()):
        index = torch.where(index < 0, index + x.shape[axis], index)
    rows = x.index_select(axis, index.reshape(-1))
    return rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _positive(index: Tensor, size: int) -> Tensor:
    """Replace negative indices, which count from the end."""
    index = index.long()
    return torch.where(index < 0, index + size, index)


@operator("GatherElements")
def gather_elements(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0)
    return torch.gather(x, axis, _positive(indices, x.shape[axis]))


@operator("GatherND")
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    batch, depth = node.get("batch_dims", 0), indices.shape[-1]
    index = tuple(_positive(part, x.shape[batch + axis]) for axis, part in enumerate(indices.unbind(-1)))
    if not batch:
        return x[index]
    # Join the batch axes of both tensors to one, and index it, too.
    batch_size = math.prod(x.shape[:batch])
    flat, rows = x.reshape(batch_size, *x.shape[batch:]), indices.reshape(batch_size, -1, depth)
    index = tuple(_positive(part, flat.shape[1 + axis]) for axis, part in enumerate(rows.unbind(-1)))
    batch_index = torch.arange(batch_size, device=x.device).unsqueeze(1).expand(rows.shape[:2])
    values = flat[(batch_index, *index)]
    return values.reshape(*indices.shape[:-1], *x.shape[batch + depth :])


_SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}  # ONNX's name -> torch's name


@operator("ScatterElements", "Scatter")
def scatter_elements(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, reduction = node.get("axis", 0), node.get("reduction", "none")
    index = _positive(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _SCATTER_REDUCTIONS[reduction], include_self=True)


@operator("ScatterND")
def scatter_nd(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    reduction = node.get("reduction", "none")
    index = tuple(_positive(part, x.shape[axis]) for axis, part in enumerate(indices.unbind(-1)))
    if reduction == "none":
        return x.index_put(index, updates)
    if reduction == "add":
        return x.index_put(index, updates, accumulate=True)
    # torch has no other reductions for several indices: join the indexed axes of x to one.
    strides = [math.prod(x.shape[axis + 1 : indices.shape[-1]]) for axis in range(indices.shape[-1])]
    rows = torch.stack([part * stride for part, stride in zip(index, strides, strict=True)]).sum(0).reshape(-1)
    flat = x.reshape(-1, *x.shape[indices.shape[-1] :])
    values = updates.reshape(rows.shape[0], *flat.shape[1:])
    return flat.index_reduce(0, rows, values, _SCATTER_REDUCTIONS[reduction], include_self=True).reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(node: Node, cache: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    axis = node.get("axis", -2) % cache.ndim
    steps = torch.arange(update.shape[axis], device=cache.device)
    first = torch.zeros(cache.shape[0], dtype=torch.int64, device=cache.device) if starts is None else starts.long()
    positions = first.unsqueeze(1) + steps
    if node.get("mode", "linear") == "circular":
        positions = positions % cache.shape[axis]
    index_shape = [1] * cache.ndim
    index_shape[0], index_shape[axis] = positions.shape
    return cache.scatter(axis, positions.reshape(index_shape).expand(update.shape), update)


@operator("Compress")
def compress(node: Node, x: Tensor, condition: Tensor) -> Tensor:
    axis = node.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(axis, torch.nonzero(condition).reshape(-1))


add_operator("NonZero", lambda node, x: torch.nonzero(x if x.ndim else x.reshape(1)).T)


@operator("ReverseSequence", known_inputs=(1,))
def reverse_sequence(node: Node, x: Tensor, lengths: Value) -> Tensor:
    batch, time = node.get("batch_axis", 1), node.get("time_axis", 0)
    parts = []
    for row, length in zip(x.unbind(batch), as_list(lengths, "list of lengths"), strict=True):
        axis = time - (batch < time)
        rest = row.narrow(axis, length, row.shape[axis] - length)
        parts.append(torch.cat([row.narrow(axis, 0, length).flip(axis), rest], axis))
    return torch.stack(parts, batch)


@operator("Unique")
def unique(node: Node, x: Tensor) -> Any:
    """Return unique values, in the order of their values or of their first occurrence."""
    axis = node.get("axis")
    array = x.numpy()
    values, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not node.get("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, axis=0 if axis is None else axis)
        rank = np.argsort(order)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return outputs_of(
        node, *(torch.from_numpy(np.ascontiguousarray(part)) for part in (values, first, inverse, counts))
    )


# --- new tensors ---------------------------------------------------------------------------------------------------


def _fill_value(node: Node) -> KnownArray:
    """Return the value of a ConstantOfShape. Its number stays known while the model is traced."""
    value: KnownArray = node.get("value") or known_array([0.0], (1,), torch.float32)
    return value


def _constant_numbers(node: Node, sizes: KnownArray) -> Any:
    value, lengths = _fill_value(node), as_list(sizes)
    is_small = all(isinstance(length, int) for length in lengths) and math.prod(lengths) <= 64
    if not is_small or value.dtype.is_floating_point:
        return NotImplemented
    return known_array(value.to_list() * math.prod(lengths), lengths, value.dtype)


@operator("ConstantOfShape", on_numbers=_constant_numbers, known_inputs=(0,))
def constant_of_shape(node: Node, sizes: Value) -> Tensor:
    value, lengths = _fill_value(node), as_list(sizes, "shape")
    check_size(lengths)
    return torch.full(lengths, as_number(value, "value"), dtype=value.dtype)


def _range_numbers(node: Node, start: KnownArray, end: KnownArray, step: KnownArray) -> Any:
    first, last, by = (as_number(value) for value in (start, end, step))
    is_plain = all(isinstance(number, int) for number in (first, last, by)) and by != 0
    if not is_plain or len(range(first, last, by)) > 64:
        return NotImplemented
    return known_array(list(range(first, last, by)), dtype=start.dtype)


@operator("Range", on_numbers=_range_numbers, known_inputs=(0, 1, 2))
def range_(node: Node, start: Value, end: Value, step: Value) -> Tensor:
    first, last, by = (as_number(value, "limit") for value in (start, end, step))
    if all(isinstance(number, int | float) for number in (first, last, by)):
        check_size([max(0, math.ceil((last - first) / by))])
    return torch.arange(first, last, by, dtype=start.dtype)


@operator("OneHot", known_inputs=(1, 2))
def one_hot(node: Node, indices: Tensor, depth: Value, values: Value) -> Tensor:
    length = int(as_number(depth, "depth"))
    off, on = as_tensor(values).unbind(0)
    check_size([*indices.shape, length])
    axis = node.get("axis", -1) % (indices.ndim + 1)
    classes = torch.arange(length, device=indices.device)
    classes = classes.reshape([length if index == axis else 1 for index in range(indices.ndim + 1)])
    return torch.where(_positive(indices, length).unsqueeze(axis) == classes, on, off)


@operator("EyeLike")
def eye_like(node: Node, x: Tensor) -> Any:
    dtype = torch_dtype(node.get("dtype")) if node.get("dtype") else x.dtype
    rows, columns = torch.arange(x.shape[0]).unsqueeze(1), torch.arange(x.shape[1])
    return (columns - rows == node.get("k", 0)).to(dtype)


@operator("Trilu", known_inputs=(1,))
def trilu(node: Node, x: Tensor, k: Value | None = None) -> Tensor:
    diagonal = 0 if k is None else as_number(k, "diagonal")
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


# --- blocks of an image --------------------------------------------------------------------------------------------


@operator("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    batch, channels, height, width = x.shape
    depth = channels // (block * block)
    blocks = x.reshape(batch, block, block, depth, height, width).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(batch, depth, height * block, width * block)


@operator("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    batch, channels, height, width = x.shape
    require(node.get("mode", "DCR") == "DCR", "SpaceToDepth in another order than DCR")
    blocks = x.reshape(batch, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(batch, channels * block * block, height // block, width // block)


@operator("Col2Im", known_inputs=(1, 2))
def col2im(node: Node, x: Tensor, image: Value, block: Value) -> Tensor:
    size, kernel = as_list(image, "size of the image"), as_list(block, "size of the blocks")
    pads = node.get("pads", [0] * (2 * len(size)))
    require(len(size) == 2 and list(pads[:2]) == list(pads[2:]), "Col2Im with pads that differ or without 2 axes")
    ones = [1, 1]
    return F.fold(x, tuple(size), tuple(kernel), node.get("dilations", ones), pads[:2], node.get("strides", ones))
