"""Writes in place become values: y = relu(x) for x.relu_(), and whoever looks at x afterwards looks at y.

    x[:, 0].mul_(2)      ->      v = mul(x[:, 0], 2);  y = select_scatter(x, v, 1, 0)

A write through views is carried to the tensor they look at, and the views that are read later look at the new one;
x.flatten(1).relu_() has nothing to carry where only the flat view is read afterwards.
torch's own way (run_decompositions) takes three times the capture and drops dropout; it remains for the rest.
"""

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.kinds import base_name, get_functional_overload, is_in_place

_VIEWS = ("slice", "select", "view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "detach")
_LISTS = ("split", "split_with_sizes", "chunk", "unbind")
_SCATTERS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


def functionalize_writes(graph: fx.Graph) -> bool:
    """Make the graph functional, in place; False when a write goes a way that is not known here."""
    order: dict[fx.Node, float] = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_in_place(node.target) or not isinstance(node.args[0], fx.Node):
            continue
        chain = _chain(node.args[0])
        if len(chain) == 1 and chain[0].op == "get_attr":
            continue  # a write to a buffer is meant
        if chain[-1].op != "get_attr" and _is_last_read(chain, node, order):
            chain = chain[:1]
        family = _find_live_views(chain, node, order)
        if chain[-1].op == "get_attr" or not all(view.target in _SCATTERS for view in chain[:-1]):
            return False
        if not (all(map(_is_always_view, family)) and _make_functional(node)):
            return False
        _update_readers(graph, node, chain, family, order)
    return True


def _make_functional(write: fx.Node) -> bool:
    """The overload that gives a new tensor, if that has the type of the written one: x.gt_(0) does not give a bool."""
    replacement = get_functional_overload(write.target)
    args, kwargs = fx.map_arg((write.args, write.kwargs), lambda node: node.meta.get("val"))
    try:
        result = replacement(*args, **kwargs)
    except Exception:  # no such overload, or a value that is not known
        return False
    write.target = replacement
    return bool(result.dtype == args[0].dtype)  # type: ignore[union-attr]


def is_view(node: fx.Node) -> bool:
    """Whether an operation gives another look at memory that its input holds, or may do so."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, OpOverload):
        return False
    returns = [returned.alias_info for returned in node.target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _is_always_view(view: fx.Node) -> bool:
    """A reshape may copy; these never do."""
    return view.target is operator.getitem or base_name(view.target) in (*_VIEWS, *_LISTS)  # type: ignore[arg-type]


def _chain(node: fx.Node) -> list[fx.Node]:
    """The views from what is written down to the tensor that holds the memory."""
    chain = [node]
    while is_view(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]  # is_view says that it is a node
    return chain


def _is_last_read(chain: list[fx.Node], write: fx.Node, order: dict[fx.Node, float]) -> bool:
    """Whether nothing that holds the written memory is read after the write, but for the view that it goes through."""
    seen, open_nodes = {chain[0]}, [chain[-1]]
    while open_nodes:
        node = open_nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(order[user] > order[write] for user in node.users):
            return False
        open_nodes += [user for user in node.users if is_view(user)]
    return True


def _find_live_views(chain: list[fx.Node], write: fx.Node, order: dict[fx.Node, float]) -> list[fx.Node]:
    """The views of the written tensor that exist now and are read later, in the order in which they were made."""
    views: list[fx.Node] = []
    open_nodes = [chain[-1]]
    while open_nodes:
        new_views = [user for user in open_nodes.pop().users if order[user] < order[write] and is_view(user)]
        views += new_views
        open_nodes += new_views
    needed = {chain[0]} if write.users else set()
    for view in sorted(views, key=order.__getitem__, reverse=True):
        if any(order[user] >= order[write] + 1 or user in needed for user in view.users):
            needed.add(view)
        if view in needed and view.args[0] is not chain[-1]:
            needed.add(view.args[0])  # type: ignore[arg-type]  # is_view says that it is a node
    return sorted(needed - {chain[-1]}, key=order.__getitem__)


def _update_readers(
    graph: fx.Graph, write: fx.Node, chain: list[fx.Node], family: list[fx.Node], order: dict[fx.Node, float]
) -> None:
    """The new value of the base, and later readers of the base and of its views on the new ones."""
    last = write

    def call(function: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any]) -> fx.Node:
        nonlocal last
        previous = last
        with graph.inserting_after(last):
            last = graph.call_function(function, args, kwargs)
        last.meta = dict(like.meta)
        order[last] = order[previous] + 1e-6  # behind the write, before what came next
        return last

    value = write
    for view, parent in pairwise(chain):
        value = call(_SCATTERS[view.target], (parent, value, *view.args[1:]), parent, dict(view.kwargs))
    renewed = {chain[-1]: value}
    for view in family:
        source = renewed[view.args[0]]  # type: ignore[index]  # is_view says that it is a node
        renewed[view] = call(view.target, (source, *view.args[1:]), view, dict(view.kwargs))
    if chain[0] in renewed and len(chain) > 1:
        renewed[write] = renewed[chain[0]]
    for old, new in renewed.items():
        for user in [user for user in old.users if order[user] >= order[write] + 1]:
            user.replace_input_with(old, new)


def join_batch_norms(graph: fx.Graph) -> None:
    """The batch norms that run_decompositions takes apart, as one operation again, which can be folded."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten._native_batch_norm_legit_no_training.default:
            continue
        readers = list(node.users)
        if not all(user.target is operator.getitem and user.args[1] == 0 for user in readers):
            continue
        x, weight, bias, mean, var, momentum, eps = node.args
        with graph.inserting_before(node):
            args = (x, weight, bias, mean, var, False, momentum, eps, False)
            batch_norm = graph.call_function(torch.ops.aten.batch_norm.default, args)
        batch_norm.meta = {**node.meta, "val": node.meta["val"][0]}
        for user in readers:
            user.replace_all_uses_with(batch_norm)
            graph.erase_node(user)
        graph.erase_node(node)
