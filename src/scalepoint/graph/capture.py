"""Capture: a model becomes one graph whose nodes are modules that own the model's parameters under their own names.

    model --copy--> same modules --torch.export--> aten graph --lift--> GraphModule over the copied modules

The caller's model is never touched: modules are copied (parameters too, unless copy=False), and modes, hooks and
random state stay as they were.
"""

import copy as copying
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CaptureError, ScalepointWarning, UsageError, short_repr
from scalepoint.graph.captured_module import CapturedGraph, adopt_modules, get_reserved_names, is_valid_name
from scalepoint.graph.check import check_graph
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.dynamic_axes import Axes, check_axes, get_named_inputs, parse_axes
from scalepoint.graph.example_inputs import check_dense
from scalepoint.graph.first_run import export_after_first_run
from scalepoint.graph.flattened_tokens import remove_token_flattening
from scalepoint.graph.functionalize import functionalize_writes, join_batch_norms
from scalepoint.graph.inline_blocks import autocast_off, inline_wrapped_blocks
from scalepoint.graph.lift import lift
from scalepoint.graph.module_state import cache_disabled, fused_attention_disabled
from scalepoint.graph.nodes import get_fake_tensor, name_dtypes
from scalepoint.graph.opaque_modules import OpaqueModule, opaque_modules_replaced, restore_opaque_modules
from scalepoint.graph.origin import get_origin, set_origin
from scalepoint.graph.resizing import check_at_other_sizes, find_allowed_sizes
from scalepoint.graph.symbolic_trace import trace
from scalepoint.graph.torch_export import export_logs_silenced, find_fixed_batches, load, widen_batch
from scalepoint.graph.user_traceback import user_level, user_line
from scalepoint.graph.value_dependent_sizes import record_sizes
from scalepoint.support.torch_state import caller_dtype, serialized

Inputs = Any


WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
Model = nn.Module | ExportedProgram | str | Path  # a path is one of a .pt2 file


@serialized
def capture(
    model: Model,
    args: Inputs = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    copy: bool = True,
    dynamic: bool = True,
    dynamic_axes: Any = None,
    leave: Sequence[str] = (),
    trust: bool = False,
) -> fx.GraphModule:
    """Capture a model as a torch.fx graph for inputs like the given ones.

    The batch (axis 0) and, for integer inputs, the sequence (axis 1) stay dynamic if the model allows it. Otherwise a
    warning says so.

    Args:
        model: A module, an ExportedProgram, or the path of a .pt2 file.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs. Without them torch.fx records what it can.
        kwargs: Keyword inputs of the model.
        copy: False shares the parameters with the given model.
        dynamic: Keep the batch axis free.
        dynamic_axes: Further axes that stay free, such as {"x": {2: "height"}}. The graph is compared with the model at
            other sizes.
        leave: Names of submodules that are called as they are.
        trust: Allow loading a .pt2 file, which can run code.

    Returns:
        The graph.

    Raises:
        CaptureError: The model cannot be captured, or it fixes an axis of `dynamic_axes`.
    """
    model, axes = load_if_path(model, trust), parse_axes(dynamic_axes)
    if isinstance(model, ExportedProgram):
        if axes:
            raise UsageError("dynamic_axes: a program has its free axes: give dynamic_shapes= to torch.export.export")
        with export_logs_silenced():
            graph_module = _finish(model, _module_with_state(model)).eval()
            return copying.deepcopy(graph_module) if copy else graph_module
    model = unwrap_model(model)
    check_model(model)
    working = _copy_model(model) if copy else copy_module_tree(model)
    modes = {name: module.training for name, module in working.named_modules()}
    working.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cache_disabled(working), fused_attention_disabled(working):
        if args is None and not kwargs:
            if leave:
                raise CaptureError("leave= needs example inputs: the outputs of a left module are seen in a run")
            if axes:
                raise CaptureError("dynamic_axes= needs example inputs: their axes are meant")
            graph_module = _check_and_describe(trace(working))
        else:
            graph_module = _capture_in_eval(
                working, _make_inputs_distinct(as_inputs(args, kwargs)), dynamic, axes, tuple(leave)
            )
    for name, module in graph_module.named_modules():
        place = name
        while place not in modes:  # a new operation takes the mode of the module it stands in
            place = place.rpartition(".")[0]
        module.training = modes[place]
    return graph_module


def _capture_in_eval(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    dynamic: bool,
    axes: Axes,
    leave: tuple[str, ...],
) -> fx.GraphModule:
    """The graph for these inputs, of a model in eval that is ours."""
    axes = check_axes(axes, get_named_inputs(model, *given)) if axes else axes
    _check_types(model, given)
    inputs = widen_batch(*given) if dynamic else given
    with ExitStack() as stack:
        opaque = stack.enter_context(opaque_modules_replaced(model, leave, *inputs)) if leave else ()
        ignored_autocast = stack.enter_context(autocast_off())
        stack.enter_context(caller_dtype())
        program = export_after_first_run(model, given, inputs, dynamic=dynamic, axes=axes)
    graph_module = _finish(program, model, opaque)
    _check_output(graph_module, type(model).__name__)
    is_wide = _is_widened(graph_module, given)
    set_origin(graph_module, is_widened=is_wide, leave=leave, ignored_autocast=tuple(sorted(ignored_autocast)))
    record_sizes(graph_module, pytree.tree_leaves(inputs if is_wide else given))
    _warn_about_autocast(graph_module)
    if axes:
        sizes = find_allowed_sizes(program, axes)
        compared_sizes = check_at_other_sizes(
            model, graph_module.eval(), given, axes, sizes
        )  # in eval, as the model is
        set_origin(graph_module, axes=axes, size_steps=sizes.steps, compared_sizes=compared_sizes)
    if dynamic:
        _warn_about_fixed_batch(graph_module)
    return graph_module


