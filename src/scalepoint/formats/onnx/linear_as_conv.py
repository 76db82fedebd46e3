"""Writes linear layers as 1x1 convolutions, for compilers whose integer convolutions are faster than their MatMul.

    DequantizeLinear -> MatMul -> Add        becomes  DequantizeLinear -> Transpose -> Conv -> Transpose

A convolution reads tensors with channels first. If there are only elementwise operations between two convolutions (an
MLP, a gate), these operations work on channels-first tensors, and the transposes between them are removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from scalepoint.formats.onnx.channels_first import CHANNELS_FIRST_SUFFIX
from scalepoint.formats.onnx.graph_edits import (
    add_constant,
    find_only_reader,
    find_producer,
    has_blocks,
    insert_before,
)

ELEMENTWISE = frozenset(
    (
        "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
        "LeakyRelu", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign",
        "Sqrt", "Sub", "Swish", "Tanh", "QuantizeLinear", "DequantizeLinear",
    )
)  # fmt: skip
SUPPORTED_RANKS = (2, 3, 4)  # vectors, sequences, images with channels last


def write_linears_as_convolutions(model: Any) -> None:
    """Replace every MatMul of quantized activations by a quantized weight, in place."""
    transposes = _Transposes(model.graph)
    for node in list(model.graph):
        if node.op_type == "MatMul" and (weight := _find_weight(node)) is not None and _reads_codes(node):
            transposes.replace_by_conv(node, weight)
    transposes.remove_redundant()


def _find_weight(node: Any) -> Any | None:
    """Find the DequantizeLinear of the weight: a constant matrix with one scale or a scale per column, not shared."""
    dequantize = find_producer(node.inputs[1], "DequantizeLinear")
    if dequantize is None or dequantize.domain or has_blocks(dequantize):
        return None
    codes, scale = _skip_casts(dequantize.inputs[0]), dequantize.inputs[1]
    if codes.const_value is None or len(codes.shape) != 2 or scale.const_value is None:
        return None
    is_by_column = scale.const_value.size == 1 or dequantize.attributes.get_int("axis", 1) % 2 == 1
    return dequantize if is_by_column and not _is_shared_with_embedding(node, codes) else None


def _skip_casts(value: Any) -> Any:
    """Return the value before casts."""
    while value.producer() is not None and value.producer().op_type == "Cast":
        value = value.producer().inputs[0]
    return value


def _is_shared_with_embedding(node: Any, codes: Any) -> bool:
    """Whether an embedding table has the transposed shape: a tied head reads its codes, which are stored once."""
    shape = tuple(codes.shape)[::-1]
    tables = (value for value in node.graph.initializers.values() if tuple(value.shape or ()) == shape)
    return any(use.node.op_type == "Gather" and use.idx == 0 for table in tables for use in table.uses())


def _reads_codes(node: Any) -> bool:
    x = node.inputs[0]
    dequantize = find_producer(x, "DequantizeLinear")
    is_quantized = dequantize is not None and _is_scalar(dequantize.inputs[1])
    return is_quantized and x.shape is not None and len(x.shape) in SUPPORTED_RANKS


def _is_scalar(value: Any) -> bool:
    tensor = ir.convenience.get_const_tensor(_skip_casts(value))
    return tensor is not None and tensor.size == 1


class _Transposed(NamedTuple):
    """The nodes that transpose a tensor, and the tensor on the other side of them."""

    nodes: list[Any]
    value: Any


@dataclass
class _Transposes:
    """The transposes that were inserted.

    Attributes:
        graph: The graph.
        to_channels_first: By the value that is transposed; `_Transposed.value` is the result, which a Conv reads.
        to_channels_last: By the result; `_Transposed.value` is the output of the Conv.
    """

    graph: Any
    to_channels_first: dict[Any, _Transposed] = field(default_factory=dict)
    to_channels_last: dict[Any, _Transposed] = field(default_factory=dict)

    def replace_by_conv(self, matmul: Any, weight: Any) -> None:
        """Replace a MatMul and the Add of its bias by Transpose -> Conv -> Transpose."""
        x, bias = matmul.inputs[0], _find_bias(matmul)
        last = matmul if bias is None else find_only_reader(matmul)  # computes the result of the layer
        if x not in self.to_channels_first:
            self.to_channels_first[x] = self._insert_transpose(matmul, x)
        spatial_axes = max(len(x.shape) - 2, 1)
        inputs = [self.to_channels_first[x].value, self._insert_conv_weight(matmul, weight, spatial_axes)]
        if bias is not None:
            inputs.append(bias)
        old = last.outputs[0]
        conv = ir.node("Conv", inputs, {"kernel_shape": [1] * spatial_axes})
        y = insert_before(matmul, conv, _channels_first_shape(old.shape), old.type, old.name + CHANNELS_FIRST_SUFFIX)
        nodes = self._insert_transpose_back(matmul, y, old)
        new = nodes[-1].outputs[0]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if last is not matmul:
            self.graph.remove(last, safe=True)
        self.graph.remove(matmul, safe=True)
        new.name = old.name
        self.to_channels_last[new] = _Transposed(nodes, y)

    def _insert_transpose(self, node: Any, value: Any) -> _Transposed:
        nodes, shape = [], value.shape
        if len(shape) == 2:  # vectors: a batch axis of 1, so that the vectors are the positions of the convolution
            shape = ir.Shape((1, *shape))
            nodes.append(ir.node("Unsqueeze", [value, self._first_axis()]))
            value = insert_before(node, nodes[-1], shape, value.type, f"{value.name}.batch")
        rank = len(shape)
        nodes.append(ir.node("Transpose", [value], {"perm": [0, rank - 1, *range(1, rank - 1)]}))
        name = value.name + CHANNELS_FIRST_SUFFIX
        return _Transposed(nodes, insert_before(node, nodes[-1], _channels_first_shape(shape), value.type, name))

    def _insert_transpose_back(self, node: Any, value: Any, old: Any) -> list[Any]:
        """Insert the nodes that give the result of a Conv the shape of the tensor `old`."""
        rank = len(value.shape)
        has_batch = len(old.shape) == rank
        transpose = ir.node("Transpose", [value], {"perm": [0, *range(2, rank), 1]})
        shape = old.shape if has_batch else ir.Shape((1, *old.shape))
        channels_last = insert_before(node, transpose, shape, old.type, f"{old.name}.back")
        if has_batch:
            return [transpose]
        squeeze = ir.node("Squeeze", [channels_last, self._first_axis()])
        insert_before(node, squeeze, old.shape, old.type, f"{old.name}.rows")
        return [transpose, squeeze]

    def _first_axis(self) -> Any:
        return add_constant(self.graph, "turned.axes", np.zeros(1, np.int64))

    def _insert_conv_weight(self, matmul: Any, weight: Any, spatial_axes: int) -> Any:
        """Insert the weight (in, out) as (out, in, 1, ..), with the same casts and parameters."""
        codes = _skip_casts(weight.inputs[0])
        array = np.ascontiguousarray(codes.const_value.numpy().T)[(..., *[None] * spatial_axes)]
        value = add_constant(self.graph, f"{codes.name}.{spatial_axes}d", array, codes.dtype)
        casts: list[Any] = []
        cast = weight.inputs[0].producer()
        while cast is not None:
            casts.insert(0, cast)
            cast = cast.inputs[0].producer()
        suffix = matmul.outputs[0].name  # a layer that is called several times has a weight for each call
        for cast in casts:
            copy = ir.node("Cast", [value], {"to": cast.attributes["to"].as_int()})
            value = insert_before(matmul, copy, value.shape, cast.outputs[0].type, f"{cast.outputs[0].name}.{suffix}")
        dequantize = ir.node("DequantizeLinear", [value, *weight.inputs[1:]], {"axis": 0})
        name = f"{weight.outputs[0].name}.{suffix}"
        return insert_before(matmul, dequantize, value.shape, weight.outputs[0].type, name)

    def remove_redundant(self) -> None:
        """Remove transposes to channels last and back that have only elementwise operations between them."""
        for value in list(self.to_channels_last):
            region = _ElementwiseRegion(self)
            if value in self.to_channels_last and region.can_grow_from(value):
                region.make_channels_first()


def _find_bias(matmul: Any) -> Any | None:
    """Return the constant that the only reader of a MatMul adds, if it has one number per column; else None."""
    add = find_only_reader(matmul)
    if add is None or add.op_type != "Add":
        return None
    addend = add.inputs[1] if add.inputs[0] is matmul.outputs[0] else add.inputs[0]
    channels = matmul.inputs[1].shape[-1]
    return addend if addend.const_value is not None and tuple(addend.shape) == (channels,) else None


def _channels_first_shape(shape: Any) -> Any:
    """Return the channels-first shape of a tensor with channels last."""
    sizes = list(shape) if len(shape) > 2 else [1, *shape]
    return ir.Shape((sizes[0], sizes[-1], *sizes[1:-1]))


@dataclass
class _ElementwiseRegion:
    """A region of elementwise operations between convolutions.

    Attributes:
        transposes: The transposes of the graph.
        values: The values of the region, which become channels first.
        nodes: The operations of the region, in the order in which they were found.
    """

    transposes: _Transposes
    values: set[Any] = field(default_factory=set)
    nodes: dict[Any, None] = field(default_factory=dict)

    def can_grow_from(self, start: Any) -> bool:
        """Collect the region around `start`. Returns whether all of it can be channels first, and a Conv reads it."""
        pending, reaches_transpose = [start], False
        while pending:
            value = pending.pop()
            if value in self.values:
                continue
            if value.is_graph_output() or value.shape is None or len(value.shape) != len(start.shape):
                return False
            self.values.add(value)
            reaches_transpose |= value in self.transposes.to_channels_first
            for node in self._readers(value):
                if node.op_type not in ELEMENTWISE or node.domain:
                    return False
                self.nodes[node] = None
                conv_results = (value for value in node.inputs if value in self.transposes.to_channels_last)
                pending += [*node.outputs, *conv_results]
        inputs = (value for node in self.nodes for value in node.inputs if value is not None)
        return reaches_transpose and all(value in self.values or _is_scalar(value) for value in inputs)

    def _readers(self, value: Any) -> Iterator[Any]:
        """Yield the nodes that read a value, without its transpose to channels first."""
        transposed = self.transposes.to_channels_first.get(value)
        for use in value.uses():
            if transposed is None or use.node is not transposed.nodes[0]:
                yield use.node

    def make_channels_first(self) -> None:
        for value in list(self.values):
            if value in self.transposes.to_channels_first:
                nodes, channels_first = self.transposes.to_channels_first.pop(value)
                self._remove(nodes, channels_first, value)
            if value in self.transposes.to_channels_last:
                nodes, channels_first = self.transposes.to_channels_last.pop(value)
                self._remove(nodes, value, channels_first)
                self.values.remove(value)
        for value in self.values:
            value.name, value.shape = f"{value.name}{CHANNELS_FIRST_SUFFIX}", _channels_first_shape(value.shape)

    def _remove(self, transposes: list[Any], transposed: Any, value: Any) -> None:
        """Remove transposes; the readers of their result read `value` instead."""
        ir.convenience.replace_all_uses_with(transposed, value)
        for node in reversed(transposes):
            self.transposes.graph.remove(node, safe=True)
