"""A graph of modules as an exported program, without torch.export: one run without values, every operation noted.

    graph --a run over fake tensors--> flat graph of aten operations + their shapes --signature--> ExportedProgram

Capture has found out already what the model does and which sizes are free, so that nothing is left to find out here: no
guards on Python's state, no functionalization, no second pass for decompositions. What this cannot note (branches,
writes in place, sizes that depend on values) is a `NotNotedError`, and the way through torch.export remains.
"""

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
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
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, is_concrete_int
from torch.fx.graph import PythonCode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.dynamic_axes import Free
from scalepoint.graph.nodes import KEY, NodeInfo, get_info
from scalepoint.graph.recurrent import shapes_of_any_length
from scalepoint.graph.shapes import Shapes
from scalepoint.graph.user_traceback import user_level

Table = Mapping[Any, Callable[..., Any]]
_KEPT = ("stack_trace", "nn_module_stack")  # of a node, for those that it becomes
_VALUES = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _normalized(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    """Batch norm with the statistics of the model, as torch.export has it."""
    if training:
        raise NotNotedError("batch norm with the statistics of the batch")
    return torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, *rest[:2])[0]


def _laid_out(x: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Tensor:
    """A layout that is written into a tensor, where it differs at extents of one alone (a pool of channels-last)."""
    is_same = offset is None and tuple(size) == tuple(x.shape)
    if not is_same or any(n != 1 and a != b for n, a, b in zip(size, stride, x.stride(), strict=True)):
        raise NotNotedError("aten.as_strided_.default writes in place")
    return x


def _mean_slope(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, _: Any = None) -> Any:
    """A random leaky ReLU in eval."""
    if training:
        raise NotNotedError("a leaky ReLU that draws its slopes")
    return torch.ops.aten.leaky_relu(x, (lower + upper) / 2)


_OWN: Table = {
    torch.ops.aten.as_strided_.default: _laid_out,
    torch.ops.aten.batch_norm.default: _normalized,
    torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default,  # torch.tensor(..) in forward
    torch.ops.aten.detach_.default: lambda x: x,
    torch.ops.aten.rrelu.default: _mean_slope,
}


class NotNotedError(Exception):
    """What a run over fake tensors cannot say."""


def warn_of_tracing(why: Exception) -> None:
    """Say that torch traces the program anew, and what made it necessary."""
    reason = str(why) if isinstance(why, NotNotedError) else f"{type(why).__name__}: {why}"
    first = next(iter(reason.strip().splitlines()), "").rstrip(" .")
    warnings.warn(
        ScalepointWarning(f"torch traces the model once more to write the file, which may take minutes: {first}"),
        stacklevel=user_level(),
    )


class Program(ExportedProgram):
    """Operations are decomposed one by one, each where it stands: torch's own way traces the whole program anew."""

    why_traced: Exception | None = None  # what made a trace of the whole program necessary

    def run_decompositions(
        self, decomp_table: Any = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """This program itself, the operations of the table in their parts; `written` in their meta is the whole."""
        if isinstance(self.graph, _Operations):
            self.graph.has_code = True
        table = dict((torch.export.default_decompositions() if decomp_table is None else decomp_table).items())
        if not self.take_apart(table):
            traced: ExportedProgram = super().run_decompositions(table, decompose_custom_triton_ops)
            return traced
        self.graph_module.recompile()
        return self

    def take_apart(self, table: Table) -> bool:
        """Decompose in place, the graph and not its code; False with a reason in `why_traced` where only a trace of the
        whole could."""
        try:
            _decompose(self.graph, table)
        except Exception as error:  # what a run without values cannot note, the whole trace may
            self.why_traced = error
        self.graph.eliminate_dead_code()
        gives: Any = next(node for node in self.graph.nodes if node.op == "output").args[0]
        for spec, node in zip(self.graph_signature.output_specs, gives, strict=True):
            spec.arg = _argument(node)
        return self.why_traced is None


class _Operations(fx.Graph):
    """A graph of operations, which torch writes as code in making a program of it: a tenth of the time that it takes to
    note them, for nothing where nobody runs it."""

    has_code = True

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        return super().python_code(root_module, **options) if self.has_code else fx.Graph().python_code(root_module)


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that runs on tensors it knows, as a node of `graph`.

    Autograd is out of the way, so that operations arrive as they were written (conv2d, linear), not in their parts.
    """

    def __init__(self, graph: fx.Graph, shapes: Shapes, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.table, self.shapes = graph, table, shapes
        self.meta: dict[str, Any] = {}
        self.constant: Callable[[Tensor], fx.Node] | None = None  # the node of a tensor that has values
        self.known: dict[int, fx.Node] = {}
        self.sizes: dict[Any, fx.Node] = {}
        self.extents: dict[Any, tuple[fx.Node, int]] = {}  # of sizes: an axis that has it
        self.alive: list[Any] = []  # an id is that of one tensor as long as it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in _VALUES and not isinstance(args[0], FakeTensor):
            return func(*args)  # the value of a constant
        parts = self.table.get(func) or _OWN.get(func) or (func.decompose if _must_decompose(func) else None)
        if parts is not None:
            with self:
                made = parts(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func._schema.is_mutable:
            raise NotNotedError(f"{func} writes in place")
        made = self.shapes.of(func, args, kwargs)
        if not isinstance(made, Tensor | list | tuple | torch.SymInt):
            return made  # a device, a layout
        places = fx.node.map_aggregate((tuple(args), dict(kwargs)), self.place)
        name = func._schema.name.rpartition("::")[2]  # as torch.export calls it
        self._note(self.graph.create_node("call_function", func, *places, name), made)
        return made

    def _note(self, node: fx.Node, made: Any) -> None:
        node.meta = {**self.meta, "val": made}
        if isinstance(made, list | tuple):
            for index, each in enumerate(made):
                if each is not None:
                    self._note(self.graph.call_function(operator.getitem, (node, index)), each)
        else:
            self.take(node, made)

    def take(self, node: fx.Node, value: Any) -> None:
        """From now on this value is that node."""
        self.alive.append(value)
        if isinstance(value, Tensor):
            self.known[id(value)] = node
            for axis, extent in enumerate(value.shape):
                if isinstance(extent, torch.SymInt):
                    self.extents.setdefault(extent.node.expr, (node, axis))
        elif isinstance(value, torch.SymInt) and not is_concrete_int(value):
            self.sizes.setdefault(value.node.expr, node)

    def place(self, value: Any) -> Any:
        """An argument as a node, or as the constant that it is."""
        if isinstance(value, Tensor):
            found = self.known.get(id(value))
            if found is None and self.constant is not None and not isinstance(value, FakeTensor):
                found = self.constant(value)
                self.take(found, value)
            if found is None:
                raise NotNotedError("a tensor comes from nowhere")
            return found
        if isinstance(value, torch.SymInt):
            return int(value) if is_concrete_int(value) else self._size(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise NotNotedError("a number that is computed of sizes")
        return value

    def _size(self, value: torch.SymInt) -> fx.Node:
        size = value.node.expr
        if size in self.sizes:
            return self.sizes[size]
        if size in self.extents:
            made = self.graph.call_function(torch.ops.aten.sym_size.int, self.extents[size])
        elif size.is_Mul or size.is_Add:  # as C++ computes it: parts that are known
            function = operator.mul if size.is_Mul else operator.add
            first, rest = size.as_two_terms()
            own: Any = value.node.shape_env
            parts = [int(each) if each.is_Integer else own.create_symintnode(each, hint=None) for each in (first, rest)]
            made = self.graph.call_function(function, tuple(self.place(each) for each in parts))
        else:
            raise NotNotedError(f"{value} is computed of sizes where nobody sees it")
        made.meta = {**self.meta, "val": value}
        self.take(made, value)
        return made


def _kept(node: fx.Node, written: Any = None) -> dict[str, Any]:
    """The meta of a node for those that it becomes; `written` unless it was itself part of another operation."""
    written = get_info(node).written or written
    kept = {key: node.meta[key] for key in _KEPT if key in node.meta}
    return kept if written is None else {**kept, KEY: NodeInfo(written=written)}


@cache
def _must_decompose(func: Any) -> bool:
    """Made of others, and perhaps a view of its input (reshape, to) or a write into it: torch leaves none whole."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    is_tagged = torch.Tag.maybe_aliasing_or_mutating in func.tags
    has_alias = is_tagged or any(each.alias_info is not None for each in func._schema.arguments)
    return has_alias and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class _Run(fx.Interpreter):
    """The run; what each node of the graph becomes has its place in the model and its line in the code."""

    def __init__(self, model: fx.GraphModule, notes: _Notes) -> None:
        super().__init__(model)
        self.notes = notes

    def run_node(self, n: fx.Node) -> Any:
        self.notes.meta = _kept(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise NotNotedError(f"torch.{target.__name__} has branches")
        made = super().call_function(target, args, kwargs)
        if isinstance(made, torch.SymFloat | torch.SymBool):
            raise NotNotedError(f"{target} of sizes")
        is_size = isinstance(made, torch.SymInt) and not is_concrete_int(made)
        if is_size and made.node.expr not in self.notes.sizes:
            places = fx.node.map_aggregate((tuple(args), dict(kwargs)), self.notes.place)
            node = self.notes.graph.call_function(target, *places)
            node.meta = {**self.notes.meta, "val": made}
            self.notes.take(node, made)
        return made


def program_of(
    model: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: Free,
    known: "Known | None" = None,
    *,
    has_code: bool = True,
) -> Program:
    """The program of a graph in eval for inputs like these, of which `axes` tells the axes that may change.

    An axis that the graph computes with as a number is fixed in the program, and noted anew so. What is found of sizes
    goes into `known`, for another graph of the same capture.
    """
    inputs, known = _Inputs(model, args, kwargs), known or Known()
    pairs = zip(inputs.names, inputs.leaves, strict=True)
    free = [set(axes(name, leaf)) if isinstance(leaf, Tensor) else set() for name, leaf in pairs]
    while True:
        made = _Made(model, inputs, known.sizes(inputs, free))
        fixed = [
            {axis for axis in own if is_concrete_int(value.shape[axis])}
            for own, value in zip(free, made.values, strict=True)
        ]
        if any(fixed) or made.sizes.replacements:
            known.forget()
        if not any(fixed):
            return made.program(has_code)
        free = [own - gone for own, gone in zip(free, fixed, strict=True)]


class _Sizes(NamedTuple):
    """Inputs without values, and what operations have made of their sizes."""

    env: ShapeEnv
    values: list[Any]
    shapes: Shapes


class Known:
    """What runs over the same inputs have found of sizes: the float graph has those of the quantized one."""

    def __init__(self) -> None:
        self._case: Any = None
        self._sizes: _Sizes | None = None

    def sizes(self, inputs: "_Inputs", free: Sequence[set[int]]) -> _Sizes:
        """Those of an earlier run with the same inputs and free axes, else new ones."""
        shown = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
            for leaf in inputs.leaves
        ]
        case = (inputs.names, shown, [sorted(each) for each in free])
        if self._sizes is None or self._case != case:
            env = ShapeEnv(duck_shape=False)
            mode = FakeTensorMode(shape_env=env)
            mode.cache_enabled = False  # `Shapes` has one; keeping torch's takes as long as working a case out
            values = [_fake_input(mode, *each) for each in zip(inputs.names, inputs.leaves, free, strict=True)]
            self._case, self._sizes = case, _Sizes(env, values, Shapes(mode))
        self._sizes.shapes.let_go()
        return self._sizes

    def forget(self) -> None:
        """A size became a number, or that of another input: other graphs begin as this one did."""
        self._sizes = None


def leaves_of(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the placeholders of a graph get for these arguments, in order."""
    return tuple(_Inputs(model, args, kwargs).leaves)


class _Inputs:
    """The inputs of a graph as its placeholders take them, and how they are nested."""

    def __init__(self, model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
        info = getattr(model.graph._codegen, "pytree_info", None)
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if info is None:
            self.leaves = [given[name.lstrip("*")] for name in self.names]
            self.structure = pytree.tree_structure((tuple(self.leaves), {}))
        else:
            values = [given[name] for name in info.orig_args]
            by_place = info.in_spec.children()[0].num_children
            keys = info.in_spec.children()[1].context if len(info.in_spec.children()) > 1 else ()
            named = dict(zip(keys, values[by_place:], strict=True))
            self.leaves = fx_pytree.tree_flatten_spec((tuple(values[:by_place]), named), info.in_spec)
            self.structure = info.in_spec
        self.given = (args, kwargs)
        if any(isinstance(leaf, dict | list | tuple) for leaf in self.leaves) or len(self.leaves) != len(self.names):
            raise NotNotedError("inputs that are nested where the graph takes one")


class _Made:
    """One run, and what there is to say of it."""

    def __init__(self, model: fx.GraphModule, inputs: _Inputs, sizes: _Sizes) -> None:
        graph = _Operations()
        self.inputs, self.graph, self.sizes, self.values = inputs, graph, sizes.env, sizes.values
        self.names = {id(value): (name, True) for name, value in reversed(list(model.named_buffers()))}
        self.names |= {id(value): (name, False) for name, value in reversed(list(model.named_parameters()))}
        self.held: list[tuple[fx.Node, Tensor]] = []
        self.notes = notes = _Notes(graph, sizes.shapes, {})
        notes.constant = self._hold
        self.places = [graph.placeholder(name) for name in inputs.names]
        for node, name, value in zip(self.places, inputs.names, self.values, strict=True):
            node.name = name  # also where it is that of a builtin
            node.meta["val"] = value
            notes.take(node, value)
        info = getattr(model.graph._codegen, "pytree_info", None)
        with torch.inference_mode(), notes, shapes_of_any_length():
            given = _Run(model, notes).run(*self.values, enable_io_processing=False)
        leaves, structure = pytree.tree_flatten(given)
        self.structure = structure if info is None else info.out_spec
        notes.meta = {}
        self.outputs = [notes.place(leaf) for leaf in leaves]
        graph.output(tuple(self.outputs))
        graph.eliminate_dead_code()

    def _hold(self, value: Tensor) -> fx.Node:
        """A placeholder for a tensor of the model."""
        name, _ = self.names.setdefault(id(value), (f"constant_{len(self.held)}", True))
        with self.graph.inserting_before(self.places[0] if self.places else None):
            node = self.graph.placeholder("held_" + re.sub(r"\W", "_", name))  # torch writes it as code
        node.meta["val"] = self.notes.shapes.fake(value)
        self.held.append((node, value))
        return node

    def program(self, has_code: bool) -> Program:
        self.graph.has_code = has_code
        held = [(node, *self.names[id(value)], value) for node, value in self.held]
        given = [*(self._held_spec(node, name, is_buffer) for node, name, is_buffer, _ in held)]
        given += [InputSpec(InputKind.USER_INPUT, _argument(node), None) for node in self.places]
        gives = [OutputSpec(OutputKind.USER_OUTPUT, _argument(place), None) for place in self.outputs]
        self.sizes.guards.clear()  # torch would check them by names of its own in every call
        signature = ModuleCallSignature([], [], self.inputs.structure, self.structure)
        return Program(
            root=nn.Module(),
            graph=self.graph,
            graph_signature=ExportGraphSignature(given, gives),
            state_dict={name: value for _, name, _, value in held},
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", signature)],
            example_inputs=self.inputs.given,
        )

    def _held_spec(self, node: fx.Node, name: str, is_buffer: bool) -> InputSpec:
        kind = InputKind.BUFFER if is_buffer else InputKind.PARAMETER
        return InputSpec(kind, TensorArgument(node.name), name, True if is_buffer else None)


def _fake_input(mode: FakeTensorMode, name: str, value: Any, free: set[int]) -> Any:
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415  # slow to import

    if not isinstance(value, Tensor):
        return value
    kinds = [DimDynamic.DYNAMIC if axis in free else DimDynamic.STATIC for axis in range(value.ndim)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value.detach(), symbolic_context=context, source=ConstantSource(name))


def _argument(place: Any) -> ArgumentSpec:
    if not isinstance(place, fx.Node):
        return ConstantArgument("", place)
    value = place.meta["val"]
    if isinstance(value, Tensor):
        return TensorArgument(place.name)
    if isinstance(value, torch.SymInt):
        return SymIntArgument(place.name)
    return ConstantArgument(place.name, value)


def _decompose(graph: fx.Graph, table: Table) -> None:
    """In place: every operation of the table in its parts, with the shapes that its operands have."""
    values = [node.meta.get("val") for node in graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    notes = _Notes(graph, Shapes(mode), table)
    for node in list(graph.nodes):
        if node._erased:  # it picked a part of one that was replaced
            continue
        if node.op == "call_function" and node.target in table:
            notes.meta = _kept(node, node.target)
            _replace(node, notes)
        elif node.op != "output":
            notes.take(node, node.meta["val"])


def _replace(node: fx.Node, notes: _Notes) -> None:
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda each: each.meta["val"] if isinstance(each, fx.Node) else each
    )
    function: Any = node.target
    with node.graph.inserting_before(node):  # also what a size is computed with
        with torch.inference_mode(), notes:
            made = function(*args, **kwargs)
        if isinstance(made, list | tuple):
            for user in list(node.users):
                index: Any = user.args[1]
                user.replace_all_uses_with(notes.place(made[index]))
                node.graph.erase_node(user)
        else:
            node.replace_all_uses_with(notes.place(made))
    node.graph.erase_node(node)
