"""A captured graph as plain data: modules, nodes, inputs, how they are nested. Tensors are named, not held.

    captured graph --describe--> Described (JSON) + names of tensors      rebuilt.py goes the other way

Modules are torch's own layers by class and settings, and ours; a user's class is only a place for parameters. What
cannot be written so (a submodule that was left as it is, an operator of another package) is refused with its reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, fx, nn

from scalepoint.compat.torch_names import pytree, pytree_info
from scalepoint.errors import UsageError
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.graph.nodes import get_fake_tensor, get_info, get_state, module_path, set_state
from scalepoint.graph.operations import ComputedTensor, Operation
from scalepoint.graph.origin import get_origin
from scalepoint.graph.values import NotDescribedError, encode, function_name

CLASSES: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in MODULE_KINDS}
RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
)  # fmt: skip
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class FrozenData(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModuleData(FrozenData):
    """A module: of torch's by `kind`, "operation", "computed", or "" for a place of others."""

    path: str
    kind: str = ""
    settings: dict[str, Any] = {}
    none: list[str] = []  # parameters and buffers that are None


class NodeData(FrozenData):
    """A node of the graph; `path` is where it stood in the model."""

    name: str
    op: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    kind: str | None = None
    path: str = ""
    place: str | None = None
    sizes: list[int] | None = None


class InputData(FrozenData):
    """An example of an input: a tensor's sizes, with the axes that may change; or a plain value."""

    shape: list[int] | None = None
    dtype: str = ""
    free: list[int] = []
    value: Any = None


class GraphData(FrozenData):
    """A captured graph without its tensors."""

    name: str
    arguments: list[str]  # of forward
    takes: Any  # how inputs are nested
    gives: Any
    inputs: list[InputData]
    modules: list[ModuleData]
    shared: dict[str, str] = {}  # another path of a module
    tensors: dict[str, str]  # path -> parameter, frozen, buffer, constant (in no state_dict)
    tied: dict[str, str] = {}
    nodes: list[NodeData]
    fixed_batch: dict[str, int] = {}
    is_widened: bool = False
    axes: dict[str, dict[str, str]] = {}  # free ones by input, axis and name
    steps: dict[str, int] = {}
    tried: dict[str, int] = {}


@dataclass(frozen=True)
class GraphDescription:
    """What a graph was when it was captured; `explain_refusal` where that has no form as data. No state_dict has its
    constants."""

    data: GraphData | None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    why_not: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphDescription":
        return self  # nobody changes it, and a large graph has thousands of parts


def get_description(model: nn.Module) -> GraphDescription:
    return get_state(model, GraphDescription) or GraphDescription(None, why_not="it was not captured by this version")


def store_description(model: fx.GraphModule, description: GraphDescription | None = None) -> None:
    """Note on a captured graph what it is, before anything is made of it."""
    set_state(model, describe(model) if description is None else description)


def describe(model: fx.GraphModule) -> GraphDescription:
    """The graph as data, or the reason why it has no such form."""
    info = pytree_info(model.graph)
    if info is None:
        return GraphDescription(None, why_not="it was captured without example inputs")
    try:
        return _describe(model, info)
    except NotDescribedError as error:
        return GraphDescription(None, why_not=str(error))


def _describe(model: fx.GraphModule, info: Any) -> GraphDescription:
    named = dict(model.named_modules(remove_duplicate=False))
    paths: dict[int, str] = {}
    for path, module in named.items():
        paths.setdefault(id(module), path)
    called = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    unique_modules = {path: module for path, module in named.items() if paths[id(module)] == path}
    origin = get_origin(model)
    tensors, tied, constants = _tensors(model)
    data = GraphData(
        name=type(model).__name__,
        arguments=[str(each) for each in info.orig_args],
        takes=_describe_nesting(info.in_spec),
        gives=_describe_nesting(info.out_spec),
        inputs=[_input(node) for node in model.graph.nodes if node.op == "placeholder"],
        modules=[_module(path, module, path in called, paths) for path, module in unique_modules.items()],
        shared={path: paths[id(module)] for path, module in named.items() if paths[id(module)] != path},
        tensors=tensors,
        tied=tied,
        nodes=[_node(node, paths) for node in model.graph.nodes],
        fixed_batch=dict(origin.fixed_batch),
        is_widened=origin.is_widened,
        axes={
            name: {str(axis): each for axis, each in unique_modules.items()}
            for name, unique_modules in origin.axes.items()
        },
        steps=dict(origin.size_steps),
        tried=dict(origin.compared_sizes),
    )
    return GraphDescription(data, constants)


def _tensors(model: nn.Module) -> tuple[dict[str, str], dict[str, str], dict[str, Tensor]]:
    """What each tensor is, which are one, and those that no state_dict holds."""
    state = set(model.state_dict(keep_vars=True))
    kinds: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for path, value in model.named_parameters(remove_duplicate=False):
        kinds[path] = "parameter" if value.requires_grad else "frozen"
        tied |= {path: first[id(value)]} if id(value) in first else {}
        first.setdefault(id(value), path)
    constants = {}
    for path, held in model.named_buffers(remove_duplicate=False):
        kinds[path] = "buffer" if path in state else "constant"
        if path not in state:
            constants[path] = held.detach()
        tied |= {path: first[id(held)]} if id(held) in first else {}
        first.setdefault(id(held), path)
    return kinds, tied, constants


