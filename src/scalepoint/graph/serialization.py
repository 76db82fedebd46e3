"""A captured graph as plain data: modules, nodes and inputs. Tensors are stored elsewhere and named here.

    captured graph --describe--> GraphData (JSON) + names of tensors --deserialization.rebuild--> captured graph

Layers of torch are stored by class and settings. A user's class becomes an empty module that owns parameters. A graph
that has no such form (it calls a submodule of leave=, or an operator of another package) is described by the reason.
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
from scalepoint.graph.values import NotEncodableError, encode, function_name

LAYER_CLASSES: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in MODULE_KINDS}
RNN_ARGUMENTS = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
)  # fmt: skip
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class SavedData(BaseModel):
    """Base of the data classes. Field names are the keys of saved folders and must not change."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModuleData(SavedData):
    """A module. `kind` is a class of torch.nn, "operation", "computed", or "" for a module that only owns others."""

    path: str
    kind: str = ""
    settings: dict[str, Any] = {}
    none: list[str] = []  # parameters and buffers that are None


class NodeData(SavedData):
    """A node of the graph.

    `kind`, `place` and `sizes` are the fields `kind`, `path` and `sizes` of its NodeInfo; `path` is the module of the
    user's model that the operation is in.
    """

    name: str
    op: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    kind: str | None = None
    path: str = ""
    place: str | None = None
    sizes: list[int] | None = None


class InputData(SavedData):
    """An example input: shape, dtype and free axes of a tensor, or a plain value."""

    shape: list[int] | None = None
    dtype: str = ""
    free: list[int] = []
    value: Any = None


class GraphData(SavedData):
    """A captured graph without its tensors."""

    name: str
    arguments: list[str]  # argument names of forward
    takes: Any  # nesting of the inputs, see _describe_nesting
    gives: Any  # nesting of the outputs
    inputs: list[InputData]
    modules: list[ModuleData]
    shared: dict[str, str] = {}  # further path of a module -> its first path
    tensors: dict[str, str]  # path -> "parameter", "frozen", "buffer", or "constant" (not in the state_dict)
    tied: dict[str, str] = {}  # further path of a tensor -> its first path
    nodes: list[NodeData]
    fixed_batch: dict[str, int] = {}
    is_widened: bool = False
    axes: dict[str, dict[str, str]] = {}  # free axes: input -> axis -> name
    steps: dict[str, int] = {}  # name of a free axis -> the step in which its size may change
    tried: dict[str, int] = {}  # name of a free axis -> another size at which graph and model were compared
    input_names: list[str] = []  # names in the file that the model was read from
    output_names: list[str] = []


@dataclass(frozen=True)
class GraphDescription:
    """A captured graph as data and its constants, which are not in the state_dict; `why_not` if there are no data."""

    data: GraphData | None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    why_not: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphDescription":
        return self  # it is never changed, and a large graph has thousands of parts


def get_description(model: nn.Module) -> GraphDescription:
    """Return the description that `store_description` stored on a graph."""
    return get_state(model, GraphDescription) or GraphDescription(None, why_not="it was not captured by this version")


def store_description(model: fx.GraphModule, description: GraphDescription | None = None) -> None:
    """Store the description of a captured graph on it, before the graph is transformed."""
    set_state(model, describe(model) if description is None else description)


def describe(model: fx.GraphModule) -> GraphDescription:
    """Describe a graph as data, or give the reason why that is not possible."""
    info = pytree_info(model.graph)
    if info is None:
        return GraphDescription(None, why_not="it was captured without example inputs")
    try:
        return _describe(model, info)
    except NotEncodableError as error:
        return GraphDescription(None, why_not=str(error))


def _describe(model: fx.GraphModule, info: Any) -> GraphDescription:
    modules = dict(model.named_modules(remove_duplicate=False))
    paths: dict[int, str] = {}
    for path, module in modules.items():
        paths.setdefault(id(module), path)
    called = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    unique_modules = {path: module for path, module in modules.items() if paths[id(module)] == path}
    origin = get_origin(model)
    tensors, tied, constants = _describe_tensors(model)
    data = GraphData(
        name=type(model).__name__,
        arguments=[str(name) for name in info.orig_args],
        takes=_describe_nesting(info.in_spec),
        gives=_describe_nesting(info.out_spec),
        inputs=[_describe_input(node) for node in model.graph.nodes if node.op == "placeholder"],
        modules=[_describe_module(path, module, path in called, paths) for path, module in unique_modules.items()],
        shared={path: paths[id(module)] for path, module in modules.items() if paths[id(module)] != path},
        tensors=tensors,
        tied=tied,
        nodes=[_describe_node(node, paths) for node in model.graph.nodes],
        fixed_batch=dict(origin.fixed_batch),
        is_widened=origin.is_widened,
        axes={
            input_name: {str(axis): axis_name for axis, axis_name in axis_names.items()}
            for input_name, axis_names in origin.axes.items()
        },
        steps=dict(origin.size_steps),
        tried=dict(origin.compared_sizes),
        input_names=list(origin.interface_names.inputs),
        output_names=list(origin.interface_names.outputs),
    )
    return GraphDescription(data, constants)


