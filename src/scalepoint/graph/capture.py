"""Capture: a model becomes one graph whose nodes are modules that own the model's parameters under their own names.

    model --copy--> same modules --torch.export--> aten graph --lift--> GraphModule over the copied modules

The caller's model is never touched: modules are copied (parameters too, unless copy=False), and modes, hooks and
random state stay as they were.
"""

import copy as copying
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from scalepoint.errors import CaptureError, shown
from scalepoint.graph.blame import user_line
from scalepoint.graph.check import check_graph
from scalepoint.graph.left import replaced, restore
from scalepoint.graph.lift import lift, writes_through_views
from scalepoint.graph.symbolic import trace

Inputs = Any


def capture(
    model: nn.Module | torch.export.ExportedProgram,
    args: Inputs = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    copy: bool = True,
    dynamic: bool = True,
    leave: Sequence[str] = (),
) -> fx.GraphModule:
    """The graph of a model for inputs like these.

    `args` is a tensor, a tuple of positional inputs, or a dict of keyword inputs; without any, torch.fx records what
    it can. The batch (axis 0) and, for integer
    inputs, the sequence (axis 1) stay dynamic where the model allows. copy=False shares the parameters. `leave` names
    submodules that are not looked into: they are called as they are.
    """
    if isinstance(model, torch.export.ExportedProgram):
        with _quiet():
            graph_module = _finish(model, _with_state(model)).eval()
            return copying.deepcopy(graph_module) if copy else graph_module
    _check_model(model)
    working = _copied(model) if copy else shadow(model)
    modes = {name: module.training for name, module in working.named_modules()}
    working.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if args is None and not kwargs:
            if leave:
                raise CaptureError("leave= needs example inputs: the outputs of a left module are seen in a run")
            graph_module = _checked(trace(working))
        else:
            inputs = _widened(*as_inputs(args, kwargs)) if dynamic else as_inputs(args, kwargs)
            with ExitStack() as stack:
                keys = stack.enter_context(replaced(working, leave, *inputs)) if leave else {}
                program = _export(working, *as_inputs(args, kwargs), dynamic)
            graph_module = _finish(program, working, keys)
    for name, module in graph_module.named_modules():
        place = name
        while place not in modes:  # a new operation takes the mode of the module it stands in
            place = place.rpartition(".")[0]
        module.training = modes[place]
    return graph_module


def _with_state(program: torch.export.ExportedProgram) -> nn.Module:
    """The modules of a program with all of its state, also what its graph does not read."""
    owner = program.module(check_guards=False)
    for name, value in program.state_dict.items():
        path, _, leaf = name.rpartition(".")
        module = owner.get_submodule(path)
        if not hasattr(module, leaf):
            module.register_buffer(leaf, value)
    return owner


def _finish(
    program: torch.export.ExportedProgram, owner: nn.Module, left: dict[int, str] | None = None
) -> fx.GraphModule:
    """The exported graph over the modules of `owner`, lifted and checked."""
    with _quiet():
        if writes_through_views(program.graph):
            program = program.run_decompositions({})
        unlifted = program.module(check_guards=False)
    graph_module = fx.GraphModule(unlifted, unlifted.graph, class_name=type(owner).__name__)
    _keep_constants(graph_module, unlifted, owner)
    _adopt(graph_module, owner)
    restore(graph_module, left or {})
    return _checked(lift(graph_module, owner))


def _adopt(graph_module: fx.GraphModule, owner: nn.Module) -> None:
    """Give the graph the modules, parameters and buffers of `owner`, in their order."""
    added = {name: child for name, child in graph_module._modules.items() if name not in owner._modules}
    constants = {name: value for name, value in graph_module._buffers.items() if name.startswith("constant_")}
    own = vars(graph_module)
    own["_modules"] = {**owner._modules, **added}
    own["_parameters"] = dict(owner._parameters)
    own["_buffers"] = {**owner._buffers, **constants}
    own["_non_persistent_buffers_set"] = owner._non_persistent_buffers_set | set(constants)


