"""Capture: a model becomes one graph whose nodes are modules that own the parameters under their original names.

    model --copy--> same modules --torch.export--> aten graph --lift--> GraphModule over the copied modules

The caller's model is never changed: modules are copied (parameters too, unless copy=False), and modes, hooks and the
random state stay as they are.
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

from scalepoint.compat.torch_names import OpOverload, get_reserved_names, pytree
from scalepoint.errors import CaptureError, ScalepointWarning, UsageError, short_repr
from scalepoint.graph.captured_module import CapturedGraph, adopt_modules, is_valid_name
from scalepoint.graph.check import check_graph
from scalepoint.graph.dry_run import BoundInputs, dry_run
from scalepoint.graph.dynamic_axes import Axes, check_axes, get_named_inputs, parse_axes
from scalepoint.graph.example_inputs import check_dense
from scalepoint.graph.first_run import export_after_first_run
from scalepoint.graph.flattened_tokens import remove_token_flattening
from scalepoint.graph.functionalize import functionalize_writes, join_batch_norms
from scalepoint.graph.inline_blocks import autocast_off, inline_wrapped_blocks
from scalepoint.graph.lift import lift
from scalepoint.graph.module_state import cache_disabled, fused_attention_disabled
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.graph.opaque_modules import OpaqueModule, opaque_modules_replaced, restore_opaque_modules
from scalepoint.graph.origin import get_origin, set_origin
from scalepoint.graph.resizing import check_at_other_sizes, find_allowed_sizes
from scalepoint.graph.symbolic_trace import trace
from scalepoint.graph.torch_export import export_logs_silenced, find_fixed_batches, load, widen_batch
from scalepoint.graph.user_traceback import user_level, user_line
from scalepoint.graph.value_dependent_sizes import record_sizes
from scalepoint.support.interface_names import InterfaceNames
from scalepoint.support.torch_state import caller_dtype, serialized

# Classes of torch that wrap a model, and the attribute with the model.
WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
Model = nn.Module | ExportedProgram | str | Path  # a path names an .onnx or .pt2 file


@serialized
def capture(
    model: Model,
    args: Any = None,
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
        model: A module, an ExportedProgram, or the path of an .onnx or .pt2 file.
        args: Example inputs: a tensor, a tuple, or a dict of keyword inputs. Without them torch.fx records what it can.
        kwargs: Keyword inputs of the model.
        copy: False shares the parameters with the given model.
        dynamic: Keep the batch axis dynamic.
        dynamic_axes: Further axes that stay dynamic, such as {"x": {2: "height"}}. The graph is compared with the model
            at other sizes.
        leave: Names of submodules that are called as they are.
        trust: Allow loading a .pt2 file, which can run code.

    Returns:
        The graph.

    Raises:
        CaptureError: The model cannot be captured, or it fixes an axis of `dynamic_axes`.
    """
    model, axes = load_if_path(model, trust), parse_axes(dynamic_axes)
    if args is None and not kwargs and isinstance(getattr(model, "interface_names", None), InterfaceNames):
        args = model.make_example()  # type: ignore[union-attr, operator]  # the shapes are in the file
    if isinstance(model, ExportedProgram):
        if axes:
            raise UsageError(
                "dynamic_axes= cannot be used with an ExportedProgram: pass dynamic_shapes= to "
                "torch.export.export instead"
            )
        with export_logs_silenced():
            graph_module = _build_graph_module(model, _module_with_state(model)).eval()
            return copying.deepcopy(graph_module) if copy else graph_module
    model = unwrap_model(model)
    check_model(model)
    working = _copy_model(model) if copy else copy_module_tree(model)
    modes = {name: module.training for name, module in working.named_modules()}
    working.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cache_disabled(working), fused_attention_disabled(working):
        if args is None and not kwargs:
            if leave:
                raise CaptureError(
                    "leave= needs example inputs: the model is run once to record the outputs of these submodules"
                )
            if axes:
                raise CaptureError("dynamic_axes= needs example inputs: it names axes of them")
            graph_module = _finalize(trace(working))
        else:
            inputs = _make_inputs_distinct(as_inputs(args, kwargs))
            graph_module = _capture_in_eval(working, inputs, dynamic, axes, tuple(leave))
    names = getattr(model, "interface_names", None)
    if isinstance(names, InterfaceNames):
        set_origin(graph_module, interface_names=names)
    _restore_modes(graph_module, modes)
    return graph_module


