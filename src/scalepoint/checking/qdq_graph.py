"""The Q/DQ view of an ONNX graph: which tensors are quantized, how, and which operations TensorRT moves Q/DQ over.

Nodes and tensors are those of onnx_ir. An operand that is left out is None.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto
from onnx_ir import Node

from scalepoint.checking.onnx_file import Floats, read_model, tensor_values

Shape = tuple[int | None, ...]
Tensor = ir.Value | None
Version = tuple[int, int]

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

INT8, INT4, UINT8, INT32 = TensorProto.INT8, TensorProto.INT4, TensorProto.UINT8, TensorProto.INT32
FP8, FP4, E8M0 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0
FLOAT, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
FLOATS = frozenset({FLOAT, HALF, BFLOAT})

STANDARD = frozenset({"QuantizeLinear", "DequantizeLinear"})
DYNAMIC = frozenset({"TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize"})
QUANTIZE = frozenset({"QuantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"}) | DYNAMIC
DEQUANTIZE = frozenset(
    {"DequantizeLinear", "TRT_FP8DequantizeLinear", "TRT_INT4DequantizeLinear", "TRT_MXFP8DequantizeLinear"}
)
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"MatMul", "Gemm"})
WEIGHTED = CONVOLUTIONS | PRODUCTS
MOVES = COPIES | {"MaxPool", "Pad"}  # Q moves backward, DQ forward over these; over Concat too if scales are equal
ACTIVATIONS = frozenset(
    ["Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "HardSwish", "HardSigmoid", "Swish", "Gelu", "Mish"]
)
_LINEAR = frozenset({"BatchNormalization", "Add", "Sub", "Mul", "Div"})  # with a constant: folded into the kernel


class OperandUse(NamedTuple):
    """A tensor is operand `place` of `node`; -1 if a graph inside the node reads it."""

    node: Node
    place: int


class ReaderStep(NamedTuple):
    """A reader behind the Q/DQ pairs, and the Q in between (None without a pair)."""

    use: OperandUse
    crossed: Node | None


def get_operand(node: Node, place: int) -> Tensor:
    return node.inputs[place] if place < len(node.inputs) else None


def get_result(node: Node) -> Tensor:
    return node.outputs[0] if node.outputs else None


def get_integer(node: Node, attribute: str, default: int = 0) -> int:
    stored = node.attributes.get(attribute)
    return stored.value if stored is not None and isinstance(stored.value, int) else default


@dataclass
class _Index:
    """Facts about all graphs of a model; a body of If, Loop or Scan reads tensors of the graphs around it."""

    opset: int
    folder: Path | None
    order: dict[Node, int] = field(default_factory=dict)  # position of a node in its own graph
    owners: dict[ir.Graph, Node] = field(default_factory=dict)  # the If, Loop or Scan of a body
    constants: set[Tensor] = field(default_factory=set)
    floats: dict[ir.Value, Floats | None] = field(default_factory=dict)

    def add(self, graph: ir.Graph) -> list[ir.Graph]:
        """Index one graph and return the bodies in it."""
        self.constants.update(graph.initializers.values())
        bodies: list[ir.Graph] = []
        for position, node in enumerate(graph):
            self.order[node] = position
            inner = _list_bodies(node)
            self.owners.update(dict.fromkeys(inner, node))
            bodies += inner
            operands = [tensor for tensor in node.inputs if tensor is not None]
            is_computed = inner or not operands or node.op_type in _RANDOM or not all(map(self.is_constant, operands))
            if node.op_type == "Constant" or not is_computed:
                self.constants.update(node.outputs)
        return bodies

    def is_constant(self, tensor: Tensor) -> bool:
        # onnx_ir drops sparse initializers: their tensors come from nowhere. read_model refuses other such tensors.
        is_sparse = tensor is not None and tensor.producer() is None and not tensor.is_graph_input()
        return is_sparse or tensor in self.constants


def _list_bodies(node: Node) -> list[ir.Graph]:
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies += attribute.as_graphs()
    return bodies


def read_views(source: str | os.PathLike[str] | ModelProto, version: Version) -> "list[QdqView]":
    """The main graph, then the bodies in it, in graph order."""
    model, opset, folder = read_model(source)
    index = _Index(opset, folder)
    graphs = [model.graph]
    for graph in graphs:  # grows while it is read
        graphs += index.add(graph)
    return [QdqView(graph, version, index) for graph in graphs]


@dataclass(frozen=True, eq=False)
class QdqView:
    """One graph and the version of the compiler that is to read it."""

    graph: ir.Graph
    version: Version
    index: _Index
    _readers: dict[Tensor, list[OperandUse]] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        return self.index.opset

    @cached_property
    def inputs(self) -> set[Tensor]:
        """The inputs of the graph that have no initializer."""
        return {tensor for tensor in self.graph.inputs if not tensor.is_initializer()}

    @cached_property
    def outputs(self) -> set[Tensor]:
        return set(self.graph.outputs)

    def nodes(self, *ops: str) -> Iterator[Node]:
        types = frozenset(ops)
        return (node for node in self.graph if node.op_type in types)

    def label(self, node: Node) -> str:
        """A readable name: the node's own, else that of its first output."""
        names = (tensor.name for tensor in node.outputs if tensor.name)
        return node.name or next(names, f"{node.op_type}_{self.position(node)}")

    def position(self, node: Node) -> int:
        return self.index.order[node]

    def producer(self, tensor: Tensor) -> Node | None:
        return None if tensor is None else tensor.producer()

    def readers(self, tensor: Tensor) -> list[OperandUse]:
        """The uses of a tensor in this graph, in graph order."""
        if tensor is not None and tensor not in self._readers:
            uses = {use for node, place in tensor.uses() if (use := self._use_here(node, place)) is not None}
            order = self.index.order
            self._readers[tensor] = sorted(uses, key=lambda use: (order[use.node], use.place < 0, use.place))
        return self._readers.get(tensor, [])

    def _use_here(self, node: Node, place: int) -> OperandUse | None:
        while node.graph is not self.graph:
            if not isinstance(node.graph, ir.Graph) or node.graph not in self.index.owners:
                return None  # a reader outside of this body
            node, place = self.index.owners[node.graph], -1
        return OperandUse(node, place)

    def is_constant(self, tensor: Tensor) -> bool:
        """Known when the engine is built: an initializer, or computed from constants only."""
        return self.index.is_constant(tensor)

    def shape(self, tensor: Tensor) -> Shape | None:
        stored = _read_constant(tensor) or tensor
        if stored is None or stored.shape is None:
            return None
        return tuple(size if isinstance(size, int) and size >= 0 else None for size in stored.shape)

    def dtype(self, tensor: Tensor) -> int:
        """A TensorProto data type; 0 (UNDEFINED) if it is not known."""
        stored = _read_constant(tensor) or tensor
        return TensorProto.UNDEFINED if stored is None or stored.dtype is None else int(stored.dtype)

    def values(self, tensor: Tensor) -> Floats | None:
        """The numbers of an initializer or a Constant node; None for anything else."""
        if tensor is None:
            return None
        if tensor not in self.index.floats:
            stored = _read_constant(tensor)
            self.index.floats[tensor] = None if stored is None else tensor_values(stored, self.index.folder)
        return self.index.floats[tensor]

    def source(self, tensor: Tensor, ops: frozenset[str] = COPIES) -> Tensor:
        """The tensor behind a row of such operations."""
        while (node := self.producer(tensor)) is not None and node.op_type in ops and get_operand(node, 0) is not None:
            tensor = get_operand(node, 0)
        return tensor

    def readers_past(self, tensor: Tensor, passes: Callable[[OperandUse], bool]) -> Iterator[OperandUse]:
        """The uses of a tensor, looking through the operations that `passes` lets through."""
        pending, seen = [tensor], {tensor}
        while pending:
            for use in self.readers(pending.pop()):
                if not passes(use):
                    yield use
                    continue
                pending += [output for output in use.node.outputs if output not in seen]
                seen.update(use.node.outputs)

    @cached_property
    def dequantizers(self) -> dict[Tensor, Node]:
        """For each tensor that arrives dequantized, directly or over operations that DQ moves over, its DQ."""
        found: dict[Tensor, Node] = {}
        for node in self.graph:
            if node.op_type in DEQUANTIZE:
                found[get_result(node)] = node
            elif node.op_type in MOVES and get_operand(node, 0) in found:
                found.update(dict.fromkeys(node.outputs, found[get_operand(node, 0)]))
            elif node.op_type == "Concat" and all(tensor in found for tensor in node.inputs):
                sources = [found[tensor] for tensor in node.inputs]
                if sources and all(self.same_scale(sources[0], source) for source in sources):
                    found[get_result(node)] = sources[0]
        return found

    def dequantizer(self, tensor: Tensor) -> Node | None:
        return self.dequantizers.get(tensor)

    def quantizers(self, tensor: Tensor, also: frozenset[str] = frozenset()) -> list[Node]:
        """The Q nodes that read a tensor, over operations that Q moves over (and those named)."""
        ops = MOVES | also
        uses = self.readers_past(tensor, lambda use: use.node.op_type in ops and use.place >= 0)
        return [use.node for use in uses if use.node.op_type in QUANTIZE and use.place == 0]

    def origin(self, tensor: Tensor) -> tuple[Tensor, Node | None]:
        """The tensor before its Q/DQ pairs, and the DQ next to the reader."""
        crossed = None
        while (dequantize := self.producer(tensor)) is not None and dequantize.op_type in DEQUANTIZE:
            quantize = self.producer(get_operand(dequantize, 0))
            if quantize is None or quantize.op_type not in QUANTIZE:
                break
            crossed = crossed or dequantize
            tensor = get_operand(quantize, 0)
        return tensor, crossed

    def steps(self, tensor: Tensor) -> list[ReaderStep]:
        """Who reads a tensor, Q/DQ pairs looked through. A Q without DQ is a reader of its own."""
        found = []
        for use in self.readers(tensor):
            behind = [
                far
                for near in self.readers(get_result(use.node))
                if use.node.op_type in QUANTIZE and near.node.op_type in DEQUANTIZE
                for far in self.readers(get_result(near.node))
            ]
            found += [ReaderStep(far, use.node) for far in behind] or [ReaderStep(use, None)]
        return found

    def only_step(self, tensor: Tensor) -> ReaderStep | None:
        """The one reader of a tensor; None if there are more, or if it leaves the graph."""
        steps = [] if tensor in self.outputs else self.steps(tensor)
        return steps[0] if len(steps) == 1 else None

    def is_linear(self, use: OperandUse) -> bool:
        """Batch norm, or arithmetic with a constant: a compiler folds it into the kernel before."""
        node = use.node
        if node.op_type == "BatchNormalization":
            return use.place == 0
        others = [tensor for position, tensor in enumerate(node.inputs) if position != use.place]
        return node.op_type in _LINEAR and all(map(self.is_constant, others))

    def epilogue(self, node: Node) -> Iterator[ReaderStep]:
        """What is fused behind a weighted operation, Q/DQ looked through: linear*, an activation, a max pool."""
        tensor, stage = get_result(node), 0
        while (step := self.only_step(tensor)) is not None:
            rank = self._rank(step.use)
            if rank is None or rank < stage:
                return
            yield step
            if rank == 2:
                return
            tensor, stage = get_result(step.use.node), rank + (rank == 1)

    def _rank(self, use: OperandUse) -> int | None:
        if self.is_linear(use):
            return 0
        if use.node.op_type in ACTIVATIONS and use.place == 0:
            return 1
        return 2 if use.node.op_type == "MaxPool" else None

    def convolution(self, tensor: Tensor, *, alone: bool = True) -> Node | None:
        """The convolution whose kernel makes the tensor, what is linear folded in; `alone`: nobody reads within."""
        while not alone or self.only_step(tensor) is not None:
            node = self.producer(tensor)
            if node is None or node.op_type in CONVOLUTIONS:
                return node
            place = next((place for place, name in enumerate(node.inputs) if not self.is_constant(name)), 0)
            if not self.is_linear(OperandUse(node, place)):
                return None
            tensor = get_operand(node, place)
        return None

    def is_quantized(self, node: Node) -> bool:
        """A weighted operation whose data arrives dequantized."""
        return self.data_dequantizer(node) is not None

    def data_dequantizer(self, node: Node) -> Node | None:
        """The DQ of an operand that is not constant."""
        operands = (tensor for tensor in node.inputs[:2] if not self.is_constant(tensor))
        return next((found for tensor in operands if (found := self.dequantizer(tensor))), None)

    def weight(self, node: Node) -> int | None:
        """Which operand of a weighted operation is the constant one; None if both are data."""
        places = (1, 0) if node.op_type == "MatMul" else (1,)
        return next((place for place in places if self.is_constant(get_operand(node, place))), None)

    def kind(self, node: Node) -> int:
        """The quantized type of a Q or DQ node, as ONNX says it; 0 if it is not known."""
        if node.op_type in DEQUANTIZE:
            return self.dtype(get_operand(node, 0)) or self._zero_point_kind(node)
        return self._zero_point_kind(node) or get_integer(node, "output_dtype") or UINT8

    def _zero_point_kind(self, node: Node) -> int:
        if "FP8" in node.op_type:
            return FP8
        if node.op_type == "TRT_FP4DynamicQuantize":
            return FP4
        return INT4 if "INT4" in node.op_type else self.dtype(get_operand(node, 2))

    def is_fp8(self, node: Node | None) -> bool:
        return node is not None and self.kind(node) == FP8

    def scale(self, node: Node) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        """The scale of a Q or DQ node in float32; None if it is not stored in the file."""
        values = self.values(get_operand(node, 1))
        return None if values is None else values.astype(np.float32)

    def axis(self, node: Node, rank: int) -> int:
        axis = get_integer(node, "axis", 1)
        return axis + rank if axis < 0 else axis

    def block(self, node: Node) -> int:
        return get_integer(node, "block_size")

    def same_scale(self, left: Node, right: Node) -> bool:
        if get_operand(left, 1) == get_operand(right, 1):
            return True
        first, second = self.scale(left), self.scale(right)
        if first is None or second is None:
            return False
        return first.size == second.size and bool(np.array_equal(first.ravel(), second.ravel()))

    def size(self, tensor: Tensor) -> int | None:
        """The number of elements, if every size is known."""
        shape = self.shape(tensor)
        return None if shape is None or None in shape else prod(size or 0 for size in shape)


def last_sizes(shape: Shape | None, count: int) -> Shape:
    """The last sizes of a shape; unknown ones are None."""
    known = shape or ()
    return (None,) * (count - len(known)) + known[len(known) - min(count, len(known)) :]


def _read_constant(tensor: Tensor) -> ir.TensorProtocol | None:
    try:
        return None if tensor is None else ir.convenience.get_const_tensor(tensor)
    except (ValueError, TypeError, OverflowError):  # a Constant node without a value
        return None
