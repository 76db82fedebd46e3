"""Executes a graph of an ONNX file: a module with one child for each node.

    file --read--> Nodes and constants --fold--> fewer nodes --rewrite--> known spellings --build--> GraphModule

Nodes whose inputs are constants are computed while the file is read. The other nodes become children: a module of torch
with the node's weights (nn.Conv2d, nn.Linear, ...), or an OperatorModule that computes its row of the table.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError, ScalepointError
from scalepoint.onnx_reader.control_flow import BRANCHES, CONTROL_FLOW, If, Loop, Scan
from scalepoint.onnx_reader.names import NameTable
from scalepoint.onnx_reader.operators import Layer, Node, find_operator
from scalepoint.onnx_reader.rewrites import rewrite
from scalepoint.onnx_reader.values import AnyValue, KnownArray, as_constant, as_number, as_tensor, known_from_tensor

Constants = Mapping[str, Any]  # name -> Tensor, KnownArray or list of them


@dataclass(frozen=True)
class Graph:
    """A graph as plain values.

    Attributes:
        name: Its name in the file.
        nodes: Its nodes in the order of the file; bodies of If, Loop and Scan are Graphs in their attributes.
        inputs: Names of the inputs, without those that have a constant value.
        outputs: Names of the outputs.
        constants: Tensors by name.
        parameters: Names of the constants that are initializers: weights, if they are numbers with a fraction.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stored:
    """An argument of a step that is a parameter or buffer of the graph's module."""

    name: str


@dataclass(frozen=True)
class Step:
    """One call of a child module.

    Attributes:
        module: Path of the child.
        arguments: For each argument the name of a value, a Stored, a KnownArray, or None for an omitted input.
        outputs: Names of the results.
        frees: Names of values that no later step reads.
    """

    module: str
    arguments: tuple[Any, ...]
    outputs: tuple[str, ...]
    frees: tuple[str, ...] = ()