def _restore_modes(graph_module: fx.GraphModule, modes: Mapping[str, bool]) -> None:
    """Set `training` of each module. A module that capture added takes the mode of its nearest parent."""
    for name, module in graph_module.named_modules():
        path = name
        while path not in modes:
            path = path.rpartition(".")[0]
        module.training = modes[path]


def _capture_in_eval(
    model: nn.Module,
    example: BoundInputs,
    dynamic: bool,
    axes: Axes,
    leave: tuple[str, ...],
) -> fx.GraphModule:
    """Capture our copy of a model, which is in eval mode, for these example inputs."""
    axes = check_axes(axes, get_named_inputs(model, *example)) if axes else axes
    _check_dtypes(model, example)
    export_inputs = widen_batch(*example) if dynamic else example
    with ExitStack() as stack:
        opaque = stack.enter_context(opaque_modules_replaced(model, leave, *export_inputs)) if leave else ()
        ignored_autocast = stack.enter_context(autocast_off())
        stack.enter_context(caller_dtype())
        program = export_after_first_run(model, example, export_inputs, dynamic=dynamic, axes=axes)
    graph_module = _build_graph_module(program, model, opaque)
    _check_output(graph_module, type(model).__name__)
    is_widened = _has_widened_batch(graph_module, example)
    set_origin(graph_module, is_widened=is_widened, leave=leave, ignored_autocast=tuple(sorted(ignored_autocast)))
    record_sizes(graph_module, pytree.tree_leaves(export_inputs if is_widened else example))
    _warn_about_autocast(graph_module)
    if axes:
        sizes = find_allowed_sizes(program, axes)
        compared_sizes = check_at_other_sizes(model, graph_module.eval(), example, axes, sizes)
        set_origin(graph_module, axes=axes, size_steps=sizes.steps, compared_sizes=compared_sizes)
    if dynamic:
        _warn_about_fixed_batch(graph_module)
    return graph_module


