"""Rows and elements that are picked: by numbers (embeddings, indices), or because they are the largest."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.values import (
    DynamicExtent,
    FixedBatchError,
    QuantizedConstant,
    Value,
    model_order,
    to_numpy_name,
)
from scalepoint.formats.litert.walk import UnsupportedOperationError, Walk, writes

aten = torch.ops.aten


@writes(aten.embedding.default)
def embedding(walk: Walk, node: fx.Node) -> Any:
    given = walk.arguments(node)
    table, indices = given["weight"], given["indices"]
    if isinstance(table, QuantizedConstant) and isinstance(indices, Tensor):
        return torch.from_numpy(table.values)[indices]
    if isinstance(table, QuantizedConstant) and isinstance(indices, Value):
        return _write_lookup(walk, node, table, indices)
    return _write_gather(walk, node, walk.dequantized(table), indices, 0)


def _write_lookup(walk: Walk, node: fx.Node, table: QuantizedConstant, indices: Value) -> Value:
    """Codes of rows times their scales, in one operator, which takes a list of numbers."""
    (shape, kind), rows = walk.shape_and_dtype(node), indices.shape
    count: int = (
        DynamicExtent(prod(map(int, rows))) if any(isinstance(each, DynamicExtent) for each in rows) else prod(rows)
    )
    numbers = walk.reshaped(walk.cast(indices, "int32"), [count])
    inputs = [walk.take(numbers), walk.take(table)]
    made = walk.emit("EMBEDDING_LOOKUP", inputs, [count, shape[-1]], kind, name=node.name, is_integer=True)
    return walk.reshaped(made, shape)


@writes(aten.index_select.default)
def index_select(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    return _write_gather(walk, node, walk.dequantized(given["self"]), given["index"], int(given["dim"]))


@writes(aten.index.Tensor)
def index(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    wanted = [(axis, each) for axis, each in enumerate(given["indices"]) if each is not None]
    if any(_is_mask(each) for _, each in wanted):  # its values are not indices
        raise UnsupportedOperationError("picks elements by a mask: pick them by indices, mask.nonzero()")
    if not all(isinstance(each, Tensor) for _, each in wanted) and len(wanted) > 1:
        raise UnsupportedOperationError("picks elements by several indices that are computed")
    if len(wanted) == 1:
        axis, indices = wanted[0]
        return _write_gather(walk, node, walk.dequantized(given["self"]), indices, axis)
    if [axis for axis, _ in wanted] != list(range(len(wanted))):
        raise UnsupportedOperationError("picks elements by indices of axes that are not the first ones")
    x, (shape, kind) = walk.dequantized(walk.first(node)), walk.shape_and_dtype(node)
    rows = [torch.where(each < 0, each + x.shape[axis], each) for axis, each in wanted]
    places = torch.stack(_broadcast_indices(rows), -1).to(torch.int32)
    return walk.emit("GATHER_ND", [walk.take(x), walk.constant(places, "places")], shape, kind, name=node.name)


@writes(aten.topk.default)
def write_topk(walk: Walk, node: fx.Node) -> list[Value]:
    given = walk.arguments(node)
    return _write_topk_along_axis(walk, node, int(given["dim"]), int(given["k"]), first=bool(given["largest"]))


@writes(aten.sort.default, aten.sort.stable)
def write_sort(walk: Walk, node: fx.Node) -> list[Value]:
    given = walk.arguments(node)
    axis = int(given["dim"])
    shape = walk.first(node).shape
    if isinstance(shape[axis], DynamicExtent):
        raise FixedBatchError("the batch is sorted")
    return _write_topk_along_axis(walk, node, axis, int(shape[axis]), first=bool(given["descending"]))


def _write_topk_along_axis(walk: Walk, node: fx.Node, axis: int, count: int, *, first: bool) -> list[Value]:
    """The largest along an axis, from the largest on, and their numbers; the smallest by the largest of -x."""
    x: Value = walk.dequantized(walk.first(node))
    if x.kind != "float32":
        raise UnsupportedOperationError(f"orders {x.kind} numbers")
    axes = [each for each in range(x.rank) if each != axis % x.rank] + [axis % x.rank]
    back = [axes.index(each) for each in range(x.rank)]
    x = walk.same("NEG", x) if not first else x
    turned = x.permuted(axes)
    shape = (*turned.shape[:-1], count)
    places = [walk.file.tensor(f"{node.name}_{what}", shape, kind) for what, kind in (("", x.kind), ("at", "int32"))]
    walk.file.operation(
        "TOPK_V2", [walk.take(turned), walk.constant(np.array(count, np.int32), "count")], places, False, {}
    )
    values, at = (
        Value(shape, kind, {model_order(x.rank): place}) for kind, place in zip((x.kind, "int32"), places, strict=True)
    )
    values = values if first else walk.same("NEG", values)
    return [values.permuted(back), walk.cast(at, "int64").permuted(back)]


def _is_mask(index: Any) -> bool:
    """Whether an index, a constant or computed, says of every element whether it is kept."""
    return index.dtype in (torch.bool, torch.uint8) if isinstance(index, Tensor) else index.kind in ("bool", "uint8")


def _broadcast_indices(tensors: Sequence[Tensor]) -> list[Tensor]:
    shape = np.broadcast_shapes(*(tuple(each.shape) for each in tensors))
    return [each.expand(shape) for each in tensors]


def _write_gather(walk: Walk, node: fx.Node, table: Any, indices: Any, axis: int) -> Value:
    shape, kind = walk.shape_and_dtype(node)
    rank = table.ndim if isinstance(table, Tensor) else table.rank
    if isinstance(indices, Tensor):
        size = table.shape[axis]
        indices = torch.where(indices < 0, indices + size, indices).to(torch.int32)
    inputs = [walk.take(table), walk.take(indices)]
    stored = kind if not isinstance(table, Tensor) else to_numpy_name(table.dtype)
    return walk.emit("GATHER", inputs, shape, stored, name=node.name, options={"axis": axis % rank})
