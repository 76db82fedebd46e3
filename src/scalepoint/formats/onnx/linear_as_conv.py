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
    dequantize = node.inputs[1].producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.domain or has_blocks(dequantize):
        return None
    codes = _skip_casts(dequantize.inputs[0])
    if codes.const_value is None or len(codes.shape) != 2 or dequantize.inputs[1].const_value is None:
        return None
    axis = dequantize.attributes["axis"].as_int() if "axis" in dequantize.attributes else 1
    is_by_column = dequantize.inputs[1].const_value.size == 1 or axis % 2 == 1
    return dequantize if is_by_column and not _is_shared_with_embedding(node, codes) else None


def has_blocks(node: Any) -> bool:
    """Whether a DequantizeLinear has scales per block. From opset 21 on, block_size is 0 if it has not."""
    return "block_size" in node.attributes and node.attributes["block_size"].as_int() > 0


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
    value = node.inputs[0]
    source = value.producer()
    is_quantized = source is not None and source.op_type == "DequantizeLinear" and _is_scalar(source.inputs[1])
    return is_quantized and value.shape is not None and len(value.shape) in SUPPORTED_RANKS


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

    def replace_by_conv(self, node: Any, weight: Any) -> None:
        source, (last, bias) = node.inputs[0], _find_bias(node)
        rank = len(source.shape)
        if source not in self.to_channels_first:
            self.to_channels_first[source] = _Transposed(*self._insert_transpose(node, source, rank))
        spatial_axes = max(rank - 2, 1)
        inputs = [self.to_channels_first[source].value, self._transposed_weight(node, weight, spatial_axes), *bias]
        conv = ir.node("Conv", inputs, {"kernel_shape": [1] * spatial_axes})
        old = last.outputs[0]
        self._insert_node(node, conv, _channels_first_shape(old.shape), old.type, f"{old.name}{CHANNELS_FIRST_SUFFIX}")
        nodes = self._insert_transpose_back(node, conv.outputs[0], old)
        new = nodes[-1].outputs[0]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for replaced in (last, node) if last is not node else (node,):
            self.graph.remove(replaced, safe=True)
        new.name = old.name
        self.to_channels_last[new] = _Transposed(nodes, conv.outputs[0])

    def _insert_node(self, node: Any, new_node: Any, shape: Any, tensor_type: Any, name: str) -> None:
        """Insert a node before `node`, with the metadata of `node`, and set shape, type and name of its output."""
        output = new_node.outputs[0]
        output.shape, output.type, output.name = shape, tensor_type, name
        new_node.metadata_props.update(node.metadata_props)
        self.graph.insert_before(node, new_node)

    def _insert_transpose(self, node: Any, value: Any, rank: int) -> tuple[list[Any], Any]:
        nodes, shape = [], value.shape
        if rank == 2:  # vectors: a batch axis of 1, so that the vectors are the positions of the convolution
            shape = ir.Shape((1, *shape))
            nodes.append(ir.node("Unsqueeze", [value, self._axes()]))
            self._insert_node(node, nodes[-1], shape, value.type, f"{value.name}.batch")
            value, rank = nodes[-1].outputs[0], 3
        nodes.append(ir.node("Transpose", [value], {"perm": [0, rank - 1, *range(1, rank - 1)]}))
        self._insert_node(
            node, nodes[-1], _channels_first_shape(shape), value.type, f"{value.name}{CHANNELS_FIRST_SUFFIX}"
        )
        return nodes, nodes[-1].outputs[0]

    def _insert_transpose_back(self, node: Any, value: Any, old: Any) -> list[Any]:
        rank = len(value.shape)
        nodes = [ir.node("Transpose", [value], {"perm": [0, *range(2, rank), 1]})]
        shape = old.shape if len(old.shape) == rank else ir.Shape((1, *old.shape))
        self._insert_node(node, nodes[0], shape, old.type, f"{old.name}.back")
        if len(old.shape) < rank:
            nodes.append(ir.node("Squeeze", [nodes[0].outputs[0], self._axes()]))
            self._insert_node(node, nodes[1], old.shape, old.type, f"{old.name}.rows")
        return nodes

    def _axes(self) -> Any:
        return self._constant("turned.axes", np.zeros(1, np.int64), ir.DataType.INT64)

    def _constant(self, name: str, array: np.ndarray, dtype: Any) -> Any:
        if name not in self.graph.initializers:
            tensor = ir.Tensor(array, dtype=dtype, name=name)
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def _transposed_weight(self, node: Any, weight: Any, spatial_axes: int) -> Any:
        """Return the weight (in, out) as (out, in, 1, ..), with the same casts and parameters."""
        codes = _skip_casts(weight.inputs[0])
        array = np.ascontiguousarray(codes.const_value.numpy().T)[(..., *[None] * spatial_axes)]
        value = self._constant(f"{codes.name}.{spatial_axes}d", array, codes.dtype)
        casts: list[Any] = []
        cast = weight.inputs[0].producer()
        while cast is not None:
            casts.insert(0, cast)
            cast = cast.inputs[0].producer()
        for cast in casts:
            new_node = ir.node("Cast", [value], {"to": cast.attributes["to"].as_int()})
            self._insert_node(
                node, new_node, value.shape, cast.outputs[0].type, f"{cast.outputs[0].name}.{node.outputs[0].name}"
            )
            value = new_node.outputs[0]
        new_node = ir.node("DequantizeLinear", [value, *weight.inputs[1:]], {"axis": 0})
        name = f"{weight.outputs[0].name}.{node.outputs[0].name}"
        self._insert_node(node, new_node, value.shape, weight.outputs[0].type, name)
        return new_node.outputs[0]

    def remove_redundant(self) -> None:
        """Remove transposes to channels last and back that have only elementwise operations between them."""
        for value in list(self.to_channels_last):
            region = _ElementwiseRegion(self)
            if value in self.to_channels_last and region.can_grow_from(value):
                region.make_channels_first()


def _find_bias(node: Any) -> tuple[Any, list[Any]]:
    """Return the last node of the layer (MatMul or Add), and its bias as a list of at most one value."""
    uses = node.outputs[0].uses()
    reader = uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
    if reader is None or reader.op_type != "Add":
        return node, []
    addend = reader.inputs[1 - uses[0].idx]
    channels = node.inputs[1].shape[-1]
    is_bias = addend.const_value is not None and tuple(addend.shape) == (channels,)
    return (reader, [addend]) if is_bias else (node, [])


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
        for value in self.values:
            if value in self.transposes.to_channels_first:
                self._remove_transpose(value)
        for value in [value for value in self.values if value in self.transposes.to_channels_last]:
            nodes, source = self.transposes.to_channels_last.pop(value)
            ir.convenience.replace_all_uses_with(value, source)
            for node in reversed(nodes):
                self.transposes.graph.remove(node, safe=True)
            self.values.remove(value)
        for value in self.values:
            value.name, value.shape = f"{value.name}{CHANNELS_FIRST_SUFFIX}", _channels_first_shape(value.shape)

    def _remove_transpose(self, value: Any) -> None:
        nodes, transposed = self.transposes.to_channels_first.pop(value)
        ir.convenience.replace_all_uses_with(transposed, value)
        for node in reversed(nodes):
            self.transposes.graph.remove(node, safe=True)
