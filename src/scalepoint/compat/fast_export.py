"""Makes an ExportedProgram from a captured graph in one run over fake tensors, without torch.export.

    captured graph --run on fake tensors, record each operation--> flat aten graph --add a signature--> ExportedProgram

The graph was captured already, so its operations and its dynamic axes are known: no guards, no functionalization and no
second trace for decompositions are needed. A graph that cannot be recorded (branches, writes in place, sizes that
depend on values) raises an error, and the caller uses torch.export instead.
"""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ArgumentSpec,
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import _pytree as fx_pytree
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_concrete_int
from torch.fx.graph import PythonCode

from scalepoint.compat.recurrent_shapes import any_length_recurrent_shapes
from scalepoint.compat.shape_cache import ShapeCache
from scalepoint.compat.torch_names import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    make_fake_input,
    pytree,
    pytree_info,
)

Decompositions = Mapping[Any, Callable[..., Any]]  # operation -> function that computes it with other operations
AxisChooser = Callable[[str, Any], Iterable[int]]  # name and value of an input -> its dynamic axes
# A node of the graph, and the operation that is decomposed (or None) -> meta of the nodes that are recorded for it.
NodeMeta = Callable[[fx.Node, Any], dict[str, Any]]

READ_VALUE_OPERATIONS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


class NotRecordedError(Exception):
    """The graph contains something that a run over fake tensors cannot record."""


def copy_origin(node: fx.Node, decomposed: Any) -> dict[str, Any]:
    """Return the meta keys that say where in the model a node comes from."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def record_program(
    model: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    choose_axes: AxisChooser,
    fake_input_cache: "FakeInputCache | None" = None,
    *,
    writes_code: bool = True,
    node_meta: NodeMeta = copy_origin,
) -> "RecordedProgram":
    """Make the program of a captured graph in eval mode.

    Args:
        model: The captured graph.
        args: Example inputs by position.
        kwargs: Example inputs by name.
        choose_axes: Returns the dynamic axes of an input. An axis that the graph uses as a number becomes static.
        fake_input_cache: Fake inputs and shapes of another graph of the same capture; filled by this call.
        writes_code: False if only the nodes of the program are read. Writing its code takes a tenth of the time.
        node_meta: Returns the meta of recorded nodes.

    Raises:
        NotRecordedError: The graph cannot be recorded. Torch may raise any other error for the same reason.
    """
    inputs = _FlatInputs(model, args, kwargs)
    fake_input_cache = fake_input_cache or FakeInputCache()
    dynamic_axes = [
        set(choose_axes(name, value)) if isinstance(value, Tensor) else set()
        for name, value in zip(inputs.names, inputs.values, strict=True)
    ]
    # A run may show that an axis can have one size only. Then the graph is recorded again with this axis static.
    while True:
        fake_inputs = fake_input_cache.fake_inputs(inputs, dynamic_axes)
        recording = _Recording(model, inputs, fake_inputs, node_meta)
        static_axes = [
            {axis for axis in axes if is_concrete_int(value.shape[axis])}
            for axes, value in zip(dynamic_axes, fake_inputs.values, strict=True)
        ]
        # This graph fixed sizes or made them equal. Another graph may leave them free, so it starts with new symbols.
        if any(static_axes) or fake_inputs.shape_env.replacements:
            fake_input_cache.clear()
        if not any(static_axes):
            return recording.to_program(writes_code)
        dynamic_axes = [axes - static for axes, static in zip(dynamic_axes, static_axes, strict=True)]


def flatten_inputs(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of the placeholders of a graph for these arguments, in order."""
    return tuple(_FlatInputs(model, args, kwargs).values)


