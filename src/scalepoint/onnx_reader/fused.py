"""Splits the fused operators of ONNX Runtime (domain com.microsoft) into the operators of ONNX that they consist of.

    FusedConv(x, w, b, z), activation=Relu    ->    Relu(Add(Conv(x, w, b), z))
    SkipLayerNormalization(x, y, w, b)        ->    LayerNormalization(Add(x, y), w, b)

Layers in a file that ONNX Runtime optimized are then found like those of any other file. `ModuleBuilder` calls `split`
first; attention of this domain is not split: see `attention.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scalepoint.errors import OnnxReadError, short_repr
from scalepoint.onnx_reader.operators import Node, require

SPLIT_OPSET = 24  # of the new nodes: operators have their newest meaning
_ATTRIBUTE_TYPES: Mapping[str, tuple[type, ...]] = {
    "activation": (str,),
    "activation_params": (list,),
    "alpha": (int, float),
    "epsilon": (int, float),
}
# Activations of FusedConv and FusedGemm, and the names of their numbers in `activation_params`.
_ACTIVATIONS = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}


class Parts:
    """Collects the nodes into which one node is split.

    Args:
        node: The node. The new nodes have its name, followed by their operator.
        used_names: Names of values that are in use. The names of new values are added.
    """

    def __init__(self, node: Node, used_names: set[str]) -> None:
        self.node = node
        self.used_names = used_names
        self.nodes: list[Node] = []

    def input(self, index: int) -> str:
        """Return the name of an input, or "" if it is omitted."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: object) -> str:
        """Add a node and return the name of its output."""
        output = output or self._new_name(f"{self.node.outputs[0]}_{operator}_{len(self.nodes)}")
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        name = f"{self.node.name}/{operator}"
        self.nodes.append(Node(operator, name, inputs, (output,), attributes, SPLIT_OPSET, self.node.module_path))
        return output

    def _new_name(self, name: str) -> str:
        while name in self.used_names:
            name += "_"
        self.used_names.add(name)
        return name

    def add_number(self, number: float) -> str:
        return self.add("Constant", value_float=number)

    def finish(self) -> list[Node]:
        """Return the nodes. The last one computes the first output of the node that is split."""
        self.nodes[-1] = replace(self.nodes[-1], outputs=self.node.outputs[:1])
        return self.nodes


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator.

    Attributes:
        split: Adds the nodes of which a node of this operator consists.
        required_inputs: Names of its inputs in the schema of ONNX Runtime; "" for one that can be omitted.
    """

    split: Callable[[Parts], object]
    required_inputs: tuple[str, ...]


def split(nodes: Sequence[Node], used_names: set[str]) -> list[Node]:
    """Replace fused nodes by the nodes that they consist of.

    Args:
        nodes: The nodes of a graph.
        used_names: Names of values that are in use. The names of new values are added.

    Returns:
        The nodes of the graph without fused ones.

    Raises:
        OnnxReadError: A fused node lacks an input, or has a setting that is not supported.
    """
    result: list[Node] = []
    for node in nodes:
        fused = _FUSED_OPERATORS.get(node.operator)
        if fused is None or not node.outputs:
            result.append(node)
            continue
        _check_fused(node, fused)
        parts = Parts(node, used_names)
        fused.split(parts)
        result += parts.finish()
    return result


def _check_fused(node: Node, fused: FusedOperator) -> None:
    """Raise OnnxReadError if a required input is missing, or an attribute has a value of another type."""
    for index, name in enumerate(fused.required_inputs):
        if name and not any(node.inputs[index : index + 1]):
            raise OnnxReadError(f"{node}: its input {index} ({name}) is missing")
    for name, types in _ATTRIBUTE_TYPES.items():
        if name in node.attributes and not isinstance(node.get(name), types):
            raise OnnxReadError(f"{node}: its attribute {name} has the wrong type: {short_repr(node.get(name))}")


def _activate(parts: Parts, x: str) -> None:
    name, numbers = parts.node.get("activation", ""), parts.node.get("activation_params", ())
    if not name:
        return
    is_known = name in _ACTIVATIONS and len(_ACTIVATIONS[name]) == len(numbers)
    require(is_known, f"{parts.node}: the activation {name} with {len(numbers)} numbers")
    attributes = dict(zip(_ACTIVATIONS[name], numbers, strict=True))
    parts.add(name, x, **attributes)
    if name == "Clip":
        parts.nodes[-1] = replace(parts.nodes[-1], opset=6)  # where limits are attributes


def _split_conv(parts: Parts) -> None:
    y = parts.add("Conv", *map(parts.input, range(3)), **parts.node.attributes)
    if parts.input(3):
        y = parts.add("Add", y, parts.input(3))
    _activate(parts, y)


def _split_gemm(parts: Parts) -> None:
    _activate(parts, parts.add("Gemm", *parts.node.inputs, **parts.node.attributes))


def _split_matmul(parts: Parts) -> None:
    node, x, y = parts.node, parts.input(0), parts.input(1)
    require(not node.get("transBatchA", 0) and not node.get("transBatchB", 0), f"{node}: transBatchA or transBatchB")
    x = parts.add("TransposeLast", x) if node.get("transA", 0) else x
    y = parts.add("TransposeLast", y) if node.get("transB", 0) else y
    product = parts.add("MatMul", x, y)
    if node.get("alpha", 1.0) != 1:
        number = parts.add_number(node.get("alpha"))
        parts.add("Mul", product, number)


def _split_gelu(parts: Parts, approximate: str) -> None:
    x = parts.add("Add", *parts.node.inputs) if parts.input(1) else parts.input(0)
    parts.add("Gelu", x, approximate=approximate)


def _split_skip_norm(parts: Parts, operator: str, weight_count: int) -> None:
    """Split the norm of a sum. The inputs are both summands, the weights of the norm, and the bias of the sum."""
    total, weights, bias = parts.add("Add", *parts.node.inputs[:2]), range(2, 2 + weight_count), 2 + weight_count
    if parts.input(bias):
        total = parts.add("Add", total, parts.input(bias))
    if parts.node.has_output(3):
        parts.add("Identity", total, output=parts.node.outputs[3])
    parts.add(operator, total, *map(parts.input, weights), axis=-1, epsilon=parts.node.get("epsilon", 1e-12))


def _split_embeddings(parts: Parts) -> None:
    """Split the norm of the sum of embeddings of words, positions and segments."""
    words, segments, word_table, position_table, segment_table, weight, shift, mask, positions = map(
        parts.input, range(9)
    )
    if not positions:
        limits = [parts.add("Constant", value_int=number) for number in (0, 1)]
        count = parts.add("Squeeze", parts.add("Shape", words, start=1, end=2))
        row = parts.add("Range", limits[0], count, limits[1])
        positions = parts.add("Unsqueeze", row, parts.add("Constant", value_ints=[0]))
    total = parts.add("Add", parts.add("Gather", word_table, words), parts.add("Gather", position_table, positions))
    if segments and segment_table:
        total = parts.add("Add", total, parts.add("Gather", segment_table, segments))
    if parts.node.has_output(1):
        require(bool(mask), f"{parts.node}: the output of token counts without a mask")
        counts = parts.add("ReduceSum", mask, parts.add("Constant", value_ints=[1]), keepdims=0)
        parts.add("Cast", counts, output=parts.node.outputs[1], to=6)  # int32
    if parts.node.has_output(2):
        parts.add("Identity", total, output=parts.node.outputs[2])
    parts.add("LayerNormalization", total, weight, shift, axis=-1, epsilon=parts.node.get("epsilon", 1e-12))


_FUSED_OPERATORS: Mapping[str, FusedOperator] = {
    "com.microsoft::FusedConv": FusedOperator(_split_conv, ("X", "W")),
    "com.microsoft::FusedGemm": FusedOperator(_split_gemm, ("A", "B")),
    "com.microsoft::FusedMatMul": FusedOperator(_split_matmul, ("A", "B")),
    "com.microsoft::BiasGelu": FusedOperator(lambda parts: _split_gelu(parts, "none"), ("A", "B")),
    "com.microsoft::FastGelu": FusedOperator(lambda parts: _split_gelu(parts, "tanh"), ("X",)),
    "com.microsoft::QuickGelu": FusedOperator(
        lambda parts: parts.add("Swish", parts.input(0), alpha=parts.node.get("alpha", 1.702)), ("X",)
    ),
    "com.microsoft::SkipLayerNormalization": FusedOperator(
        lambda parts: _split_skip_norm(parts, "LayerNormalization", 2), ("input", "skip", "gamma")
    ),
    "com.microsoft::SkipSimplifiedLayerNormalization": FusedOperator(
        lambda parts: _split_skip_norm(parts, "RMSNormalization", 1), ("input", "skip", "gamma")
    ),
    "com.microsoft::EmbedLayerNormalization": FusedOperator(
        _split_embeddings, ("input_ids", "", "word_embedding", "position_embedding", "", "gamma", "beta")
    ),
}