class OperatorModule(nn.Module):
    """Computes one node by its row in the table of operators."""

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
            record: Filled with the results of all steps, by name.
        """
        values: dict[str, AnyValue] = {**(outer or {}), **dict(zip(self.graph_inputs, inputs, strict=True))}
        for step in self.steps:
            self._run_step(step, values)
            if record is not None:
                record.update((name, values[name]) for name in step.outputs if name in values)
            for name in step.frees:
                values.pop(name, None)
        return [self._argument(output, values) for output in self.graph_outputs]

    def _run_step(self, step: Step, values: dict[str, AnyValue]) -> None:
        node = self.nodes[step.module]
        arguments = [self._argument(argument, values) for argument in step.arguments]
        module = self.get_submodule(step.module)
        try:
            if node.operator in CONTROL_FLOW:
                results = module(*arguments, outer=values)
            else:
                results = module(*(arguments if isinstance(module, OperatorModule) else map(_to_tensor, arguments)))
        except ScalepointError as error:
            if getattr(error, "node", None) is not None:
                raise
            raise _with_node(type(error)(f"{node}: {error.args[0]}"), node) from error
        except Exception as error:  # torch raises many kinds for inputs that do not fit
            raise _with_node(OnnxReadError(f"{node}: {type(error).__name__}: {_first_line(error)}"), node) from error
        results = results if isinstance(results, tuple) else (results,)
        values.update(zip(step.outputs, results, strict=False))

    def _argument(self, argument: Any, values: Mapping[str, AnyValue]) -> AnyValue:
        if isinstance(argument, Stored):
            return (
                self.get_parameter(argument.name)
                if argument.name in self._parameters
                else self.get_buffer(argument.name)
            )
        if isinstance(argument, str) and argument not in values:
            raise OnnxReadError(f"no node computes the value {argument!r} before it is read")
        return values[argument] if isinstance(argument, str) else argument


def _with_node(error: ScalepointError, node: Node) -> ScalepointError:
    error.node = node  # type: ignore[attr-defined]  # so that the graphs around a body do not add theirs
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _to_tensor(value: AnyValue) -> AnyValue:
    return as_tensor(value) if isinstance(value, KnownArray) else value


class ModuleBuilder:
    """Makes a GraphModule of a Graph.

    Args:
        graph: The graph.
        module: The module to fill.
        outer: Constants of the graphs around a body.
        names: The names in use; bodies have a table of their own.
    """

    def __init__(self, graph: Graph, module: GraphModule, outer: Constants | None = None) -> None:
        self.graph = replace(graph, constants={})  # they are in self.constants until the layers have them
        self.module = module
        self.outer = dict(outer or {})
        self.constants: dict[str, Any] = {**self.outer, **graph.constants}
        self.weight_names: dict[str, str] = {name: name for name in graph.parameters}
        self.names = NameTable(module)
        self._readers: Counter[int] = Counter()
        self._shared: dict[tuple[Any, ...], nn.Parameter] = {}
        self._alive: list[Tensor] = []
        self._stored: dict[str, Stored] = {}

    def build(self) -> GraphModule:
        nodes = self._fold(self.graph.nodes)
        nodes = self._fold(rewrite(nodes, self.constants))
        nodes = _without_unused(nodes, self.graph.outputs)
        self._count_readers(nodes)
        last_reader = {name: index for index, node in enumerate(nodes) for name in names_read(node)}
        read_last: dict[int, list[str]] = {}
        for name, index in last_reader.items():
            if name not in self.graph.outputs:
                read_last.setdefault(index, []).append(name)
        for index, node in enumerate(nodes):
            frees = read_last.get(index, [])
            self._add_step(node, tuple(frees))
            for name in frees:
                self.constants.pop(name, None)  # the weights of large files: the layers have copies in their own order
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
        """Compute a node if it reads constants only. Nodes that fail are kept: they may never run."""
        reads_constants = all(name in self.constants for name in names_read(node))
        if not reads_constants or node.operator in CONTROL_FLOW or node.operator.startswith("Sequence"):
            return False
        values = [self.constants[name] if name else None for name in node.inputs]
        try:
            row = find_operator(node)
            inputs = [
                known_from_tensor(value) if isinstance(value, Tensor) and index in row.known_inputs else _small(value)
                for index, value in enumerate(values)
            ]
            with torch.no_grad():
                results = row(node, *inputs)
        except Exception:  # the step that runs the node explains what is wrong
            return False
        results = results if isinstance(results, tuple) else (results,)
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                self.constants[name] = result
                self._inherit_weight_name(node, name)
        return True

    def _inherit_weight_name(self, node: Node, output: str) -> None:
        """A transposed or converted weight is still that weight."""
        sources = [name for name in node.inputs if name in self.weight_names]
        if sources and node.operator in (
            "Identity",
            "Transpose",
            "Cast",
            "Reshape",
            "Squeeze",
            "Unsqueeze",
            "DequantizeLinear",
        ):
            self.weight_names[output] = self.weight_names[sources[0]]

    def _constant_tensor(self, name: str) -> Tensor | None:
        value = self.constants.get(name) if name else None
        if value is None or isinstance(value, Tensor):
            return value
        return as_tensor(value)

    # --- steps ---

    def _count_readers(self, nodes: Sequence[Node]) -> None:
        """Count the inputs of nodes that lie at each address."""
        constants = (self.constants.get(name) for node in nodes for name in node.inputs)
        self._readers = Counter(value.data_ptr() for value in constants if isinstance(value, Tensor))

    def _add_step(self, node: Node, frees: tuple[str, ...]) -> None:
        layer = self._make_layer(node)
        weights: list[str] = []
        if layer is None:
            arguments = [self._argument(node, index, name) for index, name in enumerate(node.inputs)]
            child = self._make_child(node)
        else:
            child = layer.module
            inputs = [node.inputs[i] if i < len(node.inputs) else "" for i in layer.data_inputs]
            arguments = [self._argument(node, None, name) for name in inputs]
            while arguments and arguments[-1] is None:
                arguments.pop()
            weights = [self.weight_names[name] for name in node.inputs if name in self.weight_names]
        name = f"{node.module_path}/{node.operator}" if node.module_path else node.name or node.outputs[0]
        path = self.names.add_child(child, name, weights)
        self.module.nodes[path] = node
        self.module.steps.append(Step(path, tuple(arguments), node.outputs, frees))

    def _make_layer(self, node: Node) -> Layer | None:
        row = None if node.operator in CONTROL_FLOW else find_operator(node)
        if row is None or row.make_layer is None:
            return None
        constants = [self._constant_tensor(name) for name in node.inputs]
        try:
            layer = row.make_layer(node, [*constants, *[None] * (8 - len(constants))])
        except ScalepointError as error:
            raise type(error)(f"{node}: {error.args[0]}") from error
        except Exception as error:  # weights of shapes that do not fit
            raise OnnxReadError(f"{node}: {type(error).__name__}: {_first_line(error)}") from error
        if layer is not None:
            self._share_parameters(layer.module)
            layer.module.eval()
        return layer

    def _share_parameters(self, root: nn.Module) -> None:
        """Use one parameter for weights that two nodes read; make all of them contiguous, as for a state_dict."""
        for module in root.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = self._parameter(value)

    def _parameter(self, value: nn.Parameter) -> nn.Parameter:
        if self._readers[value.data_ptr()] < 2:
            return _contiguous(value)
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self._shared:
            self._shared[key] = _contiguous(value)
            self._alive.append(value)  # so that no other tensor gets the same address
        return self._shared[key]

    def _make_child(self, node: Node) -> nn.Module:
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
        if not name:
            return None
        if name not in self.constants:
            return name
        value = self.constants[name]
        if index is not None and node.operator not in CONTROL_FLOW and isinstance(value, Tensor):
            if index in find_operator(node).known_inputs and not value.is_floating_point() and value.numel() <= 4096:
                return known_from_tensor(value)
            if index in find_operator(node).known_inputs and value.numel() <= 64:
                return known_from_tensor(value)
        return self._constant_argument(name)

    def _constant_argument(self, name: str) -> Any:
        """Return a small constant as it is, and register a large one with the module."""
        value = _small(self.constants[name])
        if not isinstance(value, Tensor):
            return value
        if name not in self._stored:
            self._stored[name] = Stored(self.names.add_tensor(value, name, is_weight=name in self.weight_names))
        return self._stored[name]


def _contiguous(value: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous(), requires_grad=value.requires_grad)


def _small(value: Any) -> Any:
    return as_constant(value) if isinstance(value, Tensor) else value


def constant_value(node: Node) -> Tensor:
    """Return the value of a Constant node."""
    attributes = node.attributes
    if "value" in attributes:
        value: Tensor = attributes["value"]
        return value
    for name, dtype in (("value_float", torch.float32), ("value_floats", torch.float32)):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=dtype)
    for name in ("value_int", "value_ints"):
        if name in attributes:
            return torch.tensor(attributes[name], dtype=torch.int64)
    raise OnnxReadError(f"{node}: a constant of {', '.join(attributes) or 'nothing'} is not supported")


def names_read(node: Node) -> list[str]:
    """Return the values that a node reads, also in its bodies."""
    names = [name for name in node.inputs if name]
    for value in node.attributes.values():
        if isinstance(value, Graph):
            defined = {*value.inputs, *value.constants, *(name for inner in value.nodes for name in inner.outputs)}
            inner_names = [name for inner in value.nodes for name in names_read(inner)]
            names += [name for name in (*inner_names, *value.outputs) if name not in defined]
    return names


def _without_unused(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    needed = set(outputs)
    used = []
    for node in reversed(nodes):
        if needed.intersection(filter(None, node.outputs)):
            needed.update(names_read(node))
            used.append(node)
    return used[::-1]
