"""Queries on an ONNX Q/DQ graph: which tensors are quantized, how, and over which operations TensorRT moves Q and DQ.

Nodes and tensors are those of onnx_ir. An omitted optional operand is None.
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

from scalepoint.support.onnx_file import Floats, read_model, tensor_values

TensorShape = tuple[int | None, ...]
Tensor = ir.Value | None
CompilerVersion = tuple[int, int]  # major, minor

# Operations that only move values
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

# TensorProto data types
INT8, INT4, UINT8, INT32 = TensorProto.INT8, TensorProto.INT4, TensorProto.UINT8, TensorProto.INT32
FP8, FP4, E8M0 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0
FLOAT, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
FLOATS = frozenset({FLOAT, HALF, BFLOAT})

ONNX_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
DYNAMIC_QUANTIZE = frozenset({"TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize"})
QUANTIZE = frozenset({"QuantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"}) | DYNAMIC_QUANTIZE
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
_LINEAR = frozenset({"BatchNormalization", "Add", "Sub", "Mul", "Div"})  # folded into the kernel before


class OperandUse(NamedTuple):
    """A use of a tensor as an operand of `node`; the index is -1 if a body graph of the node reads the tensor."""

    node: Node
    operand_index: int


class ReaderStep(NamedTuple):
    """A reader of a tensor, and the Q of the Q/DQ pair between the two (None without a pair)."""

    use: OperandUse
    quantize: Node | None


class BeforePairs(NamedTuple):
    """The tensor before the Q/DQ pairs that end at a tensor, and the last DQ (None without a pair)."""

    tensor: Tensor
    dequantize: Node | None


def get_operand(node: Node, index: int) -> Tensor:
    return node.inputs[index] if index < len(node.inputs) else None


def get_result(node: Node) -> Tensor:
    return node.outputs[0] if node.outputs else None


def both_orders(node: Node) -> list[tuple[Tensor, Tensor]]:
    """Return the two operands of a node in both orders; nothing for a node with another number of operands."""
    if len(node.inputs) != 2:
        return []
    first, second = node.inputs
    return [(first, second), (second, first)]


def get_int_attribute(node: Node, attribute: str, default: int = 0) -> int:
    stored = node.attributes.get(attribute)
    return stored.value if stored is not None and isinstance(stored.value, int) else default


@dataclass
class _ModelFacts:
    """Facts that all graphs of a model share: a body of If, Loop or Scan reads tensors of the graphs around it."""

    opset: int
    folder: Path | None
    positions: dict[Node, int] = field(default_factory=dict)  # of a node in its graph
    owners: dict[ir.Graph, Node] = field(default_factory=dict)  # the If, Loop or Scan node of a body
    constants: set[Tensor] = field(default_factory=set)
    values: dict[ir.Value, Floats | None] = field(default_factory=dict)  # cache of QdqView.values

    def add_graph(self, graph: ir.Graph) -> list[ir.Graph]:
        """Record the facts of one graph, and return the bodies in it."""
        self.constants.update(graph.initializers.values())
        bodies: list[ir.Graph] = []
        for position, node in enumerate(graph):
            self.positions[node] = position
            node_bodies = _list_bodies(node)
            self.owners.update(dict.fromkeys(node_bodies, node))
            bodies += node_bodies
            operands = [tensor for tensor in node.inputs if tensor is not None]
            can_be_folded = bool(operands) and not node_bodies and node.op_type not in _RANDOM
            if node.op_type == "Constant" or (can_be_folded and all(map(self.is_constant, operands))):
                self.constants.update(node.outputs)
        return bodies

    def is_constant(self, tensor: Tensor) -> bool:
        # onnx_ir drops sparse initializers, so their tensors have no producer. read_model rejects other such tensors.
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


def read_views(source: str | os.PathLike[str] | ModelProto, version: CompilerVersion) -> "list[QdqView]":
    """Read a model; return a view of the main graph, then of the bodies in it, in graph order."""
    model, opset, folder = read_model(source)
    facts = _ModelFacts(opset, folder)
    graphs = [model.graph]
    for graph in graphs:  # grows while it is iterated
        graphs += facts.add_graph(graph)
    return [QdqView(graph, version, facts) for graph in graphs]


@dataclass(frozen=True, eq=False)
class QdqView:
    """One graph, and the version of the compiler whose rules are checked."""

    graph: ir.Graph
    version: CompilerVersion
    facts: _ModelFacts
    _readers: dict[Tensor, list[OperandUse]] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        return self.facts.opset

    # -- nodes and tensors ---------------------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> set[Tensor]:
        """The inputs of the graph that have no initializer."""
        return {tensor for tensor in self.graph.inputs if not tensor.is_initializer()}

    @cached_property
    def outputs(self) -> set[Tensor]:
        return set(self.graph.outputs)

    def nodes(self, *op_types: str) -> Iterator[Node]:
        """Yield the nodes of these types in graph order."""
        types = frozenset(op_types)
        return (node for node in self.graph if node.op_type in types)

    def label(self, node: Node) -> str:
        """Return the name of a node, or that of its first output."""
        names = (tensor.name for tensor in node.outputs if tensor.name)
        return node.name or next(names, f"{node.op_type}_{self.position(node)}")

    def position(self, node: Node) -> int:
        """Return the index of a node in its graph."""
        return self.facts.positions[node]

    def producer(self, tensor: Tensor) -> Node | None:
        return None if tensor is None else tensor.producer()

    def readers(self, tensor: Tensor) -> list[OperandUse]:
        """Return the uses of a tensor in this graph, in graph order."""
        if tensor is not None and tensor not in self._readers:
            positions = self.facts.positions
            uses = {self._to_use_in_graph(node, index) for node, index in tensor.uses()}
            uses_in_graph = [use for use in uses if use is not None]
            uses_in_graph.sort(key=lambda use: (positions[use.node], use.operand_index < 0, use.operand_index))
            self._readers[tensor] = uses_in_graph
        return self._readers.get(tensor, [])

    def _to_use_in_graph(self, node: Node, index: int) -> OperandUse | None:
        """Return a use as one in this graph: a reader in a body counts as its If, Loop or Scan node."""
        while node.graph is not self.graph:
            if not isinstance(node.graph, ir.Graph) or node.graph not in self.facts.owners:
                return None  # the reader is outside of this body
            node, index = self.facts.owners[node.graph], -1
        return OperandUse(node, index)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is known when the engine is built: an initializer, or computed from constants only."""
        return self.facts.is_constant(tensor)

    def shape(self, tensor: Tensor) -> TensorShape | None:
        """Return the shape of a tensor, with None for unknown sizes; None if its rank is unknown."""
        stored = _read_constant(tensor) or tensor
        if stored is None or stored.shape is None:
            return None
        return tuple(size if isinstance(size, int) and size >= 0 else None for size in stored.shape)

    def element_count(self, tensor: Tensor) -> int | None:
        """Return the number of elements; None if a size is unknown."""
        shape = self.shape(tensor)
        if shape is None or None in shape:
            return None
        return prod(size or 0 for size in shape)

    def dtype(self, tensor: Tensor) -> int:
        """Return the TensorProto data type of a tensor; 0 (UNDEFINED) if it is unknown."""
        stored = _read_constant(tensor) or tensor
        return TensorProto.UNDEFINED if stored is None or stored.dtype is None else int(stored.dtype)

    def values(self, tensor: Tensor) -> Floats | None:
        """Return the values of an initializer or a Constant node; None for anything else."""
        if tensor is None:
            return None
        cache = self.facts.values
        if tensor not in cache:
            stored = _read_constant(tensor)
            cache[tensor] = None if stored is None else tensor_values(stored, self.facts.folder)
        return cache[tensor]

    def skip_back(self, tensor: Tensor, op_types: frozenset[str] = COPIES) -> Tensor:
        """Return the tensor before a chain of such operations that ends at `tensor`."""
        while (node := self.producer(tensor)) is not None and node.op_type in op_types:
            if get_operand(node, 0) is None:
                break
            tensor = get_operand(node, 0)
        return tensor

    def readers_past(self, tensor: Tensor, is_skipped: Callable[[OperandUse], bool]) -> Iterator[OperandUse]:
        """Yield the uses of a tensor; a skipped use is replaced by the uses of its node's outputs."""
        pending, visited = [tensor], {tensor}
        while pending:
            for use in self.readers(pending.pop()):
                if not is_skipped(use):
                    yield use
                    continue
                pending += [output for output in use.node.outputs if output not in visited]
                visited.update(use.node.outputs)

    # -- Q/DQ pairs ----------------------------------------------------------------------------------------------------

    @cached_property
    def dequantizers(self) -> dict[Tensor, Node]:
        """The DQ of each dequantized tensor, also after operations that DQ moves over."""
        dequantizers: dict[Tensor, Node] = {}
        for node in self.graph:
            if node.op_type in DEQUANTIZE:
                dequantizers[get_result(node)] = node
            elif node.op_type in MOVES and get_operand(node, 0) in dequantizers:
                dequantizers.update(dict.fromkeys(node.outputs, dequantizers[get_operand(node, 0)]))
            elif node.op_type == "Concat" and all(tensor in dequantizers for tensor in node.inputs):
                sources = [dequantizers[tensor] for tensor in node.inputs]
                if sources and all(self.has_same_scale(sources[0], source) for source in sources):
                    dequantizers[get_result(node)] = sources[0]
        return dequantizers

    def dequantizer(self, tensor: Tensor) -> Node | None:
        return self.dequantizers.get(tensor)

    def quantizers(self, tensor: Tensor, also_skipped: frozenset[str] = frozenset()) -> list[Node]:
        """Return the Q nodes that read a tensor, also after operations that Q moves over and after `also_skipped`."""
        skipped = MOVES | also_skipped
        uses = self.readers_past(tensor, lambda use: use.node.op_type in skipped and use.operand_index >= 0)
        return [use.node for use in uses if use.node.op_type in QUANTIZE and use.operand_index == 0]

    def before_pairs(self, tensor: Tensor) -> BeforePairs:
        """Skip the Q/DQ pairs that end at a tensor, backward."""
        last_dequantize = None
        while (dequantize := self.producer(tensor)) is not None and dequantize.op_type in DEQUANTIZE:
            quantize = self.producer(get_operand(dequantize, 0))
            if quantize is None or quantize.op_type not in QUANTIZE:
                break
            last_dequantize = last_dequantize or dequantize
            tensor = get_operand(quantize, 0)
        return BeforePairs(tensor, last_dequantize)

    def reader_steps(self, tensor: Tensor) -> list[ReaderStep]:
        """Return the readers of a tensor, looking through Q/DQ pairs. A Q without a DQ is a reader itself."""
        steps = []
        for use in self.readers(tensor):
            behind_pair = []
            if use.node.op_type in QUANTIZE:
                for reader in self.readers(get_result(use.node)):
                    if reader.node.op_type in DEQUANTIZE:
                        behind_pair += self.readers(get_result(reader.node))
            if behind_pair:
                steps += [ReaderStep(far_use, use.node) for far_use in behind_pair]
            else:
                steps.append(ReaderStep(use, None))
        return steps

    def only_reader_step(self, tensor: Tensor) -> ReaderStep | None:
        """Return the only reader of a tensor; None if there are several, or if the tensor is an output of the graph."""
        steps = [] if tensor in self.outputs else self.reader_steps(tensor)
        return steps[0] if len(steps) == 1 else None

    # -- what TensorRT fuses -------------------------------------------------------------------------------------------

    def is_linear(self, use: OperandUse) -> bool:
        """Whether a use is a batch norm or arithmetic with a constant, which compilers fold into the kernel before."""
        node = use.node
        if node.op_type == "BatchNormalization":
            return use.operand_index == 0
        other_operands = [tensor for index, tensor in enumerate(node.inputs) if index != use.operand_index]
        return node.op_type in _LINEAR and all(map(self.is_constant, other_operands))

    def epilogue(self, node: Node) -> Iterator[ReaderStep]:
        """Yield what TensorRT fuses after a weighted operation, looking through Q/DQ pairs.

        This is any number of linear operations, then an activation, then a max pool.
        """
        tensor, has_activation = get_result(node), False
        while (step := self.only_reader_step(tensor)) is not None:
            use = step.use
            is_activation = use.node.op_type in ACTIVATIONS and use.operand_index == 0
            if use.node.op_type == "MaxPool":
                yield step
                return
            if has_activation or not (self.is_linear(use) or is_activation):
                return
            yield step
            tensor, has_activation = get_result(use.node), is_activation and not self.is_linear(use)

    def convolution(self, tensor: Tensor, *, has_one_reader: bool = True) -> Node | None:
        """Return the convolution whose kernel computes a tensor, with linear operations folded in; None if none does.

        Args:
            tensor: The tensor.
            has_one_reader: Whether the tensors in between may have only one reader, so that the fusion is possible.
        """
        while not has_one_reader or self.only_reader_step(tensor) is not None:
            node = self.producer(tensor)
            if node is None or node.op_type in CONVOLUTIONS:
                return node
            data_index = next((i for i, operand in enumerate(node.inputs) if not self.is_constant(operand)), 0)
            if not self.is_linear(OperandUse(node, data_index)):
                return None
            tensor = get_operand(node, data_index)
        return None

    # -- how operands are quantized ------------------------------------------------------------------------------------

    def is_quantized(self, node: Node) -> bool:
        """Whether the data of a weighted operation is dequantized."""
        return self.data_dequantizer(node) is not None

    def data_dequantizer(self, node: Node) -> Node | None:
        """Return the DQ of an operand that is not constant."""
        for tensor in node.inputs[:2]:
            dequantizer = None if self.is_constant(tensor) else self.dequantizer(tensor)
            if dequantizer is not None:
                return dequantizer
        return None

    def weight_index(self, node: Node) -> int | None:
        """Return which operand of a weighted operation is constant; None if both are data."""
        indices = (1, 0) if node.op_type == "MatMul" else (1,)
        return next((index for index in indices if self.is_constant(get_operand(node, index))), None)

    def quantized_dtype(self, node: Node) -> int:
        """Return the data type of the codes of a Q or DQ node, by ONNX's rules; 0 if it is unknown."""
        if node.op_type in DEQUANTIZE:
            return self.dtype(get_operand(node, 0)) or self._zero_point_dtype(node)
        return self._zero_point_dtype(node) or get_int_attribute(node, "output_dtype") or UINT8

    def _zero_point_dtype(self, node: Node) -> int:
        if "FP8" in node.op_type:
            return FP8
        if node.op_type == "TRT_FP4DynamicQuantize":
            return FP4
        return INT4 if "INT4" in node.op_type else self.dtype(get_operand(node, 2))

    def is_fp8(self, node: Node | None) -> bool:
        return node is not None and self.quantized_dtype(node) == FP8

    def scale(self, node: Node) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        """Return the scale of a Q or DQ node in float32; None if it is not stored in the file."""
        values = self.values(get_operand(node, 1))
        return None if values is None else values.astype(np.float32)

    def axis(self, node: Node, rank: int) -> int:
        axis = get_int_attribute(node, "axis", 1)
        return axis + rank if axis < 0 else axis

    def block_size(self, node: Node) -> int:
        return get_int_attribute(node, "block_size")

    def has_same_scale(self, left: Node, right: Node) -> bool:
        if get_operand(left, 1) == get_operand(right, 1):
            return True
        first, second = self.scale(left), self.scale(right)
        if first is None or second is None:
            return False
        return first.size == second.size and bool(np.array_equal(first.ravel(), second.ravel()))


def last_sizes(shape: TensorShape | None, count: int) -> TensorShape:
    """Return the last `count` sizes of a shape, with None for unknown and missing ones."""
    sizes = shape or ()
    return (None,) * (count - len(sizes)) + sizes[len(sizes) - min(count, len(sizes)) :]


def _read_constant(tensor: Tensor) -> ir.TensorProtocol | None:
    try:
        return None if tensor is None else ir.convenience.get_const_tensor(tensor)
    except (ValueError, TypeError, OverflowError):  # a Constant node without a value
        return None
