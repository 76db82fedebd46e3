"""Linear layers written as convolutions of one tap, for a compiler whose integer convolutions are the faster kernels.

    DequantizeLinear -> MatMul -> Add        becomes  DequantizeLinear -> Transpose -> Conv -> Transpose

Channels stand second in what a convolution reads. Where only elementwise operations lie between two of them (an MLP, a
gate), they work on tensors that are turned so, and no Transpose is left there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from scalepoint.formats.onnx.channels_first import TURNED

ELEMENTWISE = frozenset(
    (
        "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity",
        "LeakyRelu", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign",
        "Sqrt", "Sub", "Swish", "Tanh", "QuantizeLinear", "DequantizeLinear",
    )
)  # fmt: skip
RANKS = (2, 3, 4)  # vectors, sequences, pictures with channels last


def linears_as_convolutions(model: Any) -> None:
    """Every product of codes by a weight of codes, in place."""
    turns = _Turns(model.graph)
    for node in list(model.graph):
        if node.op_type == "MatMul" and (weight := _weight(node)) is not None and _reads_codes(node):
            turns.convolve(node, weight)
    turns.join()


def _weight(node: Any) -> Any | None:
    """The DequantizeLinear of a constant matrix with a scale for all of it or each column, that no table shares."""
    found = node.inputs[1].producer()
    if found is None or found.op_type != "DequantizeLinear" or found.domain or has_blocks(found):
        return None
    codes = _stored(found.inputs[0])
    if codes.const_value is None or len(codes.shape) != 2 or found.inputs[1].const_value is None:
        return None
    axis = found.attributes["axis"].as_int() if "axis" in found.attributes else 1
    is_by_column = found.inputs[1].const_value.size == 1 or axis % 2 == 1
    return found if is_by_column and not _is_of_table(node, codes) else None


def has_blocks(node: Any) -> bool:
    """Whether scales are of blocks; from opset 21 on every node has the setting, which is 0 where they are not."""
    return "block_size" in node.attributes and node.attributes["block_size"].as_int() > 0


def _stored(value: Any) -> Any:
    """What it is before casts."""
    while value.producer() is not None and value.producer().op_type == "Cast":
        value = value.producer().inputs[0]
    return value


def _is_of_table(node: Any, codes: Any) -> bool:
    """Whether an embedding has the same shape, turned: a tied head reads its codes, which are stored once."""
    shape = tuple(codes.shape)[::-1]
    tables = (value for value in node.graph.initializers.values() if tuple(value.shape or ()) == shape)
    return any(use.node.op_type == "Gather" and use.idx == 0 for table in tables for use in table.uses())


def _reads_codes(node: Any) -> bool:
    value = node.inputs[0]
    source = value.producer()
    is_codes = source is not None and source.op_type == "DequantizeLinear" and _is_scalar(source.inputs[1])
    return is_codes and value.shape is not None and len(value.shape) in RANKS


def _is_scalar(value: Any) -> bool:
    found = ir.convenience.get_const_tensor(_stored(value))
    return found is not None and found.size == 1


class _Ahead(NamedTuple):
    """The nodes that turn a tensor, and what they make of it."""

    nodes: list[Any]
    made: Any


@dataclass
class _Turns:
    """What was turned, and turned back."""

    graph: Any
    ahead: dict[Any, _Ahead] = field(default_factory=dict)  # by what is turned
    back: dict[Any, _Ahead] = field(default_factory=dict)  # by what is made; its first node reads the convolution

    def convolve(self, node: Any, weight: Any) -> None:
        source, (last, bias) = node.inputs[0], _with_bias(node)
        rank = len(source.shape)
        if source not in self.ahead:
            self.ahead[source] = _Ahead(*self._turn(node, source, rank))
        taken = [self.ahead[source].made, self._turned_weight(node, weight, max(rank - 2, 1)), *bias]
        conv = ir.node("Conv", taken, {"kernel_shape": [1] * max(rank - 2, 1)})
        old = last.outputs[0]
        self._place(node, conv, _turned_shape(old.shape), old.type, f"{old.name}{TURNED}")
        nodes = self._turn_back(node, conv.outputs[0], old)
        new = nodes[-1].outputs[0]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for each in (last, node) if last is not node else (node,):
            self.graph.remove(each, safe=True)
        new.name = old.name
        self.back[new] = _Ahead(nodes, conv.outputs[0])

    def _place(self, node: Any, made: Any, shape: Any, kind: Any, name: str) -> None:
        made.outputs[0].shape, made.outputs[0].type, made.outputs[0].name = shape, kind, name
        made.metadata_props.update(node.metadata_props)
        self.graph.insert_before(node, made)

    def _turn(self, node: Any, value: Any, rank: int) -> tuple[list[Any], Any]:
        nodes, shape = [], value.shape
        if rank == 2:
            shape = ir.Shape((1, *shape))
            nodes.append(ir.node("Unsqueeze", [value, self._axes()]))
            self._place(node, nodes[-1], shape, value.type, f"{value.name}.batch")
            value, rank = nodes[-1].outputs[0], 3
        nodes.append(ir.node("Transpose", [value], {"perm": [0, rank - 1, *range(1, rank - 1)]}))
        self._place(node, nodes[-1], _turned_shape(shape), value.type, f"{value.name}{TURNED}")
        return nodes, nodes[-1].outputs[0]

    def _turn_back(self, node: Any, value: Any, old: Any) -> list[Any]:
        rank = len(value.shape)
        nodes = [ir.node("Transpose", [value], {"perm": [0, *range(2, rank), 1]})]
        shape = old.shape if len(old.shape) == rank else ir.Shape((1, *old.shape))
        self._place(node, nodes[0], shape, old.type, f"{old.name}.back")
        if len(old.shape) < rank:
            nodes.append(ir.node("Squeeze", [nodes[0].outputs[0], self._axes()]))
            self._place(node, nodes[1], old.shape, old.type, f"{old.name}.rows")
        return nodes

    def _axes(self) -> Any:
        return self._constant("turned.axes", np.zeros(1, np.int64), ir.DataType.INT64)

    def _constant(self, name: str, array: np.ndarray, kind: Any) -> Any:
        if name not in self.graph.initializers:
            tensor = ir.Tensor(array, dtype=kind, name=name)
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def _turned_weight(self, node: Any, weight: Any, taps: int) -> Any:
        """(inputs, outputs) -> (outputs, inputs, 1), its casts and parameters as they were."""
        codes = _stored(weight.inputs[0])
        array = np.ascontiguousarray(codes.const_value.numpy().T)[(..., *[None] * taps)]
        value = self._constant(f"{codes.name}.{taps}d", array, codes.dtype)
        casts: list[Any] = []
        while (each := (casts[0] if casts else weight).inputs[0].producer()) is not None:
            casts.insert(0, each)
        for cast in casts:
            made = ir.node("Cast", [value], {"to": cast.attributes["to"].as_int()})
            self._place(node, made, value.shape, cast.outputs[0].type, f"{cast.outputs[0].name}.{node.outputs[0].name}")
            value = made.outputs[0]
        made = ir.node("DequantizeLinear", [value, *weight.inputs[1:]], {"axis": 0})
        name = f"{weight.outputs[0].name}.{node.outputs[0].name}"
        self._place(node, made, value.shape, weight.outputs[0].type, name)
        return made.outputs[0]

    def join(self) -> None:
        """Take away what turns back and forth with nothing between that would notice."""
        for value in list(self.back):
            region = _Region(self)
            if value in self.back and region.grows_from(value):
                region.turn()


def _with_bias(node: Any) -> tuple[Any, list[Any]]:
    """The last node of the layer, and its bias."""
    uses = node.outputs[0].uses()
    reader = uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
    if reader is None or reader.op_type != "Add":
        return node, []
    other = reader.inputs[1 - uses[0].idx]
    channels = node.inputs[1].shape[-1]
    is_bias = other.const_value is not None and tuple(other.shape) == (channels,)
    return (reader, [other]) if is_bias else (node, [])


def _turned_shape(shape: Any) -> Any:
    """Of a tensor that is given as the model has it."""
    sizes = list(shape) if len(shape) > 2 else [1, *shape]
    return ir.Shape((sizes[0], sizes[-1], *sizes[1:-1]))


@dataclass
class _Region:
    """Elementwise operations between convolutions."""

    turns: _Turns
    values: set[Any] = field(default_factory=set)
    nodes: dict[Any, None] = field(default_factory=dict)

    def grows_from(self, start: Any) -> bool:
        """Whether all that reads it, and reads that, may be turned, and something is turned again at the end."""
        pending, ends = [start], False
        while pending:
            value = pending.pop()
            if value in self.values:
                continue
            if value.is_graph_output() or value.shape is None or len(value.shape) != len(start.shape):
                return False
            self.values.add(value)
            ends |= value in self.turns.ahead
            for node in self._readers(value):
                if node.op_type not in ELEMENTWISE or node.domain:
                    return False
                self.nodes[node] = None
                pending += [*node.outputs, *(each for each in node.inputs if each in self.turns.back)]
        given = (value for node in self.nodes for value in node.inputs if value is not None)
        return ends and all(value in self.values or _is_scalar(value) for value in given)

    def _readers(self, value: Any) -> Iterator[Any]:
        turning = self.turns.ahead.get(value)
        for use in value.uses():
            if turning is None or use.node is not turning.nodes[0]:
                yield use.node

    def turn(self) -> None:
        for value in self.values:
            if value in self.turns.ahead:
                self._forget_ahead(value)
        for value in [each for each in self.values if each in self.turns.back]:
            nodes, made = self.turns.back.pop(value)
            ir.convenience.replace_all_uses_with(value, made)
            for node in reversed(nodes):
                self.turns.graph.remove(node, safe=True)
            self.values.remove(value)
        for value in self.values:
            value.name, value.shape = f"{value.name}{TURNED}", _turned_shape(value.shape)

    def _forget_ahead(self, value: Any) -> None:
        nodes, made = self.turns.ahead.pop(value)
        ir.convenience.replace_all_uses_with(made, value)
        for node in reversed(nodes):
            self.turns.graph.remove(node, safe=True)