def _module(path: str, module: nn.Module, is_called: bool, paths: Mapping[int, str]) -> ModuleData:
    none = [name for table in (module._parameters, module._buffers) for name, value in table.items() if value is None]
    if isinstance(module, Operation):
        settings = {
            "kind": module.kind,
            "function": function_name(module.function),
            "arguments": {name: encode(value, paths) for name, value in module.arguments.items()},
            "positional": module.positional,
            "in_train": {name: encode(value, paths) for name, value in module.in_train.items()},
        }
        return ModuleData(path=path, kind="operation", settings=settings)
    if isinstance(module, ComputedTensor):
        steps = [
            {
                "function": function_name(step.function),
                "args": [encode(value, paths) for value in step.args],
                "kwargs": {name: encode(value, paths) for name, value in step.kwargs.items()},
            }
            for step in module.steps
        ]
        return ModuleData(path=path, kind="computed", settings={"steps": steps})
    if not is_called:
        return ModuleData(path=path, none=none)
    if MODULE_KINDS.get(type(module)) is None:
        raise NotDescribedError(f"{path} is called as it is, and {type(module).__name__} is no layer of torch")
    if isinstance(module, nn.RNNBase):
        settings = {name: getattr(module, name) for name in RECURRENT}
        return ModuleData(path=path, kind=type(module).__name__, settings=settings)
    settings = {name: encode(value, paths) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    return ModuleData(path=path, kind=type(module).__name__, settings=settings, none=none)


def _node(node: fx.Node, paths: Mapping[int, str]) -> NodeData:
    target = function_name(node.target) if node.op == "call_function" else str(node.target)  # type: ignore[arg-type]
    if node.op == "call_method":
        raise NotDescribedError(f"the method {target}")
    info = get_info(node)
    return NodeData(
        name=node.name,
        op=node.op,
        target=target,
        args=[encode(value, paths) for value in node.args] if node.op != "output" else [encode(node.args[0], paths)],
        kwargs={name: encode(value, paths) for name, value in node.kwargs.items()},
        kind=info.kind,
        path=module_path(node),
        place=info.path,
        sizes=None if info.sizes is None else list(info.sizes),
    )


def _input(node: fx.Node) -> InputData:
    value = get_fake_tensor(node)
    if value is None:
        return InputData(value=encode(node.meta.get("val"), {}))
    free = [axis for axis, size in enumerate(value.shape) if not isinstance(size, int)]
    sizes = [size if isinstance(size, int) else _hint(size) for size in value.shape]
    return InputData(shape=sizes, dtype=str(value.dtype).removeprefix("torch."), free=free)


def _hint(size: torch.SymInt) -> int:
    hint = size.node.hint
    if hint is None:
        raise NotDescribedError("an input without a known size")
    return int(hint)


def _describe_nesting(spec: Any) -> Any:
    """How values are nested: lists, tuples and dicts around leaves; another class that is a dict is written as one."""
    if spec.is_leaf():
        return None
    children = [_describe_nesting(child) for child in spec.children()]
    if spec.type is tuple:
        return {"tuple": children}
    if isinstance(spec.type, type) and issubclass(spec.type, list):
        return {"list": children}
    if isinstance(spec.type, type) and issubclass(spec.type, dict) and isinstance(spec.context, list):
        return {"dict": [list(map(str, spec.context)), children]}
    raise NotDescribedError(f"inputs or outputs in a {getattr(spec.type, '__name__', spec.type)}")


def to_tree_spec(nested: Any) -> Any:
    """What `_describe_nesting` wrote, as torch has it."""
    return pytree.tree_structure(_object(nested))


def _object(nested: Any) -> Any:
    if nested is None:
        return 0
    ((kind, held),) = nested.items()
    if kind == "dict":
        return dict(zip(held[0], map(_object, held[1]), strict=True))
    return {"tuple": tuple, "list": list}[kind](map(_object, held))


def make_example(model: nn.Module) -> Any:
    """Inputs of the shapes that a graph was captured for: noise, zeros where whole numbers are wanted."""
    data = get_description(model).data
    if data is None:
        raise UsageError("the model does not know its inputs: give example inputs")
    inputs: list[Any] = []
    for each in data.inputs:
        dtype = getattr(torch, each.dtype) if each.dtype else None
        if each.shape is None or dtype is None:
            inputs.append(each.value)
        elif dtype.is_floating_point:
            inputs.append(torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
        else:
            inputs.append(torch.zeros(each.shape, dtype=dtype))
    args, kwargs = pytree.tree_unflatten(inputs, to_tree_spec(data.takes))
    return kwargs or args
