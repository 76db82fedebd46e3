"""Builds and runs the module of a graph in an ONNX file. The module has one child for each node.

    Graph --split fused nodes, fold constants--> plain nodes --rewrite--> joined nodes --build--> GraphModule

A node whose inputs are all constants is computed while the module is built. Each of the other nodes becomes a child: a
module of torch with the node's weights (nn.Conv2d, nn.Linear, ...), or an OperatorModule, which looks the operator up
in the table and computes it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError, ScalepointError
from scalepoint.onnx_reader.control_flow import BRANCHES, CONTROL_FLOW, If, Loop, Scan
from scalepoint.onnx_reader.fused import split
from scalepoint.onnx_reader.names import NameTable
from scalepoint.onnx_reader.operators import MIN_CONSTANTS, Layer, Node, find_operator
from scalepoint.onnx_reader.rewrites import rewrite
from scalepoint.onnx_reader.values import AnyValue, KnownArray, as_constant, as_number, as_tensor, known_from_tensor

Constants = Mapping[str, Any]  # name -> Tensor, KnownArray or list of them
# A constant with more numbers than this stays a tensor, even for `Operator.known_inputs`.
MAX_KNOWN_INTEGERS = 4096
MAX_KNOWN_FLOATS = 64
_KEEPS_WEIGHT = frozenset(  # operators whose result is still the same weight, in another type or shape
    ("Identity", "Transpose", "TransposeLast", "Cast", "Reshape", "Squeeze", "Unsqueeze", "DequantizeLinear")
)


@dataclass(frozen=True)
class Graph:
    """A graph as plain values.

    Attributes:
        name: Its name in the file.
        nodes: Its nodes in the order of the file; bodies of If, Loop and Scan are Graphs in their attributes.
        inputs: Names of the inputs, without those that have a constant value.
        outputs: Names of the outputs.
        constants: Tensors by name.
        parameters: Names of the constants that are initializers of the file. Those of a float type are weights.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stored:
    """An argument of a step: the parameter or buffer of the GraphModule with this name."""

    name: str


@dataclass(frozen=True)
class Step:
    """One call of a child module.

    Attributes:
        module: Path of the child.
        arguments: For each argument the name of a value, a Stored, a KnownArray, or None for an omitted input.
        outputs: Names of the results.
        last_reads: Names of values that no later step reads. They are released after this step.
    """

    module: str
    arguments: tuple[Any, ...]
    outputs: tuple[str, ...]
    last_reads: tuple[str, ...] = ()