class _FlatInputs:
    """The inputs of a graph as its placeholders take them, and their nesting."""

    def __init__(self, model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
        self.example_inputs = (args, kwargs)
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        info = pytree_info(model.graph)
        if info is None:
            self.values = [arguments[name.lstrip("*")] for name in self.names]
            self.structure = pytree.tree_structure((tuple(self.values), {}))
        else:
            ordered = [arguments[name] for name in info.orig_args]
            positional_spec, *keyword_specs = info.in_spec.children()
            count = positional_spec.num_children
            keywords = keyword_specs[0].context if keyword_specs else ()
            by_name = dict(zip(keywords, ordered[count:], strict=True))
            self.values = fx_pytree.tree_flatten_spec((tuple(ordered[:count]), by_name), info.in_spec)
            self.structure = info.in_spec
        is_nested = any(isinstance(value, dict | list | tuple) for value in self.values)
        if is_nested or len(self.values) != len(self.names):
            raise NotRecordedError("nested inputs where the graph takes one tensor")


class _FakeInputs(NamedTuple):
    """Fake inputs of a graph, the environment of their symbols, and the shapes inferred from them."""

    shape_env: ShapeEnv
    values: list[Any]
    shapes: ShapeCache


class FakeInputCache:
    """Fake inputs and inferred shapes of one graph, reused for another with the same inputs (float and quantized)."""

    def __init__(self) -> None:
        self._key: Any = None
        self._fake_inputs: _FakeInputs | None = None

    def fake_inputs(self, inputs: _FlatInputs, dynamic_axes: Sequence[set[int]]) -> _FakeInputs:
        """Return the fake inputs of an earlier run with the same inputs and axes, or new ones."""
        descriptions = [
            (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
            for value in inputs.values
        ]
        key = (inputs.names, descriptions, [sorted(axes) for axes in dynamic_axes])
        if self._fake_inputs is None or self._key != key:
            self._key, self._fake_inputs = key, _make_fake_inputs(inputs, dynamic_axes)
        self._fake_inputs.shapes.release_tensors()
        return self._fake_inputs

    def clear(self) -> None:
        """Start with new symbols at the next graph."""
        self._fake_inputs = None


def _make_fake_inputs(inputs: _FlatInputs, dynamic_axes: Sequence[set[int]]) -> _FakeInputs:
    shape_env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shape_env)
    mode.cache_enabled = False  # filling torch's own cache takes as long as inferring the shapes; see ShapeCache
    values = [
        make_fake_input(mode, name, value.detach(), axes) if isinstance(value, Tensor) else value
        for name, value, axes in zip(inputs.names, inputs.values, dynamic_axes, strict=True)
    ]
    return _FakeInputs(shape_env, values, ShapeCache(mode))


class _Recording:
    """One recorded run of a graph."""

    def __init__(
        self, model: fx.GraphModule, inputs: _FlatInputs, fake_inputs: _FakeInputs, node_meta: NodeMeta
    ) -> None:
        self.graph = graph = _GraphWithOptionalCode()
        self.inputs, self.shape_env, self.node_meta = inputs, fake_inputs.shape_env, node_meta
        # id of a tensor -> (name, is_buffer). Tied tensors get the first of their names, so it is written last.
        self._state_names = {id(tensor): (name, True) for name, tensor in reversed(list(model.named_buffers()))}
        self._state_names |= {id(tensor): (name, False) for name, tensor in reversed(list(model.named_parameters()))}
        self._state: list[tuple[fx.Node, Tensor]] = []
        self.recorder = recorder = _OperationRecorder(graph, fake_inputs.shapes, {})
        recorder.add_constant = self._add_state
        self.input_nodes = [graph.placeholder(name) for name in inputs.names]
        for node, name, value in zip(self.input_nodes, inputs.names, fake_inputs.values, strict=True):
            node.name = name  # torch.fx renames a placeholder called like a builtin, such as "input"
            node.meta["val"] = value
            recorder.bind(node, value)
        with torch.inference_mode(), recorder, any_length_recurrent_shapes():
            interpreter = _RecordingInterpreter(model, recorder, node_meta)
            outputs = interpreter.run(*fake_inputs.values, enable_io_processing=False)
        leaves, structure = pytree.tree_flatten(outputs)
        info = pytree_info(model.graph)
        self.output_structure: Any = structure if info is None else info.out_spec
        recorder.node_meta = {}
        self.outputs = [recorder.to_argument(leaf) for leaf in leaves]
        graph.output(tuple(self.outputs))
        graph.eliminate_dead_code()

    def _add_state(self, tensor: Tensor) -> fx.Node:
        """Add a placeholder for a parameter, a buffer or a constant tensor."""
        name, _ = self._state_names.setdefault(id(tensor), (f"constant_{len(self._state)}", True))
        with self.graph.inserting_before(self.input_nodes[0] if self.input_nodes else None):
            # The name becomes an identifier in the code of the graph. Names of files depend on this prefix.
            node = self.graph.placeholder("held_" + re.sub(r"\W", "_", name))
        node.meta["val"] = self.recorder.shapes.to_fake(tensor)
        self._state.append((node, tensor))
        return node

    def to_program(self, writes_code: bool) -> "RecordedProgram":
        self.graph.writes_code = writes_code
        input_specs = [self._state_spec(node, tensor) for node, tensor in self._state]
        input_specs += [InputSpec(InputKind.USER_INPUT, _argument_spec(node), None) for node in self.input_nodes]
        output_specs = [OutputSpec(OutputKind.USER_OUTPUT, _argument_spec(output), None) for output in self.outputs]
        # Torch would check the guards in every call of the program, by names that the program does not have.
        self.shape_env.guards.clear()
        signature = ModuleCallSignature([], [], self.inputs.structure, self.output_structure)
        program = RecordedProgram(
            root=nn.Module(),
            graph=self.graph,
            graph_signature=ExportGraphSignature(input_specs, output_specs),
            state_dict={self._state_names[id(tensor)][0]: tensor for _, tensor in self._state},
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", signature)],
            example_inputs=self.inputs.example_inputs,
        )
        program.node_meta = self.node_meta
        return program

    def _state_spec(self, node: fx.Node, tensor: Tensor) -> InputSpec:
        name, is_buffer = self._state_names[id(tensor)]
        kind = InputKind.BUFFER if is_buffer else InputKind.PARAMETER
        return InputSpec(kind, TensorArgument(node.name), name, persistent=True if is_buffer else None)


def _argument_spec(value: Any) -> ArgumentSpec:
    if not isinstance(value, fx.Node):
        return ConstantArgument("", value)
    result = value.meta["val"]
    if isinstance(result, Tensor):
        return TensorArgument(value.name)
    if isinstance(result, torch.SymInt):
        return SymIntArgument(value.name)
    return ConstantArgument(value.name, result)


class _RecordingInterpreter(fx.Interpreter):
    """Runs a captured graph. Recorded nodes get the meta of the node of the graph that runs."""

    def __init__(self, model: fx.GraphModule, recorder: "_OperationRecorder", node_meta: NodeMeta) -> None:
        super().__init__(model)
        self.recorder, self.node_meta = recorder, node_meta

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.node_meta = self.node_meta(n, None)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator):
            raise NotRecordedError(f"torch.{target.__name__} has branches")
        result = super().call_function(target, args, kwargs)
        if isinstance(result, torch.SymFloat | torch.SymBool):
            raise NotRecordedError(f"{target} of sizes")
        # Arithmetic on sizes (operator.mul) does not reach the recorder, which is called for tensor operations only.
        is_symbolic_size = isinstance(result, torch.SymInt) and not is_concrete_int(result)
        if is_symbolic_size and result.node.expr not in self.recorder.size_nodes:
            node = self.recorder.graph.call_function(target, *self.recorder.to_arguments(args, kwargs))
            node.meta = {**self.recorder.node_meta, "val": result}
            self.recorder.bind(node, result)
        return result


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds a node to `graph` for every operation that runs inside this mode.

    Run it inside torch.inference_mode: with autograd, composite operations (conv2d, linear) would arrive decomposed.

    Attributes:
        decompositions: Operations that are recorded as the operations that these functions call.
        node_meta: The meta of the nodes that are recorded next.
        add_constant: Makes a node for a real tensor. Without it a real tensor is an error.
        size_nodes: The node that computes a symbolic size, by the expression of the size.
    """

    def __init__(self, graph: fx.Graph, shapes: ShapeCache, decompositions: Decompositions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.decompositions, self.shapes = graph, decompositions, shapes
        self.node_meta: dict[str, Any] = {}
        self.add_constant: Callable[[Tensor], fx.Node] | None = None
        self.size_nodes: dict[Any, fx.Node] = {}
        self._tensor_nodes: dict[int, fx.Node] = {}  # by the id of the tensor
        self._size_sources: dict[Any, tuple[fx.Node, int]] = {}  # symbolic size -> a tensor and an axis of that size
        self._alive: list[Any] = []  # the id of a tensor may be used again once the tensor is freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in READ_VALUE_OPERATIONS and not isinstance(args[0], FakeTensor):
            return func(*args)  # a constant: its value is known
        decomposition = self.decompositions.get(func) or REPLACEMENTS.get(func)
        if decomposition is None and _must_decompose(func):
            decomposition = func.decompose
        if decomposition is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            raise NotRecordedError(f"{func} writes in place")
        result = self.shapes.infer(func, args, kwargs)
        if not isinstance(result, Tensor | list | tuple | torch.SymInt):
            return result  # a device or a layout
        node_args, node_kwargs = self.to_arguments(args, kwargs)
        name = func._schema.name.rpartition("::")[2]  # torch.export names its nodes like this
        self._bind_results(self.graph.create_node("call_function", func, node_args, node_kwargs, name), result)
        return result

    def _bind_results(self, node: fx.Node, result: Any) -> None:
        """Remember which node computes a result. The items of a tuple get a getitem node each."""
        node.meta = {**self.node_meta, "val": result}
        if not isinstance(result, list | tuple):
            self.bind(node, result)
            return
        for index, item in enumerate(result):
            if item is not None:
                self._bind_results(self.graph.call_function(operator.getitem, (node, index)), item)

    def bind(self, node: fx.Node, value: Any) -> None:
        """Remember that `node` computes `value`."""
        self._alive.append(value)
        if isinstance(value, Tensor):
            self._tensor_nodes[id(value)] = node
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._size_sources.setdefault(size.node.expr, (node, axis))
        elif isinstance(value, torch.SymInt) and not is_concrete_int(value):
            self.size_nodes.setdefault(value.node.expr, node)

    def to_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the tensors and symbolic sizes of a call by their nodes."""
        arguments: tuple[Any, Any] = fx.node.map_aggregate((tuple(args), dict(kwargs)), self.to_argument)
        return arguments

    def to_argument(self, value: Any) -> Any:
        """Return the node of a tensor or symbolic size, and any other value unchanged."""
        if isinstance(value, Tensor):
            node = self._tensor_nodes.get(id(value))
            if node is None and self.add_constant is not None and not isinstance(value, FakeTensor):
                node = self.add_constant(value)
                self.bind(node, value)
            if node is None:
                raise NotRecordedError("a tensor that no recorded operation returned")
            return node
        if isinstance(value, torch.SymInt):
            return int(value) if is_concrete_int(value) else self._size_node(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise NotRecordedError("a number that is computed from sizes")
        return value

    def _size_node(self, size: torch.SymInt) -> fx.Node:
        """Return the node of a symbolic size; adds one if a tensor has this size or if it is a sum or product."""
        expression = size.node.expr
        if expression in self.size_nodes:
            return self.size_nodes[expression]
        if expression in self._size_sources:
            node = self.graph.call_function(torch.ops.aten.sym_size.int, self._size_sources[expression])
        elif expression.is_Mul or expression.is_Add:  # computed in C++, where no operation is recorded
            function = operator.mul if expression.is_Mul else operator.add
            shape_env: Any = size.node.shape_env
            operands = [
                int(term) if term.is_Integer else shape_env.create_symintnode(term, hint=None)
                for term in expression.as_two_terms()
            ]
            node = self.graph.call_function(function, tuple(self.to_argument(operand) for operand in operands))
        else:
            raise NotRecordedError(f"size {size} is computed by code that is not recorded")
        node.meta = {**self.node_meta, "val": size}
        self.bind(node, size)
        return node


@cache
def _must_decompose(operation: Any) -> bool:
    """Whether an operation consists of others and may return a view of its input or write to it (reshape, to).

    torch.export decomposes all of these.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    is_tagged = torch.Tag.maybe_aliasing_or_mutating in operation.tags
    has_alias = is_tagged or any(argument.alias_info is not None for argument in operation._schema.arguments)
    return has_alias and torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key)


def _batch_norm_in_eval(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, _cudnn: bool
) -> Any:
    """Replace a batch norm with running statistics by the operation that torch.export records for it."""
    if training:
        raise NotRecordedError("batch norm with the statistics of the batch")
    return torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)[0]


def _check_same_layout(x: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Tensor:
    """Return x for an as_strided_ that changes strides of axes of size 1 only, as a pool of channels-last does."""
    is_same_shape = offset is None and tuple(size) == tuple(x.shape)
    if not is_same_shape or any(
        extent != 1 and new != old for extent, new, old in zip(size, stride, x.stride(), strict=True)
    ):
        raise NotRecordedError("aten.as_strided_.default writes in place")
    return x


def _rrelu_in_eval(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, _: Any = None) -> Any:
    """Replace a randomized leaky ReLU in eval mode by a leaky ReLU with the mean slope."""
    if training:
        raise NotRecordedError("a leaky ReLU with random slopes")
    return torch.ops.aten.leaky_relu(x, (lower + upper) / 2)


REPLACEMENTS: Decompositions = {
    torch.ops.aten.as_strided_.default: _check_same_layout,
    torch.ops.aten.batch_norm.default: _batch_norm_in_eval,
    torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default,  # torch.tensor(...) in a forward
    torch.ops.aten.detach_.default: lambda x: x,
    torch.ops.aten.rrelu.default: _rrelu_in_eval,
}


class _GraphWithOptionalCode(fx.Graph):
    """A graph whose Python code is left empty if `writes_code` is False. ExportedProgram writes it when it is made."""

    writes_code = True

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        return super().python_code(root_module, **options) if self.writes_code else fx.Graph().python_code(root_module)


class RecordedProgram(ExportedProgram):
    """A recorded program. Its operations are decomposed in place, one by one.

    Torch's `run_decompositions` traces the whole program again instead.

    Attributes:
        trace_error: The error for which `run_decompositions` did trace the whole program; None if it did not.
    """

    trace_error: Exception | None = None
    node_meta: NodeMeta

    def run_decompositions(
        self, decomp_table: Any = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """Decompose the operations of the table; returns this program, or a new one if it had to be traced again."""
        if isinstance(self.graph, _GraphWithOptionalCode):
            self.graph.writes_code = True
        table = dict((torch.export.default_decompositions() if decomp_table is None else decomp_table).items())
        if not self.decompose_in_place(table):
            traced: ExportedProgram = super().run_decompositions(table, decompose_custom_triton_ops)
            return traced
        self.graph_module.recompile()
        return self

    def decompose_in_place(self, table: Decompositions) -> bool:
        """Decompose the operations of the table in the graph, without writing its code.

        Returns False and sets `trace_error` if only torch's trace of the whole program can decompose it.
        """
        try:
            _decompose_graph(self.graph, table, self.node_meta)
        except Exception as error:  # decompositions may raise anything; the caller traces the whole program then
            self.trace_error = error
        self.graph.eliminate_dead_code()
        output: Any = next(node for node in self.graph.nodes if node.op == "output")
        for spec, result in zip(self.graph_signature.output_specs, output.args[0], strict=True):
            spec.arg = _argument_spec(result)
        return self.trace_error is None


def _decompose_graph(graph: fx.Graph, table: Decompositions, node_meta: NodeMeta) -> None:
    """Replace every operation of the table by the operations that its decomposition calls."""
    values = [node.meta.get("val") for node in graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    recorder = _OperationRecorder(graph, ShapeCache(mode), table)
    for node in list(graph.nodes):
        if node._erased:  # a getitem node of an operation that was decomposed
            continue
        if node.op == "call_function" and node.target in table:
            recorder.node_meta = node_meta(node, node.target)
            _decompose_node(node, recorder)
        elif node.op != "output":
            recorder.bind(node, node.meta["val"])


def _decompose_node(node: fx.Node, recorder: _OperationRecorder) -> None:
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda value: value.meta["val"] if isinstance(value, fx.Node) else value
    )
    operation: Any = node.target
    with node.graph.inserting_before(node):  # also for nodes of sizes that `to_argument` adds
        with torch.inference_mode(), recorder:
            result = operation(*args, **kwargs)
        if isinstance(result, list | tuple):
            for getitem in list(node.users):
                index: Any = getitem.args[1]
                getitem.replace_all_uses_with(recorder.to_argument(result[index]))
                node.graph.erase_node(getitem)
        else:
            node.replace_all_uses_with(recorder.to_argument(result))
    node.graph.erase_node(node)
