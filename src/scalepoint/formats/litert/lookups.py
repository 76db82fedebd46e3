"""Operations that pick rows or elements: embeddings, indexing, top-k and sorting."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.graph_writer import GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.schema import DynamicExtent
from scalepoint.formats.litert.values import FixedBatchError, QuantizedConstant, Value, model_order
from scalepoint.numerics import dtype_name

aten = torch.ops.aten


@writes(aten.embedding.default)
def embedding(writer: GraphWriter, node: fx.Node) -> Any:
    arguments = writer.arguments(node)
    table, indices = arguments["weight"], arguments["indices"]
    if isinstance(table, QuantizedConstant) and isinstance(indices, Tensor):
        return torch.from_numpy(table.values)[indices]
    if isinstance(table, QuantizedConstant) and isinstance(indices, Value):
        return _write_quantized_lookup(writer, node, table, indices)
    return _write_gather(writer, node, writer.dequantize(table), indices, 0)


def _write_quantized_lookup(writer: GraphWriter, node: fx.Node, table: QuantizedConstant, indices: Value) -> Value:
    """Write EMBEDDING_LOOKUP: it reads rows of codes and multiplies each by its scale. It takes a list of indices."""
    shape, dtype = writer.shape_and_dtype(node)
    count: int = prod(map(int, indices.shape))
    if any(isinstance(size, DynamicExtent) for size in indices.shape):
        count = DynamicExtent(count)
    index_list = writer.reshape(writer.cast(indices, "int32"), [count])
    inputs = [writer.materialize(index_list), writer.materialize(table)]
    rows = writer.emit("EMBEDDING_LOOKUP", inputs, [count, shape[-1]], dtype, name=node.name, is_integer=True)
    return writer.reshape(rows, shape)


@writes(aten.index_select.default)
def index_select(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    table = writer.dequantize(arguments["self"])
    return _write_gather(writer, node, table, arguments["index"], int(arguments["dim"]))


@writes(aten.index.Tensor)
def index(writer: GraphWriter, node: fx.Node) -> Value:
    """Write x[indices]: GATHER for one index, GATHER_ND for constant indices of the first axes."""
    arguments = writer.arguments(node)
    indexed_axes = [(axis, indices) for axis, indices in enumerate(arguments["indices"]) if indices is not None]
    if any(_is_mask(indices) for _, indices in indexed_axes):
        raise UnsupportedOperationError("picks elements by a mask: pick them by indices, mask.nonzero()")
    if not all(isinstance(indices, Tensor) for _, indices in indexed_axes) and len(indexed_axes) > 1:
        raise UnsupportedOperationError("picks elements by several indices that are computed")
    if len(indexed_axes) == 1:
        axis, indices = indexed_axes[0]
        return _write_gather(writer, node, writer.dequantize(arguments["self"]), indices, axis)
    if [axis for axis, _ in indexed_axes] != list(range(len(indexed_axes))):
        raise UnsupportedOperationError("picks elements by indices of axes that are not the first ones")
    x = writer.dequantize(writer.first_operand(node))
    shape, dtype = writer.shape_and_dtype(node)
    non_negative = [torch.where(indices < 0, indices + x.shape[axis], indices) for axis, indices in indexed_axes]
    positions = torch.stack(_broadcast_indices(non_negative), -1).to(torch.int32)
    inputs = [writer.materialize(x), writer.add_constant(positions, "places")]
    return writer.emit("GATHER_ND", inputs, shape, dtype, name=node.name)


@writes(aten.topk.default)
def topk(writer: GraphWriter, node: fx.Node) -> list[Value]:
    arguments = writer.arguments(node)
    axis, k = int(arguments["dim"]), int(arguments["k"])
    return _write_topk(writer, node, axis, k, descending=bool(arguments["largest"]))


@writes(aten.sort.default, aten.sort.stable)
def sort(writer: GraphWriter, node: fx.Node) -> list[Value]:
    """Write a sort as a top-k with k = the size of the axis."""
    arguments = writer.arguments(node)
    axis = int(arguments["dim"])
    size = writer.first_operand(node).shape[axis]
    if isinstance(size, DynamicExtent):
        raise FixedBatchError("the batch is sorted")
    return _write_topk(writer, node, axis, int(size), descending=bool(arguments["descending"]))


def _write_topk(writer: GraphWriter, node: fx.Node, axis: int, k: int, *, descending: bool) -> list[Value]:
    """Write TOPK_V2: the first k values along `axis` and their indices.

    TOPK_V2 sorts the last axis in descending order. Another axis is moved to the end and back; for ascending order the
    values are negated before and after.
    """
    x: Value = writer.dequantize(writer.first_operand(node))
    if x.dtype != "float32":
        raise UnsupportedOperationError(f"sorts {x.dtype} numbers, but only float32 can be sorted")
    axis %= x.rank
    axis_last = [other for other in range(x.rank) if other != axis] + [axis]
    axis_back = [axis_last.index(position) for position in range(x.rank)]
    if not descending:
        x = writer.emit_elementwise("NEG", x)
    x = x.permuted(axis_last)
    shape = (*x.shape[:-1], k)
    value_tensor = writer.file.add_tensor(f"{node.name}_", shape, x.dtype)
    index_tensor = writer.file.add_tensor(f"{node.name}_at", shape, "int32")
    inputs = [writer.materialize(x), writer.add_constant(np.array(k, np.int32), "count")]
    writer.file.add_operator("TOPK_V2", inputs, [value_tensor, index_tensor], is_integer=False, options={})
    values = Value(shape, x.dtype, {model_order(x.rank): value_tensor})
    indices = Value(shape, "int32", {model_order(x.rank): index_tensor})
    if not descending:
        values = writer.emit_elementwise("NEG", values)
    return [values.permuted(axis_back), writer.cast(indices, "int64").permuted(axis_back)]


def _is_mask(index: Any) -> bool:
    """Whether an index, constant or computed, is a boolean mask; torch also takes uint8 as a mask."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return index.dtype in ("bool", "uint8")


def _broadcast_indices(tensors: Sequence[Tensor]) -> list[Tensor]:
    shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    return [tensor.expand(shape) for tensor in tensors]


def _write_gather(writer: GraphWriter, node: fx.Node, table: Any, indices: Any, axis: int) -> Value:
    shape, dtype = writer.shape_and_dtype(node)
    rank = table.ndim if isinstance(table, Tensor) else table.rank
    if isinstance(indices, Tensor):
        indices = torch.where(indices < 0, indices + table.shape[axis], indices).to(torch.int32)
    inputs = [writer.materialize(table), writer.materialize(indices)]
    if isinstance(table, Tensor):
        dtype = dtype_name(table.dtype)
    return writer.emit("GATHER", inputs, shape, dtype, name=node.name, options={"axis": axis % rank})
