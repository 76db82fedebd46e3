"""The table of operators: one row says how a node of an ONNX file is computed in torch.

    @operator("Concat", on_numbers=_concat_numbers)
    def concat(node, *tensors): return torch.cat(tensors, node.get("axis"))

    add_operator("Elu", lambda node, x: F.elu(x, node.get("alpha", 1.0)))

The modules of this package that are named after a topic (elementwise, shapes, layers, ...) fill the table. What an
operator computes is described in the ONNX specification, so most of these functions have no docstring.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.values import AnyValue, KnownArray, Value, as_tensor

RunFunction = Callable[..., Any]  # run(node, *inputs) -> a value, or a tuple of values
# Operators without a seed would give other numbers in each runtime.
RANDOM_OPERATORS = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
)


@dataclass(frozen=True)
class Node:
    """A node of the file, as plain values.

    Attributes:
        operator: Name of the operator; with its domain if that is not ONNX's own, as in "com.microsoft::Attention".
        name: Name of the node in the file.
        inputs: Names of its inputs, "" for omitted ones.
        outputs: Names of its outputs, "" for unused ones.
        attributes: Plain values; tensors as torch tensors.
        opset: Version of the operator set of its domain.
        module_path: Path of its module in the model that was exported, if the file says it.
    """

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 18
    module_path: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def has_output(self, index: int) -> bool:
        return len(self.outputs) > index and bool(self.outputs[index])

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.operator})"


@dataclass(frozen=True)
class Layer:
    """A torch module with the weights of a node, and the inputs that it is called with.

    Attributes:
        module: Called with the inputs at `data_inputs`.
        data_inputs: Positions of the inputs that are not weights.
    """

    module: nn.Module
    data_inputs: tuple[int, ...] = (0,)


# make_layer(node, constants) -> Layer, or None if this node needs `run`. A constant is None if the input is omitted or
# computed. The list is filled up with None, so that make_layer need not check its length.
MIN_CONSTANTS = 8
MakeLayer = Callable[[Node, Sequence[Tensor | None]], Layer | None]


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        name: As `Node.operator`.
        run: Computes the node on tensors.
        on_numbers: Computes the node if all inputs are KnownArrays. If it returns NotImplemented, `run` computes the
            node on tensors.
        known_inputs: Positions of inputs that `run` takes as KnownArrays: shapes, axes, limits.
        takes_numbers: Whether `run` gets a KnownArray of one number as a Python number instead of a tensor.
        make_layer: Makes a module with the weights of a node; None for an operator that has no such module.
    """

    name: str
    run: RunFunction
    on_numbers: RunFunction | None = None
    known_inputs: tuple[int, ...] = ()
    takes_numbers: bool = False
    make_layer: MakeLayer | None = None

    def __call__(self, node: Node, *inputs: AnyValue) -> Any:
        values = [value for value in inputs if value is not None]
        if self.on_numbers is not None and values and all(isinstance(value, KnownArray) for value in values):
            result = self.on_numbers(node, *inputs)
            if result is not NotImplemented:
                return result
        like = next((value for value in values if isinstance(value, Tensor)), None)
        return self.run(node, *(self._prepare(index, value, like) for index, value in enumerate(inputs)))

    def _prepare(self, index: int, value: AnyValue, like: Tensor | None) -> Any:
        """Convert an input to what `run` takes. A new tensor is on the device of `like`."""
        if not isinstance(value, KnownArray) or index in self.known_inputs:
            return value
        if self.takes_numbers and like is not None and value.numbers.size == 1 and value.ndim <= like.ndim:
            return value.to_list()[0]
        return as_tensor(value, like)


OPERATORS: dict[str, Operator] = {}


def add_operator(name: str, run: RunFunction, **columns: Any) -> None:
    """Add a row to the table. `columns` are other attributes of `Operator`, such as `on_numbers`."""
    OPERATORS[name] = Operator(name, run, **columns)


def operator(*names: str, **columns: Any) -> Callable[[RunFunction], RunFunction]:
    """Decorator that adds a function to the table under each of the names.

    Args:
        names: Names of operators.
        columns: Other attributes of `Operator`, such as `on_numbers`.
    """

    def add(run: RunFunction) -> RunFunction:
        for name in names:
            add_operator(name, run, **columns)
        return run

    return add


def find_operator(node: Node) -> Operator:
    """Return the row of the table for a node; raise OnnxReadError if there is none."""
    if node.operator in OPERATORS:
        return OPERATORS[node.operator]
    reason = "draws random numbers" if node.operator in RANDOM_OPERATORS else "is not supported"
    raise OnnxReadError(f"{node}: the operator {node.operator} {reason}")


def require(condition: bool, text: str) -> None:
    """Raise OnnxReadError unless the condition holds. The text names what is not supported."""
    if not condition:
        raise OnnxReadError(f"{text} is not supported")


def outputs_of(node: Node, *values: Value | None) -> Any:
    """Return the values of the outputs that the node has: one value, or a tuple."""
    return values[0] if len(node.outputs) == 1 else values[: len(node.outputs)]