def _describe_tensors(model: nn.Module) -> tuple[dict[str, str], dict[str, str], dict[str, Tensor]]:
    """Return the fields `tensors` and `tied` of GraphData, and the constants."""
    in_state_dict = set(model.state_dict(keep_vars=True))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    kinds: dict[str, str] = {}
    tied: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    first_paths: dict[int, str] = {}
    for path, tensor in {**parameters, **buffers}.items():
        if path in parameters:
            kinds[path] = "parameter" if tensor.requires_grad else "frozen"
        elif path in in_state_dict:
            kinds[path] = "buffer"
        else:
            kinds[path] = "constant"
            constants[path] = tensor.detach()
        first_path = first_paths.setdefault(id(tensor), path)
        if first_path != path:
            tied[path] = first_path
    return kinds, tied, constants


def _describe_module(path: str, module: nn.Module, is_called: bool, paths: Mapping[int, str]) -> ModuleData:
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
        raise NotEncodableError(f"{path} is called as it is, and {type(module).__name__} is not a layer of torch")
    if isinstance(module, nn.RNNBase):
        settings = {name: getattr(module, name) for name in RNN_ARGUMENTS}
        return ModuleData(path=path, kind=type(module).__name__, settings=settings)
    settings = {name: encode(value, paths) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    return ModuleData(path=path, kind=type(module).__name__, settings=settings, none=none)


def _describe_node(node: fx.Node, paths: Mapping[int, str]) -> NodeData:
    target = function_name(node.target) if node.op == "call_function" else str(node.target)  # type: ignore[arg-type]
    if node.op == "call_method":
        raise NotEncodableError(f"it calls the method {target}")
    info = get_info(node)
    return NodeData(
        name=node.name,
        op=node.op,
        target=target,
        args=[encode(value, paths) for value in (node.args[:1] if node.op == "output" else node.args)],
        kwargs={name: encode(value, paths) for name, value in node.kwargs.items()},
        kind=info.kind,
        path=module_path(node),
        place=info.path,
        sizes=None if info.sizes is None else list(info.sizes),
    )


def _describe_input(node: fx.Node) -> InputData:
    value = get_fake_tensor(node)
    if value is None:
        return InputData(value=encode(node.meta.get("val"), {}))
    free = [axis for axis, size in enumerate(value.shape) if not isinstance(size, int)]
    sizes = [size if isinstance(size, int) else _example_size(size) for size in value.shape]
    return InputData(shape=sizes, dtype=str(value.dtype).removeprefix("torch."), free=free)


def _example_size(size: torch.SymInt) -> int:
    """Return the size in the example for which the graph was captured."""
    hint = size.node.hint
    if hint is None:
        raise NotEncodableError("it has an input without a known size")
    return int(hint)


def _describe_nesting(spec: Any) -> Any:
    """Describe nested lists, tuples and dicts around leaves, which are None. Subclasses are described as their base."""
    if spec.is_leaf():
        return None
    children = [_describe_nesting(child) for child in spec.children()]
    if spec.type is tuple:
        return {"tuple": children}
    if isinstance(spec.type, type) and issubclass(spec.type, list):
        return {"list": children}
    if isinstance(spec.type, type) and issubclass(spec.type, dict) and isinstance(spec.context, list):
        return {"dict": [list(map(str, spec.context)), children]}
    raise NotEncodableError(f"it has inputs or outputs in a {getattr(spec.type, '__name__', spec.type)}")


def to_tree_spec(nesting: Any) -> Any:
    """Convert the result of `_describe_nesting` back to a TreeSpec of torch."""
    return pytree.tree_structure(_to_nested_zeros(nesting))


def _to_nested_zeros(nesting: Any) -> Any:
    """Build nested lists, tuples and dicts with 0 for every leaf."""
    if nesting is None:
        return 0
    ((kind, content),) = nesting.items()
    if kind == "dict":
        keys, values = content
        return dict(zip(keys, map(_to_nested_zeros, values), strict=True))
    return {"tuple": tuple, "list": list}[kind](map(_to_nested_zeros, content))


def make_example(model: nn.Module) -> Any:
    """Make inputs of the shapes that a graph was captured for: noise for floats, zeros for integers."""
    data = get_description(model).data
    if data is None:
        raise UsageError("the shapes of the inputs are not stored with this model: pass example inputs")
    inputs: list[Any] = []
    for input_data in data.inputs:
        dtype = getattr(torch, input_data.dtype) if input_data.dtype else None
        if input_data.shape is None or dtype is None:
            inputs.append(input_data.value)
        elif dtype.is_floating_point:
            inputs.append(torch.randn(input_data.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
        else:
            inputs.append(torch.zeros(input_data.shape, dtype=dtype))
    args, kwargs = pytree.tree_unflatten(inputs, to_tree_spec(data.takes))
    return kwargs or args