def _checked(graph_module: fx.GraphModule) -> fx.GraphModule:
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


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool
) -> torch.export.ExportedProgram:
    """The ladder: non-strict before strict, a dynamic batch before a fixed one; the first error is the one told."""
    first: Exception | None = None
    wide_args, wide_kwargs = _widened(args, kwargs)
    tries = [(False, True), (True, True), (False, False), (True, False)]
    for strict, is_dynamic in tries if dynamic else tries[2:]:
        inputs = (wide_args, wide_kwargs) if is_dynamic else (args, kwargs)
        shapes = pytree.tree_map(_dimensions, inputs) if is_dynamic else None
        if shapes is not None:
            shapes = {**_positional_names(model, shapes[0]), **shapes[1]} if inputs[1] else shapes[0]
        try:
            with _quiet():
                return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # torch.export raises every kind; each is a rung of the ladder
            if "not a known type" in str(error):
                _register_outputs(model, args, kwargs)
            first = first or error
    assert first is not None  # noqa: S101  # the loop ran
    raise CaptureError(_explained(model, first)) from first


def _register_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell torch.export of the dataclass or dict that the model gives, so that the next rung takes it."""
    kind = type(model(*args, **kwargs))
    if kind in pytree.SUPPORTED_NODES:
        return
    if issubclass(kind, dict):
        pytree.register_pytree_node(
            kind, lambda d: (list(d.values()), list(d)), lambda v, keys: kind(**dict(zip(keys, v, strict=True)))
        )
    elif is_dataclass(kind):
        torch.export.register_dataclass(kind)


def _explained(model: nn.Module, error: Exception) -> str:
    """What failed, at which line of the user's code, why, and the way out."""
    reason = str(error).strip().splitlines()
    return (
        f"{type(model).__name__} cannot be captured{user_line(error)}. "
        f"{type(error).__name__}: {reason[0] if reason else ''} "
        "Make that line independent of tensor values (torch.where, torch.cond), or leave the submodule that it stands "
        "in as it is: leave=['path.of.submodule']"
    )


def _check_model(model: object) -> None:
    if isinstance(model, str | Path):
        raise CaptureError(
            f"{shown(str(model))} is a path: loading an exported program runs code from the file. If you trust it, "
            "load it yourself and pass the program"
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{shown(model)} is not an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise CaptureError(f"{name or type(model).__name__} is a lazy module without shapes: run one batch first")


def as_inputs(args: Inputs, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, however they were given."""
    keyword = dict(kwargs or {})
    if isinstance(args, Mapping):
        return (), {**args, **keyword}
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        return (args,), keyword
    return tuple(args), keyword


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copying.deepcopy(model)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}): pass copy=False to share its "
            "parameters"
        ) from error


def shadow(module: nn.Module, seen: dict[int, nn.Module] | None = None) -> nn.Module:
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
    own["_modules"] = {name: None if child is None else shadow(child, seen) for name, child in module._modules.items()}
    return twin


def _widened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with a batch of two where it was one: torch.export takes an extent of one for a constant."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1:
            return value.repeat(2, *(1 for _ in value.shape[1:]))
        return value

    widened: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(widen, (args, kwargs))
    return widened


def _dimensions(value: Any) -> Any:
    """Which axes of an input may change: the batch, and the length of token sequences."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None
    auto = torch.export.Dim.AUTO
    return {0: auto, 1: auto} if not value.is_floating_point() and value.ndim == 2 else {0: auto}


def _positional_names(model: nn.Module, shapes: tuple[Any, ...]) -> dict[str, Any]:
    """Shapes of positional inputs by parameter name, which torch.export wants once there are keyword inputs."""
    names = list(inspect.signature(model.forward).parameters)
    return dict(zip(names, shapes, strict=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints and logs of its own internals; what matters to the user is raised."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
