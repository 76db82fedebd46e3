"""A graph seen through its Q/DQ pairs: what is quantized, how, and which operations a compiler moves them over."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from scalepoint.checking.graph import COPIES, Graph, Node, Shape, Use

Version = tuple[int, int]

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


class Step(NamedTuple):
    """A reader behind the Q/DQ pairs, and the Q that stands between (None if nothing does)."""

    use: Use
    crossed: Node | None


@dataclass(frozen=True)
class View:
    """One graph and the version of the compiler that is to read it."""

    graph: Graph
    version: Version

    def nodes(self, *ops: str) -> Iterator[Node]:
        wanted = frozenset(ops)
        return (node for node in self.graph.nodes if node.op in wanted)

    @cached_property
    def dequantizers(self) -> dict[str, Node]:
        """For each tensor that arrives dequantized, directly or over operations that DQ moves over, its DQ."""
        found: dict[str, Node] = {}
        for node in self.graph.nodes:
            if node.op in DEQUANTIZE:
                found[node.output] = node
            elif node.op in MOVES and node.input(0) in found:
                found.update(dict.fromkeys(node.outputs, found[node.input(0)]))
            elif node.op == "Concat" and all(tensor in found for tensor in node.inputs):
                sources = [found[tensor] for tensor in node.inputs]
                if sources and all(self.same_scale(sources[0], source) for source in sources):
                    found[node.output] = sources[0]
        return found

    def dequantizer(self, tensor: str) -> Node | None:
        return self.dequantizers.get(tensor)

    def quantizers(self, tensor: str, also: frozenset[str] = frozenset()) -> list[Node]:
        """The Q nodes that read a tensor, over operations that Q moves over (and those named)."""
        ops = MOVES | also
        uses = self.graph.readers_past(tensor, lambda use: use.node.op in ops and use.place >= 0)
        return [use.node for use in uses if use.node.op in QUANTIZE and use.place == 0]

    def origin(self, tensor: str) -> tuple[str, Node | None]:
        """The tensor before its Q/DQ pairs, and the DQ next to the reader."""
        crossed = None
        while (dequantize := self.graph.producer(tensor)) is not None and dequantize.op in DEQUANTIZE:
            quantize = self.graph.producer(dequantize.input(0))
            if quantize is None or quantize.op not in QUANTIZE:
                break
            crossed = crossed or dequantize
            tensor = quantize.input(0)
        return tensor, crossed

    def steps(self, tensor: str) -> list[Step]:
        """Who reads a tensor, Q/DQ pairs looked through. A Q without DQ is a reader of its own."""
        found = []
        for use in self.graph.readers(tensor):
            behind = [
                far
                for near in self.graph.readers(use.node.output)
                if use.node.op in QUANTIZE and near.node.op in DEQUANTIZE
                for far in self.graph.readers(near.node.output)
            ]
            found += [Step(far, use.node) for far in behind] or [Step(use, None)]
        return found

    def only_step(self, tensor: str) -> Step | None:
        """The one reader of a tensor; None if there are more, or if it leaves the graph."""
        steps = [] if tensor in self.graph.outputs else self.steps(tensor)
        return steps[0] if len(steps) == 1 else None

    def is_linear(self, use: Use) -> bool:
        """Batch norm, or arithmetic with a constant: a compiler folds it into the kernel before."""
        node = use.node
        if node.op == "BatchNormalization":
            return use.place == 0
        others = [tensor for position, tensor in enumerate(node.inputs) if position != use.place]
        return node.op in _LINEAR and all(map(self.graph.is_constant, others))

    def epilogue(self, node: Node) -> Iterator[Step]:
        """What is fused behind a weighted operation, Q/DQ looked through: linear*, an activation, a max pool."""
        tensor, stage = node.output, 0
        while (step := self.only_step(tensor)) is not None:
            rank = self._rank(step.use)
            if rank is None or rank < stage:
                return
            yield step
            if rank == 2:
                return
            tensor, stage = step.use.node.output, rank + (rank == 1)

    def _rank(self, use: Use) -> int | None:
        if self.is_linear(use):
            return 0
        if use.node.op in ACTIVATIONS and use.place == 0:
            return 1
        return 2 if use.node.op == "MaxPool" else None

    def convolution(self, tensor: str, *, alone: bool = True) -> Node | None:
        """The convolution whose kernel makes the tensor, what is linear folded in; `alone`: nobody reads within."""
        while not alone or self.only_step(tensor) is not None:
            node = self.graph.producer(tensor)
            if node is None or node.op in CONVOLUTIONS:
                return node
            operand = next((place for place, name in enumerate(node.inputs) if not self.graph.is_constant(name)), 0)
            if not self.is_linear(Use(node, operand)):
                return None
            tensor = node.input(operand)
        return None

    def is_quantized(self, node: Node) -> bool:
        """A weighted operation whose data arrives dequantized."""
        return self.data_dequantizer(node) is not None

    def data_dequantizer(self, node: Node) -> Node | None:
        """The DQ of an operand that is not constant."""
        operands = (tensor for tensor in node.inputs[:2] if not self.graph.is_constant(tensor))
        return next((found for tensor in operands if (found := self.dequantizer(tensor))), None)

    def weight(self, node: Node) -> int | None:
        """Which operand of a weighted operation is the constant one; None if both are data."""
        places = (1, 0) if node.op == "MatMul" else (1,)
        return next((place for place in places if self.graph.is_constant(node.input(place))), None)

    def kind(self, node: Node) -> int:
        """The quantized type of a Q or DQ node, as ONNX says it; 0 if it is not known."""
        if node.op in DEQUANTIZE:
            return self.graph.dtype(node.input(0)) or self._zero_point_kind(node)
        return self._zero_point_kind(node) or node.integer("output_dtype") or UINT8

    def _zero_point_kind(self, node: Node) -> int:
        if "FP8" in node.op:
            return FP8
        if node.op == "TRT_FP4DynamicQuantize":
            return FP4
        return INT4 if "INT4" in node.op else self.graph.dtype(node.input(2))

    def is_fp8(self, node: Node | None) -> bool:
        return node is not None and self.kind(node) == FP8

    def scale(self, node: Node) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        """The scale of a Q or DQ node in float32; None if it is not stored in the file."""
        values = self.graph.values(node.input(1))
        return None if values is None else values.astype(np.float32)

    def axis(self, node: Node, rank: int) -> int:
        axis = node.integer("axis", 1)
        return axis + rank if axis < 0 else axis

    def block(self, node: Node) -> int:
        return node.integer("block_size")

    def same_scale(self, left: Node, right: Node) -> bool:
        if left.input(1) == right.input(1):
            return True
        first, second = self.scale(left), self.scale(right)
        if first is None or second is None:
            return False
        return first.size == second.size and bool(np.array_equal(first.ravel(), second.ravel()))

    def size(self, tensor: str) -> int | None:
        """The number of elements, if every size is known."""
        shape = self.graph.shape(tensor)
        return None if shape is None or None in shape else prod(size or 0 for size in shape)


def last(shape: Shape | None, count: int) -> Shape:
    """The last sizes of a shape; unknown ones are None."""
    known = shape or ()
    return (None,) * (count - len(known)) + known[len(known) - min(count, len(known)) :]
