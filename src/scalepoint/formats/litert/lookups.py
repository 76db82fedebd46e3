"""Rows and elements that are picked by numbers: embeddings, indices."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.values import Free, Held, Value, kind_of_dtype
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
    if not all(isinstance(each, Tensor) and each.dtype != torch.bool for _, each in wanted) and len(wanted) > 1:
        raise UnfitError("picks elements by several indices that are computed, or by a mask")
    if len(wanted) == 1:
        axis, indices = wanted[0]
        return _gathered(walk, node, walk.float_of(given["self"]), indices, axis)
    if [axis for axis, _ in wanted] != list(range(len(wanted))):
        raise UnfitError("picks elements by indices of axes that are not the first ones")
    x, (shape, kind) = walk.float_of(walk.first(node)), walk.like(node)
    rows = [torch.where(each < 0, each + x.shape[axis], each) for axis, each in wanted]
    places = torch.stack(_together(rows), -1).to(torch.int32)
    return walk.emit("GATHER_ND", [walk.take(x), walk.constant(places, "places")], shape, kind, name=node.name)


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
