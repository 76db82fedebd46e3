"""Rows and elements that are picked: by numbers (embeddings, indices), or because they are the largest."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.values import Free, Held, NotFreeError, Value, kind_of_dtype, plain
from scalepoint.formats.litert.walk import UnfitError, Walk, form

aten = torch.ops.aten


@form(aten.embedding.default)
def embedding(walk: Walk, node: fx.Node) -> Any:
    given = walk.arguments(node)
    table, indices = given["weight"], given["indices"]
    if isinstance(table, Held) and isinstance(indices, Tensor):
        return torch.from_numpy(table.values)[indices]
    if isinstance(table, Held) and isinstance(indices, Value):
        return _looked_up(walk, node, table, indices)
    return _gathered(walk, node, walk.float_of(table), indices, 0)


def _looked_up(walk: Walk, node: fx.Node, table: Held, indices: Value) -> Value:
    """Codes of rows times their scales, in one operator, which takes a list of numbers."""
    (shape, kind), rows = walk.like(node), indices.shape
    count: int = Free(prod(map(int, rows))) if any(isinstance(each, Free) for each in rows) else prod(rows)
    numbers = walk.reshaped(walk.cast(indices, "int32"), [count])
    inputs = [walk.take(numbers), walk.take(table)]
    made = walk.emit("EMBEDDING_LOOKUP", inputs, [count, shape[-1]], kind, name=node.name, is_integer=True)
    return walk.reshaped(made, shape)


@form(aten.index_select.default)
def index_select(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    return _gathered(walk, node, walk.float_of(given["self"]), given["index"], int(given["dim"]))


@form(aten.index.Tensor)
def index(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    wanted = [(axis, each) for axis, each in enumerate(given["indices"]) if each is not None]
    if any(_is_mask(each) for _, each in wanted):  # its values are not indices
        raise UnfitError("picks elements by a mask: pick them by indices, mask.nonzero()")
    if not all(isinstance(each, Tensor) for _, each in wanted) and len(wanted) > 1:
        raise UnfitError("picks elements by several indices that are computed")
    if len(wanted) == 1:
        axis, indices = wanted[0]
        return _gathered(walk, node, walk.float_of(given["self"]), indices, axis)
    if [axis for axis, _ in wanted] != list(range(len(wanted))):
        raise UnfitError("picks elements by indices of axes that are not the first ones")
    x, (shape, kind) = walk.float_of(walk.first(node)), walk.like(node)
    rows = [torch.where(each < 0, each + x.shape[axis], each) for axis, each in wanted]
    places = torch.stack(_together(rows), -1).to(torch.int32)
    return walk.emit("GATHER_ND", [walk.take(x), walk.constant(places, "places")], shape, kind, name=node.name)


@form(aten.topk.default)
def largest(walk: Walk, node: fx.Node) -> list[Value]:
    given = walk.arguments(node)
    return _ordered(walk, node, int(given["dim"]), int(given["k"]), first=bool(given["largest"]))


@form(aten.sort.default, aten.sort.stable)
def sort(walk: Walk, node: fx.Node) -> list[Value]:
    given = walk.arguments(node)
    axis = int(given["dim"])
    shape = walk.first(node).shape
    if isinstance(shape[axis], Free):
        raise NotFreeError("the batch is sorted")
    return _ordered(walk, node, axis, int(shape[axis]), first=bool(given["descending"]))


def _ordered(walk: Walk, node: fx.Node, axis: int, count: int, *, first: bool) -> list[Value]:
    """The largest along an axis, from the largest on, and their numbers; the smallest by the largest of -x."""
    x: Value = walk.float_of(walk.first(node))
    if x.kind != "float32":
        raise UnfitError(f"orders {x.kind} numbers")
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
        Value(shape, kind, {plain(x.rank): place}) for kind, place in zip((x.kind, "int32"), places, strict=True)
    )
    values = values if first else walk.same("NEG", values)
    return [values.permuted(back), walk.cast(at, "int64").permuted(back)]


def _is_mask(index: Any) -> bool:
    """Whether an index, a constant or computed, says of every element whether it is kept."""
    return index.dtype in (torch.bool, torch.uint8) if isinstance(index, Tensor) else index.kind in ("bool", "uint8")


def _together(tensors: Sequence[Tensor]) -> list[Tensor]:
    shape = np.broadcast_shapes(*(tuple(each.shape) for each in tensors))
    return [each.expand(shape) for each in tensors]


def _gathered(walk: Walk, node: fx.Node, table: Any, indices: Any, axis: int) -> Value:
    shape, kind = walk.like(node)
    rank = table.ndim if isinstance(table, Tensor) else table.rank
    if isinstance(indices, Tensor):
        size = table.shape[axis]
        indices = torch.where(indices < 0, indices + size, indices).to(torch.int32)
    inputs = [walk.take(table), walk.take(indices)]
    stored = kind if not isinstance(table, Tensor) else kind_of_dtype(table.dtype)
    return walk.emit("GATHER", inputs, shape, stored, name=node.name, options={"axis": axis % rank})
