"""Metadata of graphs and nodes, and properties of nodes: arguments, value, whether the value is constant.

scalepoint stores frozen values under one key of `meta`: a NodeInfo on a node, and one value per class on a graph. The
keys of torch ("val", "nn_module_stack", ...) are next to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from scalepoint.compat.fast_export import copy_origin
from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.kinds import OPAQUE, is_in_place
from scalepoint.graph.operations import Reference, Slot

KEY = "scalepoint"
Value = TypeVar("Value")


@dataclass(frozen=True)
class NodeInfo:
    """Metadata that scalepoint stores on a node."""

    kind: str | None = None  # the name by which patterns find the operation
    path: str | None = None  # the module of the user's model that ran it
    replaced_layer: str | None = None  # the layer that a conversion replaced by this node
    sizes: tuple[int, ...] | None = None  # shape in a run on the example, if the shape depends on values
    decomposed_from: Any = None  # the operation that was decomposed into this one
    macs: int | None = None  # MACs of one call of a submodule of leave=


def get_info(node: fx.Node) -> NodeInfo:
    info = node.meta.get(KEY)
    return info if isinstance(info, NodeInfo) else NodeInfo()


def set_info(node: fx.Node, **changes: Any) -> None:
    """Change fields of the NodeInfo of a node."""
    node.meta[KEY] = replace(get_info(node), **changes)


def inherit_meta(node: fx.Node, source: fx.Node, **changes: Any) -> None:
    """Copy the meta of the node that a new node replaces or reads, with some fields of its NodeInfo changed."""
    node.meta = dict(source.meta)
    set_info(node, **changes)


def recorded_meta(node: fx.Node, decomposed: Any) -> dict[str, Any]:
    """Return the meta of the nodes that `compat.fast_export` records for a node, or for a part of `decomposed`."""
    original = get_info(node).decomposed_from or decomposed
    meta = copy_origin(node, decomposed)
    return meta if original is None else {**meta, KEY: NodeInfo(decomposed_from=original)}


def get_kind(node: fx.Node) -> str:
    """Return the kind of operation of a node, such as "conv" or "relu".

    Args:
        node: A node of a captured graph.
    """
    return get_info(node).kind or node.op


def get_state(model: nn.Module, kind: type[Value]) -> Value | None:
    """Return the value of this class that is stored on a graph."""
    values: Mapping[type, Any] = getattr(model, "meta", {}).get(KEY, {})
    return values.get(kind)


def set_state(model: fx.GraphModule, value: object) -> None:
    """Store a frozen value on a graph. It replaces an earlier value of its class."""
    # Make a new mapping each time: copies of a graph may share the old one.
    model.meta[KEY] = {**model.meta.get(KEY, {}), type(value): value}


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by the names in its schema, without omitted defaults."""
    if not isinstance(node.target, OpOverload):
        return {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def iterate_nodes(value: Any) -> Iterator[fx.Node]:
    """Yield the nodes in an argument, which may be a nested list."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_nodes(item)


def bind_argument(value: Any, inputs: list[fx.Node], root: nn.Module, references_parameters: bool = True) -> Any:
    """Convert an argument to the form of an Operation: a parameter to a Reference, another node to a Slot.

    Args:
        value: The argument: a node, a constant, or a list of them.
        inputs: The nodes that slots count; new ones are appended.
        root: The module that owns the parameters.
        references_parameters: False makes parameters inputs too, with slots.
    """
    if isinstance(value, fx.Node):
        if references_parameters and value.op == "get_attr" and isinstance(value.target, str):
            owner, _, name = value.target.rpartition(".")
            return Reference(root.get_submodule(owner), name)
        if value not in inputs:
            inputs.append(value)
        return Slot(inputs.index(value))
    if isinstance(value, list | tuple):
        return [bind_argument(item, inputs, root, references_parameters) for item in value]
    return value


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module of the user's model that ran an operation; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if not path.startswith("_empty_nn_module_stack")]
    return paths[-1].split("@")[0] if paths else ""


def get_fake_tensor(node: fx.Node) -> Tensor | None:
    """Return the fake tensor that torch.export stores on a node, with its shape and dtype."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def is_matrix(value: object) -> bool:
    """Whether a value is a parameter with two axes, like the weight of a linear layer."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    tensor = get_fake_tensor(value)
    return tensor is not None and tensor.ndim == 2


def name_dtypes(graph: fx.Graph) -> None:
    """Fix the dtype of tensors that forward creates to the one of the capture.

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


def find_constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are the same in every call: those computed from parameters and buffers only."""
    written_buffers = find_written_buffers(graph)
    constant_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            is_constant = node.target not in written_buffers
        elif node.op == "call_function" or (node.op == "call_module" and node.all_input_nodes):
            is_constant = not _is_varying(node) and constant_nodes.issuperset(node.all_input_nodes)
        else:
            is_constant = False
        if is_constant:
            constant_nodes.add(node)
    return constant_nodes


def find_written_buffers(graph: fx.Graph) -> list[str]:
    """Return the names of the buffers that a call writes."""
    return sorted({str(node.args[0].target) for node in graph.nodes if _writes_attribute(node)})


def _writes_attribute(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_in_place(node.target):  # type: ignore[arg-type]  # a callable
        return False
    return bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def find_random_nodes(graph: fx.GraphModule) -> list[str]:
    """Return the names of nodes that draw random numbers in every call, except dropout, which does nothing in eval."""
    return [node.name for node in graph.graph.nodes if _is_random(_get_function(graph, node))]


def _get_function(graph: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "call_module":
        return getattr(graph.get_submodule(str(node.target)), "function", None)
    return node.target


def _is_random(function: Any) -> bool:
    if not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    return not any(word in str(function) for word in ("dropout", "attention", "rrelu"))


def _is_varying(node: fx.Node) -> bool:
    """Whether an operation may give different values in each call: it is random, writes in place, or is opaque."""
    if get_kind(node) == OPAQUE or (node.op == "call_function" and is_in_place(node.target)):  # type: ignore[arg-type]
        return True
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
