"""An ONNX graph as rules read it: who makes a tensor, who reads it, what is constant, which shapes are known."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from scalepoint.checking.onnx_file import bodies_of, opset_of, read_model, tensor_values
from scalepoint.errors import StoreError, shown

Shape = tuple[int | None, ...]
Values = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

COPIES = frozenset(
    [
        "Reshape",
        "Transpose",
        "Slice",
        "Split",
        "Squeeze",
        "Unsqueeze",
        "Gather",
        "Flatten",
        "Expand",
        "Tile",
        "Identity",
        "DepthToSpace",
        "SpaceToDepth",
    ]
)
_RANDOM = frozenset(
    ["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"]
)
_NUMBERS = ("value_float", "value_floats", "value_int", "value_ints")


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. `name` is readable: the node's own, else that of its first output."""

    index: int
    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    def input(self, index: int) -> str:
        """The tensor's name; empty if the operand is left out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def integer(self, attribute: str, default: int = 0) -> int:
        value = self.attributes.get(attribute)
        return value if isinstance(value, int) else default

    @property
    def output(self) -> str:
        return self.outputs[0] if self.outputs else ""


class Use(NamedTuple):
    """A tensor is operand `place` of `node`."""

    node: Node
    place: int


@dataclass
class Graph:
    """The index of one graph; a body of If, Loop or Scan also sees what is around it."""

    opset: int
    folder: Path | None
    nodes: list[Node] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)  # what a body may read from around it
    _producers: dict[str, Node] = field(default_factory=dict)
    _readers: dict[str, list[Use]] = field(default_factory=dict)
    _tensors: dict[str, TensorProto] = field(default_factory=dict)
    _constant: set[str] = field(default_factory=set)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _types: dict[str, int] = field(default_factory=dict)
    _values: dict[str, Values | None] = field(default_factory=dict)

    def producer(self, tensor: str) -> Node | None:
        return self._producers.get(tensor)

    def readers(self, tensor: str) -> list[Use]:
        return self._readers.get(tensor, [])

    def is_constant(self, tensor: str) -> bool:
        """Known when the engine is built: an initializer, or computed from constants only."""
        return tensor in self._constant

    def shape(self, tensor: str) -> Shape | None:
        return self._shapes.get(tensor)

    def dtype(self, tensor: str) -> int:
        """A TensorProto data type; 0 (UNDEFINED) if it is not known."""
        return self._types.get(tensor, TensorProto.UNDEFINED)

    def values(self, tensor: str) -> Values | None:
        """The numbers of an initializer or a Constant node; None for anything else."""
        if tensor not in self._values:
            stored = self._tensors.get(tensor)
            self._values[tensor] = None if stored is None else tensor_values(stored, self.folder)
        return self._values[tensor]

    def source(self, tensor: str, ops: frozenset[str] = COPIES) -> str:
        """The tensor behind a row of such operations."""
        while (node := self.producer(tensor)) is not None and node.op in ops and node.input(0):
            tensor = node.input(0)
        return tensor

    def readers_past(self, tensor: str, passes: Callable[[Use], bool]) -> Iterator[Use]:
        """Who reads the tensor, looking through the operations that `passes` lets through."""
        pending, seen = [tensor], {tensor}
        while pending:
            for use in self.readers(pending.pop()):
                if not passes(use):
                    yield use
                    continue
                pending += [output for output in use.node.outputs if output not in seen]
                seen.update(use.node.outputs)

    def body(self) -> Self:
        """An index for a graph inside this one."""
        inner = type(self)(self.opset, self.folder)
        for name in ("_producers", "_tensors", "_shapes", "_types"):
            setattr(inner, name, dict(getattr(self, name)))
        inner._constant = set(self._constant)
        inner.outer = self.outer | self.inputs | self._constant | self._producers.keys()
        return inner


def read_graphs(source: str | os.PathLike[str] | ModelProto) -> list[Graph]:
    """The main graph, then the bodies in it, in graph order."""
    model, folder = read_model(source)
    graphs: list[Graph] = []
    pending = [(model.graph, Graph(opset_of(model), folder))]
    while pending:
        proto, graph = pending.pop(0)
        inner = _fill(graph, proto)
        graphs.append(graph)
        pending += [(body, graph.body()) for body in inner]
    return graphs


def _fill(graph: Graph, proto: GraphProto) -> list[GraphProto]:
    """Index one graph; its bodies are returned, to be indexed next."""
    for info in (*proto.input, *proto.value_info, *proto.output):
        _note_type(graph, info)
    for tensor in proto.initializer:
        _note_tensor(graph, tensor.name, tensor)
    graph._constant.update(sparse.values.name for sparse in proto.sparse_initializer)
    graph.outputs.update(info.name for info in proto.output)
    graph.inputs.update(info.name for info in proto.input if info.name not in graph._tensors)
    known = graph.outer | graph.inputs | graph._constant
    own: set[str] = set()
    inner: list[GraphProto] = []
    for index, node_proto in enumerate(proto.node):
        node = _node(index, node_proto)
        _check_order(node, known, own)
        own.update(filter(None, node.outputs))
        known.update(node.outputs)
        bodies = bodies_of(node_proto)
        inner += bodies
        _note_node(graph, node, node_proto, bodies)
    if missing := sorted(graph.outputs - known):
        raise StoreError(f"the graph's output {shown(missing[0])} is made by no node")
    return inner


def _check_order(node: Node, known: set[str], own: set[str]) -> None:
    for tensor in filter(None, node.inputs):
        if tensor not in known:
            raise StoreError(f"node {shown(node.name)} reads {shown(tensor)}, which no earlier node makes")
    for tensor in filter(None, node.outputs):
        if tensor in own:
            raise StoreError(f"two nodes make the tensor {shown(tensor)}")


def _note_node(graph: Graph, node: Node, proto: NodeProto, bodies: list[GraphProto]) -> None:
    graph.nodes.append(node)
    for position, tensor in enumerate(node.inputs):
        graph._readers.setdefault(tensor, []).append(Use(node, position))
    for tensor in sorted(set(_names_read(bodies))):
        graph._readers.setdefault(tensor, []).append(Use(node, -1))
    for tensor in node.outputs:
        graph._producers[tensor] = node
    if node.op == "Constant" and (stored := _constant(proto)) is not None:
        _note_tensor(graph, node.output, stored)
    given = [tensor for tensor in node.inputs if tensor]
    if node.op == "Constant" or (
        given and not bodies and node.op not in _RANDOM and all(map(graph.is_constant, given))
    ):
        graph._constant.update(node.outputs)


def _names_read(bodies: Iterable[GraphProto]) -> Iterator[str]:
    for body in bodies:
        yield from (info.name for info in body.output)
        for node in body.node:
            yield from node.input
            yield from _names_read(bodies_of(node))


def _node(index: int, proto: NodeProto) -> Node:
    inputs, outputs = tuple(map(_text, proto.input)), tuple(map(_text, proto.output))
    name = _text(proto.name) or next(filter(None, outputs), f"{proto.op_type}_{index}")
    attributes = {_text(attribute.name): _value(attribute) for attribute in proto.attribute}
    return Node(index, _text(proto.op_type), name, inputs, outputs, attributes)


def _text(name: str) -> str:
    """protobuf hands out what is no UTF-8 as bytes."""
    if not isinstance(name, str):
        raise StoreError(f"the name {shown(name)} is no text: the file is damaged")
    return name


def _value(attribute: AttributeProto) -> Any:
    """Plain numbers, text and lists; None for tensors and graphs, which are read elsewhere."""
    match attribute.type:
        case AttributeProto.INT:
            return attribute.i
        case AttributeProto.FLOAT:
            return attribute.f
        case AttributeProto.STRING:
            return attribute.s.decode(errors="replace")
        case AttributeProto.INTS:
            return list(attribute.ints)
        case AttributeProto.FLOATS:
            return list(attribute.floats)
        case _:
            return None


def _constant(proto: NodeProto) -> TensorProto | None:
    stored: TensorProto
    for attribute in proto.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            stored = attribute.t
            return stored
        if attribute.name in _NUMBERS:
            numbers = _value(attribute)
            many = isinstance(numbers, list)
            kind = TensorProto.INT64 if "int" in attribute.name else TensorProto.FLOAT
            return helper.make_tensor(proto.name, kind, [len(numbers)] if many else [], numbers if many else [numbers])
    return None


def _note_tensor(graph: Graph, name: str, tensor: TensorProto) -> None:
    graph._tensors[_text(name)] = tensor
    graph._constant.add(name)
    graph._types[name] = tensor.data_type
    graph._shapes[name] = tuple(tensor.dims)


def _note_type(graph: Graph, info: ValueInfoProto) -> None:
    kind = info.type.tensor_type
    graph._types[_text(info.name)] = kind.elem_type
    if kind.HasField("shape"):
        graph._shapes[info.name] = tuple(
            size.dim_value if size.HasField("dim_value") and size.dim_value >= 0 else None for size in kind.shape.dim
        )