class OperatorModule(nn.Module):
    """Computes one node with its operator in the table."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node

    def forward(self, *inputs: AnyValue) -> Any:
        return find_operator(self.node)(self.node, *inputs)

    def extra_repr(self) -> str:
        settings = [f"{name}={value}" for name, value in self.node.attributes.items() if not isinstance(value, Tensor)]
        return ", ".join([self.node.operator, *settings])


class GraphModule(nn.Module):
    """Runs the steps of a graph. Its children are named after the nodes of the file."""

    def __init__(self, input_names: Sequence[str], output_names: Sequence[str]) -> None:
        super().__init__()
        self.graph_inputs = tuple(input_names)
        self.graph_outputs: tuple[Any, ...] = tuple(output_names)
        self.steps: list[Step] = []
        self.nodes: dict[str, Node] = {}  # path of a child -> its node

    def run(
        self,
        inputs: Sequence[AnyValue],
        outer: Mapping[str, AnyValue] | None = None,
        record: dict[str, AnyValue] | None = None,
    ) -> list[AnyValue]:
        """Run all steps.

        Args:
            inputs: Values of the graph's inputs.
            outer: Values of the graphs around a body, by name.
            record: Is filled with the results of all steps, by name.

        Returns:
            Values of the graph's outputs.
        """
        values: dict[str, AnyValue] = {**(outer or {}), **dict(zip(self.graph_inputs, inputs, strict=True))}
        for step in self.steps:
            self._run_step(step, values)
            if record is not None:
                record.update((name, values[name]) for name in step.outputs if name in values)
            for name in step.last_reads:
                values.pop(name, None)
        return [self._argument(output, values) for output in self.graph_outputs]

    def _run_step(self, step: Step, values: dict[str, AnyValue]) -> None:
        node = self.nodes[step.module]
        arguments = [self._argument(argument, values) for argument in step.arguments]
        module = self.get_submodule(step.module)
        try:
            if node.operator in CONTROL_FLOW:
                results = module(*arguments, outer=values)
            elif isinstance(module, OperatorModule):
                results = module(*arguments)
            else:  # a module of torch takes no KnownArrays
                results = module(*map(_to_tensor, arguments))
        except ScalepointError as error:
            if getattr(error, "node", None) is not None:
                raise  # it names a node in a body
            raise _with_node(type(error)(f"{node}: {error.args[0]}"), node) from error
        except Exception as error:  # torch raises exceptions of many types for inputs that do not fit
            raise _with_node(OnnxReadError(f"{node}: {type(error).__name__}: {_first_line(error)}"), node) from error
        results = results if isinstance(results, tuple) else (results,)
        values.update(zip(step.outputs, results, strict=False))

    def _argument(self, argument: Any, values: Mapping[str, AnyValue]) -> AnyValue:
        if isinstance(argument, Stored):
            is_parameter = argument.name in self._parameters
            return self.get_parameter(argument.name) if is_parameter else self.get_buffer(argument.name)
        if isinstance(argument, str) and argument not in values:
            raise OnnxReadError(f"no node computes the value {argument!r} before it is read")
        return values[argument] if isinstance(argument, str) else argument


def _with_node(error: ScalepointError, node: Node) -> ScalepointError:
    error.node = node  # type: ignore[attr-defined]  # tells the steps around a body that the error names its node
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _to_tensor(value: AnyValue) -> AnyValue:
    return as_tensor(value) if isinstance(value, KnownArray) else value


class ModuleBuilder:
    """Adds the children and steps of a Graph to a GraphModule.

    Args:
        graph: The graph.
        module: An empty GraphModule.
        outer: Constants of the graphs around a body.
    """

    def __init__(self, graph: Graph, module: GraphModule, outer: Constants | None = None) -> None:
        self.graph = replace(graph, constants={})  # they are in self.constants until the layers have them
        self.module = module
        self.constants: dict[str, Any] = {**(outer or {}), **graph.constants}
        self.weight_names: dict[str, str] = {name: name for name in graph.parameters}  # constant -> its weight
        self.names = NameTable(module)
        self._readers: Counter[int] = Counter()  # address of a tensor -> number of inputs that read it
        self._shared: dict[tuple[Any, ...], nn.Parameter] = {}  # address, shape, ... of a tensor -> its parameter
        self._alive: list[Tensor] = []
        self._stored: dict[str, Stored] = {}  # constant -> its parameter or buffer

    def build(self) -> GraphModule:
        """Compute constants, join nodes, and add a step for each of the nodes that the outputs depend on."""
        used_names = collect_names(self.graph).union(self.constants)
        nodes = self._fold(split(self.graph.nodes, used_names))
        nodes = self._fold(rewrite(nodes, self.constants))
        nodes = _without_unused(nodes, self.graph.outputs)
        self._count_readers(nodes)
        last_reader = {name: index for index, node in enumerate(nodes) for name in names_read(node)}
        last_reads: dict[int, list[str]] = {}  # index of a node -> values that no later node reads
        for name, index in last_reader.items():
            if name not in self.graph.outputs:
                last_reads.setdefault(index, []).append(name)
        for index, node in enumerate(nodes):
            names = last_reads.get(index, [])
            self._add_step(node, last_reads=tuple(names))
            for name in names:
                self.constants.pop(name, None)  # frees weights of large files: layers may have contiguous copies
        self.module.graph_outputs = tuple(
            self._constant_argument(name) if name in self.constants else name for name in self.graph.outputs
        )
        return self.module

    # --- constants ---

    def _fold(self, nodes: Sequence[Node]) -> list[Node]:
        """Compute nodes that read constants only; return the others."""
        remaining = []
        for node in nodes:
            if node.operator == "Constant":
                self.constants[node.outputs[0]] = constant_value(node)
            elif not self._fold_node(node):
                remaining.append(node)
        return remaining

    def _fold_node(self, node: Node) -> bool:
        """Compute a node that reads constants only, and return whether that was possible.

        A node that fails stays in the graph: it may be in a branch that is never chosen.
        """
        reads_constants = all(name in self.constants for name in names_read(node))
        if not reads_constants or node.operator in CONTROL_FLOW or node.operator.startswith("Sequence"):
            return False
        values = [self.constants[name] if name else None for name in node.inputs]
        try:
            operator = find_operator(node)
            inputs = []
            for index, value in enumerate(values):
                if isinstance(value, Tensor) and index in operator.known_inputs:
                    inputs.append(known_from_tensor(value))
                else:
                    inputs.append(_known_if_small(value))
            with torch.no_grad():
                results = operator(node, *inputs)
        except Exception:  # the step that runs the node explains what is wrong
            return False
        results = results if isinstance(results, tuple) else (results,)
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                self.constants[name] = result
                self._inherit_weight_name(node, name)
        return True

    def _inherit_weight_name(self, node: Node, output: str) -> None:
        """Give a transposed or converted weight the name of the weight."""
        sources = [name for name in node.inputs if name in self.weight_names]
        if sources and node.operator in _KEEPS_WEIGHT:
            self.weight_names[output] = self.weight_names[sources[0]]

    def _constant_tensor(self, name: str) -> Tensor | None:
        """Return a constant as a tensor; None for an omitted input or a value that is not constant."""
        value = self.constants.get(name) if name else None
        if value is None or isinstance(value, Tensor):
            return value
        return as_tensor(value)

    # --- steps ---

    def _count_readers(self, nodes: Sequence[Node]) -> None:
        """Count how many inputs of nodes are the tensor at each address."""
        constants = (self.constants.get(name) for node in nodes for name in node.inputs)
        self._readers = Counter(value.data_ptr() for value in constants if isinstance(value, Tensor))

    def _add_step(self, node: Node, last_reads: tuple[str, ...]) -> None:
        """Add a child for a node, and the step that calls it."""
        layer = self._make_layer(node)
        weights: list[str] = []
        if layer is None:
            arguments = [self._argument(node, index, name) for index, name in enumerate(node.inputs)]
            child = self._make_child(node)
        else:
            child = layer.module
            names = [node.inputs[i] if i < len(node.inputs) else "" for i in layer.data_inputs]
            arguments = [self._argument(node, None, name) for name in names]
            while arguments and arguments[-1] is None:
                arguments.pop()
            weights = [self.weight_names[name] for name in node.inputs if name in self.weight_names]
        name = f"{node.module_path}/{node.operator}" if node.module_path else node.name or node.outputs[0]
        path = self.names.add_child(child, name, weights)
        self.module.nodes[path] = node
        self.module.steps.append(Step(path, tuple(arguments), node.outputs, last_reads))

    def _make_layer(self, node: Node) -> Layer | None:
        """Make a module of torch with the weights of a node, or return None if there is none for the node."""
        operator = None if node.operator in CONTROL_FLOW else find_operator(node)
        if operator is None or operator.make_layer is None:
            return None
        constants = [self._constant_tensor(name) for name in node.inputs]
        try:
            layer = operator.make_layer(node, [*constants, *[None] * (MIN_CONSTANTS - len(constants))])
        except ScalepointError as error:
            raise type(error)(f"{node}: {error.args[0]}") from error
        except Exception as error:  # weights of shapes that do not fit
            raise OnnxReadError(f"{node}: {type(error).__name__}: {_first_line(error)}") from error
        if layer is not None:
            self._share_parameters(layer.module)
            layer.module.eval()
        return layer

    def _share_parameters(self, root: nn.Module) -> None:
        """Use one parameter for a weight that several nodes read, and make all parameters contiguous.

        safetensors, for example, stores contiguous tensors only.
        """
        for module in root.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = self._parameter(value)

    def _parameter(self, value: nn.Parameter) -> nn.Parameter:
        """Return a contiguous parameter; the same one for each node that reads this tensor."""
        if self._readers[value.data_ptr()] < 2:
            return _contiguous(value)
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self._shared:
            self._shared[key] = _contiguous(value)
            self._alive.append(value)  # another tensor at the same address would have the same key
        return self._shared[key]

    def _make_child(self, node: Node) -> nn.Module:
        """Make the module of a node that is no layer."""
        if node.operator == "If":
            return self._make_if(node)
        if node.operator in CONTROL_FLOW:
            body: Any = self._build_body(node, "body")
            return Loop(node, body) if node.operator == "Loop" else Scan(node, body)
        find_operator(node)  # raises if there is none
        return OperatorModule(node)

    def _build_body(self, node: Node, attribute: str) -> GraphModule:
        graph = node.get(attribute)
        if not isinstance(graph, Graph):
            raise OnnxReadError(f"{node}: its attribute {attribute} is missing")
        return ModuleBuilder(graph, GraphModule(graph.inputs, graph.outputs), self.constants).build()

    def _make_if(self, node: Node) -> nn.Module:
        """Build both branches, or the one that a constant chooses."""
        if not node.inputs:
            raise OnnxReadError(f"{node}: its condition is missing")
        condition = self.constants.get(node.inputs[0])
        choices = (True, False) if condition is None else (bool(as_number(condition)),)
        branches: dict[bool, nn.Module] = {}
        errors: dict[bool, str] = {}
        for choice in choices:
            try:
                branches[choice] = self._build_body(node, BRANCHES[choice])
            except OnnxReadError as error:
                if len(choices) == 1:
                    raise
                errors[choice] = error.args[0]
        return If(branches, errors)

    def _argument(self, node: Node, index: int | None, name: str) -> Any:
        """Return the argument of a step: see Step. `index` is the position among the inputs; None for a layer."""
        if not name:
            return None
        if name not in self.constants:
            return name
        value = self.constants[name]
        if index is not None and node.operator not in CONTROL_FLOW and isinstance(value, Tensor):
            max_numbers = MAX_KNOWN_FLOATS if value.is_floating_point() else MAX_KNOWN_INTEGERS
            if index in find_operator(node).known_inputs and value.numel() <= max_numbers:
                return known_from_tensor(value)
        return self._constant_argument(name)

    def _constant_argument(self, name: str) -> Any:
        """Return a small constant as a KnownArray, and register a large one with the module."""
        value = _known_if_small(self.constants[name])
        if not isinstance(value, Tensor):
            return value
        if name not in self._stored:
            self._stored[name] = Stored(self.names.add_tensor(value, name, is_weight=name in self.weight_names))
        return self._stored[name]


def _contiguous(value: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous(), requires_grad=value.requires_grad)


def _known_if_small(value: Any) -> Any:
    return as_constant(value) if isinstance(value, Tensor) else value


def constant_value(node: Node) -> Tensor:
    """Return the value of a Constant node."""
    attributes = node.attributes
    if "value" in attributes:
        value: Tensor = attributes["value"]
        return value
    for name in ("value_float", "value_floats"):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=torch.float32)
    for name in ("value_int", "value_ints"):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=torch.int64)
    raise OnnxReadError(f"{node}: a constant of {', '.join(attributes) or 'nothing'} is not supported")


def names_read(node: Node) -> list[str]:
    """Return the names of the values that a node and its bodies read."""
    names = [name for name in node.inputs if name]
    for value in node.attributes.values():
        if isinstance(value, Graph):
            defined = {*value.inputs, *value.constants, *(name for inner in value.nodes for name in inner.outputs)}
            inner_names = [name for inner in value.nodes for name in names_read(inner)]
            names += [name for name in (*inner_names, *value.outputs) if name not in defined]
    return names


def collect_names(graph: Graph) -> set[str]:
    """Return the names of all values in a graph and in its bodies."""
    names = {*graph.inputs, *graph.outputs, *graph.constants}
    for node in graph.nodes:
        names.update(node.inputs, node.outputs)
        for value in node.attributes.values():
            if isinstance(value, Graph):
                names |= collect_names(value)
    return names


def _without_unused(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """Return the nodes that the outputs depend on."""
    needed = set(outputs)
    used = []
    for node in reversed(nodes):
        if needed.intersection(filter(None, node.outputs)):
            needed.update(names_read(node))
            used.append(node)
    return used[::-1]
