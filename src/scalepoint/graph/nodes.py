"""What graphs and nodes carry, and what a node says: its arguments, its value, whether it is always the same.

All that scalepoint stores on a graph or a node is frozen and stands under one key of `meta`: a NodeInfo on a node, one
value per class on a graph. torch's own keys ("val", "nn_module_stack", ...) stand next to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from scalepoint.compat.fast_export import copy_origin
from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.kinds import is_in_place
from scalepoint.graph.operations import Reference, Slot

KEY = "scalepoint"
Value = TypeVar("Value")


@dataclass(frozen=True)
class NodeInfo:
    """What scalepoint stores on a node."""

    kind: str | None = None  # the name by which patterns find the operation
    path: str | None = None  # the module of the user's model that ran it
    replaced_layer: str | None = None  # the layer that a conversion replaced by this node
    sizes: tuple[int, ...] | None = None  # seen in a run, where they depend on values
    decomposed_from: Any = None  # the operation that was decomposed into this one
    macs: int | None = None  # of a module that was not captured


def get_info(node: fx.Node) -> NodeInfo:
    info = node.meta.get(KEY)
    return info if isinstance(info, NodeInfo) else NodeInfo()


def set_info(node: fx.Node, **changes: Any) -> None:
    """Change fields of the NodeInfo of a node."""
    node.meta[KEY] = replace(get_info(node), **changes)


def inherit_meta(node: fx.Node, source: fx.Node, **changes: Any) -> None:
    """Give a new node the meta of the one that it replaces or reads, with some fields of its NodeInfo changed."""
    node.meta = dict(source.meta)
    set_info(node, **changes)


def recorded_meta(node: fx.Node, decomposed: Any) -> dict[str, Any]:
    """Return the meta of the nodes that `compat.fast_export` records for a node, or for a part of `decomposed`."""
    original = get_info(node).decomposed_from or decomposed
    meta = copy_origin(node, decomposed)
    return meta if original is None else {**meta, KEY: NodeInfo(decomposed_from=original)}


def get_kind(node: fx.Node) -> str:
    """Return the kind of operation of a node, such as "conv2d" or "relu".

    Args:
        node: A node of a captured graph.
    """
    return get_info(node).kind or node.op


def get_state(model: nn.Module, kind: type[Value]) -> Value | None:
    """The value of this class that a graph carries."""
    values: Mapping[type, Any] = getattr(model, "meta", {}).get(KEY, {})
    return values.get(kind)


def set_state(model: fx.GraphModule, value: object) -> None:
    """Store a frozen value on a graph, in the place of an earlier one of its class."""
    # a new mapping each time: copies of a graph may share the old one
    model.meta[KEY] = {**model.meta.get(KEY, {}), type(value): value}


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of its schema; defaults left out are left out."""
    if not isinstance(node.target, OpOverload):
        return {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def iterate_nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_nodes(item)


def bind_argument(value: Any, inputs: list[fx.Node], root: nn.Module, holds: bool = True) -> Any:
    """An argument as the Operation holds it: parameters as references, other nodes as slots."""
    if isinstance(value, fx.Node):
        if holds and value.op == "get_attr" and isinstance(value.target, str):
            owner, _, name = value.target.rpartition(".")
            return Reference(root.get_submodule(owner), name)
        if value not in inputs:
            inputs.append(value)
        return Slot(inputs.index(value))
    if isinstance(value, list | tuple):
        return [bind_argument(item, inputs, root, holds) for item in value]
    return value


def module_path(node: fx.Node) -> str:
    """Where in the user's model an operation stands: the path of the innermost module that ran it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if not path.startswith("_empty_nn_module_stack")]
    return paths[-1].split("@")[0] if paths else ""


def get_fake_tensor(node: fx.Node) -> Tensor | None:
    """The fake tensor that export left as the value of a node: its shape and dtype."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def is_matrix(value: object) -> bool:
    """Whether a value is a parameter with two axes, as a linear layer has it."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    tensor = get_fake_tensor(value)
    return tensor is not None and tensor.ndim == 2


def name_dtypes(graph: fx.Graph) -> None:
    """Tensors that a forward makes have the type that was torch's default then, whatever it is when the graph runs."""
    for node in graph.nodes:
        value = get_fake_tensor(node)
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or value is None:
            continue
        takes = {argument.name for argument in node.target._schema.arguments}
        is_made = {"dtype", "device", "layout"} <= takes and all(
            get_fake_tensor(each) is None for each in node.all_input_nodes
        )
        if is_made and value.dtype not in (torch.float32, node.kwargs.get("dtype")):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def find_constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values are the same at every call: made of parameters, buffers and numbers alone."""
    written = find_written_buffers(graph)
    constant_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            is_constant = node.target not in written
        else:
            is_known = node.op == "call_function" or (node.op == "call_module" and bool(node.all_input_nodes))
            is_constant = (
                is_known and not _is_varying(node) and all(source in constant_nodes for source in node.all_input_nodes)
            )
        if is_constant:
            constant_nodes.add(node)
    return constant_nodes


def find_written_buffers(graph: fx.Graph) -> list[str]:
    """The buffers that a call changes."""
    return sorted({str(node.args[0].target) for node in graph.nodes if _writes_attribute(node)})


def _writes_attribute(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_in_place(node.target):  # type: ignore[arg-type]  # a callable
        return False
    return bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def find_random_nodes(graph: fx.GraphModule) -> list[str]:
    """The nodes that draw random numbers at every call; dropout, which does nothing in eval, is none of them."""
    return [node.name for node in graph.graph.nodes if _is_random(_get_function(graph, node))]


def _get_function(graph: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(graph.get_submodule(str(node.target)), "function", None) if node.op == "call_module" else node.target


def _is_random(function: Any) -> bool:
    if not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    return not any(word in str(function) for word in ("dropout", "attention", "rrelu"))


def _is_varying(node: fx.Node) -> bool:
    """Whether an operation draws numbers, writes, or is one that we do not look into."""
    if get_kind(node) == "left" or (node.op == "call_function" and is_in_place(node.target)):  # type: ignore[arg-type]
        return True
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