def _check_output(graph_module: fx.GraphModule, name: str) -> None:
    """A model whose forward has no return statement computes nothing that a file could hold."""
    result = next(node for node in graph_module.graph.nodes if node.op == "output")
    if not result.all_input_nodes:
        is_none = all(leaf is None for leaf in pytree.tree_leaves(result.args[0]))
        got = "None" if is_none else short_repr(result.args[0])
        raise CaptureError(f"{name}.forward returns {got}, no tensor: return what the model computes")


def as_module(program: ExportedProgram) -> nn.Module:
    """A program as a model that can be run and captured again."""
    with export_logs_silenced():
        return _module_with_state(program)


def _module_with_state(program: ExportedProgram) -> nn.Module:
    """The modules of a program with all of its state, also what its graph does not read."""
    owner = program.module(check_guards=False)
    for name, value in program.state_dict.items():
        path, _, leaf = name.rpartition(".")
        module = owner.get_submodule(path)
        if not hasattr(module, leaf):
            module.register_buffer(leaf, value)
    return owner


def _finish(program: ExportedProgram, owner: nn.Module, left: Sequence[OpaqueModule] = ()) -> fx.GraphModule:
    """The exported graph over the modules of `owner`, lifted and checked."""
    with export_logs_silenced():
        unlifted = program.module(check_guards=False)
        inline_wrapped_blocks(unlifted)
        if not functionalize_writes(unlifted.graph):
            program = program.run_decompositions({})
            unlifted = program.module(check_guards=False)
            inline_wrapped_blocks(unlifted)
            functionalize_writes(unlifted.graph)
            join_batch_norms(unlifted.graph)
    name_dtypes(unlifted.graph)
    graph_module = CapturedGraph(unlifted, unlifted.graph, class_name=type(owner).__name__)
    _keep_constants(graph_module, unlifted, owner)
    adopt_modules(graph_module, owner)
    restore_opaque_modules(graph_module, left)
    set_origin(graph_module, fixed_batch=find_fixed_batches(program))
    remove_token_flattening(lift(graph_module, owner))
    return _check_and_describe(graph_module)


