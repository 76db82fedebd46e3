"""Metadata of graphs and nodes, and what a node reads and returns: its arguments and its fake tensor.

scalepoint stores frozen values under one key of `meta`: a NodeInfo on a node, and one value per class on a graph. The
keys of torch ("val", "nn_module_stack", ...) are next to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, fx, nn

from scalepoint.compat.fast_export import copy_origin
from scalepoint.compat.torch_names import OpOverload
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
    """Return the kind of operation of a node of a captured graph, such as "conv" or "relu"."""
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