def _check_output(graph_module: fx.GraphModule, name: str) -> None:
    """Raise if the model returns no tensor, as a forward without a return statement does."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    if not output.all_input_nodes:
        is_none = all(leaf is None for leaf in pytree.tree_leaves(output.args[0]))
        value = "None" if is_none else short_repr(output.args[0])
        raise CaptureError(f"{name}.forward returns {value}, not a tensor: return the tensors that the model computes")


def as_module(program: ExportedProgram) -> nn.Module:
    """Convert a program to a model that can be run and captured again."""
    with export_logs_silenced():
        return _module_with_state(program)


def _module_with_state(program: ExportedProgram) -> nn.Module:
    """Build the modules of a program with its whole state, including tensors that its graph does not read."""
    owner = program.module(check_guards=False)
    for name, value in program.state_dict.items():
        path, _, leaf = name.rpartition(".")
        module = owner.get_submodule(path)
        if not hasattr(module, leaf):
            module.register_buffer(leaf, value)
    return owner


def _build_graph_module(
    program: ExportedProgram, owner: nn.Module, opaque: Sequence[OpaqueModule] = ()
) -> fx.GraphModule:
    """Put the exported graph on the modules of `owner`, lift its operations and check it."""
    with export_logs_silenced():
        exported = program.module(check_guards=False)
        inline_wrapped_blocks(exported)
        is_functional = functionalize_writes(exported.graph)
        if not is_functional:
            # torch's own functionalization: slower, and it takes batch norms apart
            program = program.run_decompositions({})
            exported = program.module(check_guards=False)
            inline_wrapped_blocks(exported)
            functionalize_writes(exported.graph)
            join_batch_norms(exported.graph)
    _fix_factory_dtypes(exported.graph)
    graph_module = CapturedGraph(exported, exported.graph, class_name=type(owner).__name__)
    _keep_constants(graph_module, exported, owner)
    adopt_modules(graph_module, owner)
    restore_opaque_modules(graph_module, opaque)
    set_origin(graph_module, fixed_batch=find_fixed_batches(program))
    remove_token_flattening(lift(graph_module, owner))
    return _finalize(graph_module)


def _fix_factory_dtypes(graph: fx.Graph) -> None:
    """Fix the dtype of tensors that forward creates, such as torch.arange(n), to the one of the capture.

    Otherwise they would have torch's default dtype at the time when the graph runs.
    """
    for node in graph.nodes:
        value = get_fake_tensor(node)
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or value is None:
            continue
        argument_names = {argument.name for argument in node.target._schema.arguments}
        reads_tensor = any(get_fake_tensor(source) is not None for source in node.all_input_nodes)
        is_factory = {"dtype", "device", "layout"} <= argument_names and not reads_tensor
        if is_factory and value.dtype not in (torch.float32, node.kwargs.get("dtype")):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def _check_dtypes(model: nn.Module, inputs: BoundInputs) -> None:
    """Raise if the model fails on inputs of a float dtype that no parameter has.

    Such inputs may be intended, so the model is run to find out. torch.export alone would accept them.
    """
    input_dtypes = {
        leaf.dtype for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    parameter_dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if not input_dtypes or not parameter_dtypes or input_dtypes & parameter_dtypes:
        return
    try:
        with export_logs_silenced():
            dry_run(model, *inputs)
    except Exception as error:  # user code can raise any exception
        raise CaptureError(
            f"{type(model).__name__} itself fails on these example inputs{user_line(error)}. {type(error).__name__}: "
            f"{error}. The inputs are {_list_dtypes(input_dtypes)}, the parameters {_list_dtypes(parameter_dtypes)}: "
            "pass inputs of the model's dtype, in the calibration data too (arrays of numpy are float64 by default)"
        ) from error


def _list_dtypes(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _make_inputs_distinct(inputs: BoundInputs) -> BoundInputs:
    """Clone a tensor that is passed twice: torch.export would merge the two inputs into one."""
    known_ids: set[int] = set()

    def clone_repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in known_ids:
            known_ids.add(id(value))
            return value
        return value.clone()

    distinct: BoundInputs = pytree.tree_map(clone_repeated, inputs)
    return distinct


def _has_widened_batch(graph_module: fx.GraphModule, example: BoundInputs) -> bool:
    """Whether the graph was recorded with a batch of two although the example has a batch of one."""
    recorded_inputs = [get_fake_tensor(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    for value, recorded in zip(pytree.tree_leaves(example), recorded_inputs, strict=False):
        if not isinstance(value, Tensor) or recorded is None:
            continue
        if value.ndim > 1 and value.shape[0] == 1 and recorded.shape[0] != 1:
            return True
    return False


def _warn_about_fixed_batch(graph_module: fx.GraphModule) -> None:
    sizes = [f"{name!r} is fixed at {size}" for name, size in get_origin(graph_module).fixed_batch.items()]
    if sizes:
        message = (
            f"the first axis of {', '.join(sizes)}: the model computes with that number, so its graph takes inputs of "
            "this size only. Pass dynamic=False to accept a fixed size without this warning"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _warn_about_autocast(graph_module: fx.GraphModule) -> None:
    locations = get_origin(graph_module).ignored_autocast
    if locations:
        message = (
            f"torch.autocast at {', '.join(locations)} is ignored: the graph computes in the dtypes of the model's "
            "parameters, and a file computes in float32 wherever it is not quantized"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _finalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    for module in graph_module.modules():
        if "inplace" in vars(module):
            # In-place writes are explicit nodes of the graph by now. The modules are copies: the user's are unchanged.
            vars(module)["inplace"] = False
    check_graph(graph_module)
    return graph_module


def _keep_constants(graph_module: fx.GraphModule, exported: nn.Module, owner: nn.Module) -> None:
    """Register tensors that the model creates in its forward as buffers that are not part of the state_dict."""
    known = {name for name, _ in (*owner.named_parameters(remove_duplicate=False), *owner.named_buffers())}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target not in known:
            path, _, name = node.target.rpartition(".")
            value = getattr(exported.get_submodule(path), name)
            if isinstance(value, Tensor):
                node.target = f"constant_{node.name}"
                graph_module.register_buffer(node.target, value, persistent=False)


def load_if_path(model: Model, trust: bool) -> nn.Module | ExportedProgram:
    """Load an .onnx file, or a .pt2 file, which needs trust=True. Return a model that is not a path unchanged."""
    if not isinstance(model, str | Path):
        return model
    if Path(model).suffix.lower() == ".onnx":
        from scalepoint.onnx_reader import load_onnx  # noqa: PLC0415  # loads onnx

        return load_onnx(model)
    if not trust:
        raise CaptureError(
            f"{short_repr(str(model))} is a path: loading an exported program runs code from the file. Pass trust=True "
            "if you trust the file"
        )
    return load(Path(model))


def unwrap_model(model: object) -> nn.Module:
    """Return the model inside torch.compile or DataParallel wrappers.

    Raises:
        CaptureError: The value is not an nn.Module; the message says how to get one.
    """
    kind = type(model)
    if kind.__module__.startswith("torch.") and kind.__name__ in WRAPPERS:
        return unwrap_model(getattr(model, WRAPPERS[kind.__name__]))
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("this is a ScriptModule, which cannot be captured: pass the nn.Module it was made from")
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CaptureError(f"{model.__name__} is a class, not a model: pass {model.__name__}(...).eval()")
    if isinstance(model, ExportedProgram):
        raise CaptureError("this is an ExportedProgram: pass the nn.Module it was made from, or use transform()")
    if isinstance(model, Mapping) and model and all(isinstance(value, Tensor) for value in model.values()):
        raise CaptureError(
            "this is a state_dict, which has weights and no code: build the model, and load the weights with "
            "load_state_dict()"
        )
    raise CaptureError(f"{short_repr(model)} is not an nn.Module")


def check_model(model: nn.Module) -> None:
    """Raise for models that cannot be captured: lazy modules without shapes, and names that cannot be in code."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise CaptureError(
                f"{name or type(model).__name__} is a lazy module without shapes: run the model on one batch first"
            )
    reserved = sorted({*model._modules, *model._parameters, *model._buffers} & get_reserved_names())
    if reserved:
        raise CaptureError(
            f"{type(model).__name__}.{reserved[0]} has a name that torch.fx.GraphModule uses itself: rename it, or "
            f"wrap the model, nn.Sequential(model), so that its name is 0.{reserved[0]}"
        )
    for table in (model.named_modules(), model.named_parameters(), model.named_buffers()):
        for name, _ in table:
            if not all(map(is_valid_name, name.split("."))):
                raise CaptureError(
                    f"{name!r} cannot be a name in the code of a graph: rename it so that it has no quotes, "
                    "backslashes or line breaks and is not a Python keyword"
                )


