"""Find the nodes whose value is the same in every call, and those that write buffers or draw random numbers."""

from typing import Any

import torch
from torch import fx

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.kinds import OPAQUE, is_in_place
from scalepoint.graph.nodes import get_kind


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