def _check_types(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Floats of a type that no parameter has may be meant; a trace does not mind where the model itself does."""
    input_dtypes = {
        leaf.dtype for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    parameter_dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if not input_dtypes or not parameter_dtypes or input_dtypes & parameter_dtypes:
        return
    try:
        with export_logs_silenced():
            dry_run(model, *inputs)
    except Exception as error:  # the user's code raises what it likes
        kinds = [
            " and ".join(sorted(str(each).removeprefix("torch.") for each in some))
            for some in (input_dtypes, parameter_dtypes)
        ]
        raise CaptureError(
            f"{type(model).__name__} itself fails on these example inputs{user_line(error)}. {type(error).__name__}: "
            f"{error}. The inputs are {kinds[0]}, the parameters {kinds[1]}: give inputs of the model's type, in the "
            "data too (numpy makes float64 unless told)"
        ) from error


def _make_inputs_distinct(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs that are one tensor object become two: torch.export takes them for the same input otherwise."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in seen:
            seen.add(id(value))
            return value
        return value.clone()

    apart: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(own, inputs)
    return apart


def _is_widened(graph_module: fx.GraphModule, given: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether the sizes that the graph records are those of a batch of two though one was given."""
    recorded = [get_fake_tensor(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves(given)
    pairs = zip(leaves, recorded, strict=False)
    return any(
        isinstance(one, Tensor) and other is not None and one.ndim > 1 and one.shape[0] == 1 and other.shape[0] != 1
        for one, other in pairs
    )


def _warn_about_fixed_batch(graph_module: fx.GraphModule) -> None:
    sizes = [f"{name!r} is fixed at {size}" for name, size in get_origin(graph_module).fixed_batch.items()]
    if sizes:
        message = (
            f"the first axis of {', '.join(sizes)}: the model computes with that number, so its graph takes inputs of "
            "this size only. dynamic=False asks for that and says nothing"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _warn_about_autocast(graph_module: fx.GraphModule) -> None:
    places = get_origin(graph_module).ignored_autocast
    if places:
        message = (
            f"torch.autocast at {', '.join(places)} is left out: the graph computes in the types of the model's "
            "parameters, and a file in float32 wherever it is not quantized"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _check_and_describe(graph_module: fx.GraphModule) -> fx.GraphModule:
    for module in graph_module.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False  # the graph says what is written where; the modules are copies
    check_graph(graph_module)
    return graph_module


def _keep_constants(graph_module: fx.GraphModule, unlifted: nn.Module, owner: nn.Module) -> None:
    """Tensors that the model made in its forward: buffers of the graph that no state_dict holds."""
    known = {name for name, _ in (*owner.named_parameters(remove_duplicate=False), *owner.named_buffers())}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target not in known:
            path, _, name = node.target.rpartition(".")
            value = getattr(unlifted.get_submodule(path), name)
            if isinstance(value, Tensor):
                node.target = f"constant_{node.name}"
                graph_module.register_buffer(node.target, value, persistent=False)


def load_if_path(model: Model, trust: bool) -> nn.Module | ExportedProgram:
    """The model, or the program at a path that is trusted."""
    if not isinstance(model, str | Path):
        return model
    if not trust:
        raise CaptureError(
            f"{short_repr(str(model))} is a path: loading an exported program runs code from the file. If you trust "
            "it, "
            "say so: trust=True"
        )
    return load(Path(model))


def unwrap_model(model: object) -> nn.Module:
    """The model itself, without what torch.compile or DataParallel put around it; an error for what is no nn.Module,
    with the way to one."""
    kind = type(model)
    if kind.__module__.startswith("torch.") and kind.__name__ in WRAPPERS:
        return unwrap_model(getattr(model, WRAPPERS[kind.__name__]))
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("this is a ScriptModule, whose code cannot be captured: give the nn.Module it was made from")
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CaptureError(f"{model.__name__} is a class: give a model, such as {model.__name__}(...).eval()")
    if isinstance(model, ExportedProgram):
        raise CaptureError("this is an ExportedProgram: give the nn.Module it was made from, or go by transform()")
    if isinstance(model, Mapping) and model and all(isinstance(each, Tensor) for each in model.values()):
        raise CaptureError("this is a state_dict, weights without a model: build the model, load_state_dict() it")
    raise CaptureError(f"{short_repr(model)} is not an nn.Module")


def check_model(model: nn.Module) -> None:
    """Refuse what no capture can take: modules without shapes, names that no code can hold."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise CaptureError(f"{name or type(model).__name__} is a lazy module without shapes: run one batch first")
    reserved = sorted({*model._modules, *model._parameters, *model._buffers} & get_reserved_names())
    if reserved:
        raise CaptureError(
            f"{type(model).__name__}.{reserved[0]} has a name that torch.export needs for itself: rename it, or put "
            f"the model into another one, nn.Sequential(model), where it is 0.{reserved[0]}"
        )
    for table in (model.named_modules(), model.named_parameters(), model.named_buffers()):
        for name, _ in table:
            if not all(map(is_valid_name, name.split("."))):
                raise CaptureError(
                    f"{name!r} cannot be a name in the code of a graph: rename it without quotes, backslashes, line "
                    "breaks and Python's own words"
                )


def as_inputs(args: Inputs, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, however they were given; arrays of numpy, and what inference mode made, as plain
    tensors."""
    args, keyword = _as_tensors(args), _as_tensors(dict(kwargs or {}))
    if args is None and keyword:
        return (), keyword
    if isinstance(args, Mapping):
        return (), {**args, **keyword}
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        return (args,), keyword
    return tuple(args), keyword


def from_array(array: np.ndarray) -> Tensor:
    """Its values as a tensor, over the same memory where torch can have it so: not turned round, not read-only."""
    is_shared = array.flags.writeable and all(step >= 0 for step in array.strides)
    return torch.from_numpy(array if is_shared else array.copy())


def as_tensor(value: np.ndarray | Tensor) -> Tensor:
    """What gradients can go through: an array's values, or those of a tensor that inference mode made."""
    if isinstance(value, np.ndarray):
        return from_array(value)
    check_dense(value)
    return value.clone() if value.is_inference() else value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray | Tensor):
        return as_tensor(value)
    if type(value) in (list, tuple):
        return type(value)(map(_as_tensors, value))
    return {key: _as_tensors(each) for key, each in value.items()} if type(value) is dict else value


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copying.deepcopy(model, _detach_computed_tensors(model))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Keep that out of the model, "
            "or call transform with copy=False, which shares its parameters"
        ) from error


def _detach_computed_tensors(model: nn.Module) -> dict[int, Any]:
    """What stands for tensors that were computed and kept on a module, as torch.nn.utils.weight_norm keeps the weight:
    torch copies no tensor that knows how it was computed."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(each): each.detach().clone() for each in values if isinstance(each, Tensor) and each.grad_fn is not None}


def copy_module_tree(module: nn.Module, seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same tree of modules over the same tensors: modes, children and hooks of the twin are its own."""
    seen = {} if seen is None else seen
    if id(module) in seen:
        return seen[id(module)]
    twin = copying.copy(module)
    seen[id(module)] = twin
    own = vars(twin)
    for name, table in list(own.items()):
        if name.startswith("_") and isinstance(table, dict | set):
            own[name] = copying.copy(table)
    own["_modules"] = {
        name: None if child is None else copy_module_tree(child, seen) for name, child in module._modules.items()
    }
    return twin