def as_inputs(args: Any, kwargs: Mapping[str, Any] | None) -> BoundInputs:
    """Normalize inputs to a tuple and a dict. Arrays of numpy and inference tensors become plain tensors."""
    args, keyword = _as_tensors(args), _as_tensors(dict(kwargs or {}))
    if args is None and keyword:
        return (), keyword
    if isinstance(args, Mapping):
        return (), {**args, **keyword}
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        return (args,), keyword
    return tuple(args), keyword


def from_array(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor. The memory is shared if it is writable and has no negative strides."""
    is_shared = array.flags.writeable and all(step >= 0 for step in array.strides)
    return torch.from_numpy(array if is_shared else array.copy())


def as_tensor(value: np.ndarray | Tensor) -> Tensor:
    """Convert an array or an inference tensor to a tensor that autograd can use."""
    if isinstance(value, np.ndarray):
        return from_array(value)
    check_dense(value)
    return value.clone() if value.is_inference() else value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray | Tensor):
        return as_tensor(value)
    if type(value) in (list, tuple):
        return type(value)(map(_as_tensors, value))
    if type(value) is dict:
        return {key: _as_tensors(item) for key, item in value.items()}
    return value


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copying.deepcopy(model, _detach_computed_tensors(model))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Remove the attribute that "
            "cannot be copied, or call transform with copy=False, which shares the parameters"
        ) from error


def _detach_computed_tensors(model: nn.Module) -> dict[int, Any]:
    """Build a deepcopy memo with detached copies of computed tensors that are stored on modules.

    deepcopy fails on tensors with a grad_fn, such as the weight that torch.nn.utils.weight_norm stores.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    return {
        id(value): value.detach().clone()
        for value in attributes
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


def copy_module_tree(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """Copy a tree of modules over the same tensors. Modes, children and hooks of the copy are independent."""
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    copied = copying.copy(module)
    copies[id(module)] = copied
    attributes = vars(copied)
    for name, table in list(attributes.items()):
        if name.startswith("_") and isinstance(table, dict | set):  # tables of hooks, parameters, buffers
            attributes[name] = copying.copy(table)
    attributes["_modules"] = {
        name: None if child is None else copy_module_tree(child, copies) for name, child in module._modules.items()
    }
    return copied
