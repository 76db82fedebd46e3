"""Replace in-place writes in an exported graph by new values: later readers of x.relu_() read y = relu(x).

    x[:, 0].mul_(2)      ->      v = mul(x[:, 0], 2);  y = select_scatter(x, v, 1, 0)

A write through a view is scattered into the base tensor, and views that are read later are taken of the new tensor.
That is not needed if only the written view is read later, as in x.flatten(1).relu_().
torch's own functionalization (run_decompositions) makes capture three times as slow and removes dropout, so it is used
only where this one does not apply.
"""

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.kinds import base_name, get_functional_overload, is_in_place

# Base names of operators whose results always share memory with their input: one view, or a list of views.
_VIEWS = ("slice", "select", "view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "detach")
_LISTS = ("split", "split_with_sizes", "chunk", "unbind")
_SCATTERS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


def functionalize_writes(graph: fx.Graph) -> bool:
    """Make the graph functional, in place. False if it has a write that is not supported here."""
    # Positions of the nodes are whole numbers. Nodes that replace a write get fractions between it and the next node.
    order: dict[fx.Node, float] = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_in_place(node.target) or not isinstance(node.args[0], fx.Node):
            continue
        chain = _views_to_base(node.args[0])  # the written view first, the base tensor last
        if len(chain) == 1 and chain[0].op == "get_attr":
            continue  # a write to a buffer is an intended side effect
        if chain[-1].op != "get_attr" and _is_last_read(chain, node, order):
            chain = chain[:1]  # nothing reads the rest of the memory later: no need to scatter into it
        live_views = _find_live_views(chain, node, order)
        writes_to_buffer = chain[-1].op == "get_attr"
        can_scatter = all(view.target in _SCATTERS for view in chain[:-1])
        if writes_to_buffer or not can_scatter or not all(map(_is_always_view, live_views)):
            return False
        if not _make_functional(node):
            return False
        _update_readers(graph, node, chain, live_views, order)
    return True


def _make_functional(write: fx.Node) -> bool:
    """Use the functional overload if it returns the dtype of the written tensor: gt(x, 0) is bool, x.gt_(0) is not."""
    replacement = get_functional_overload(write.target)
    args, kwargs = fx.map_arg((write.args, write.kwargs), lambda node: node.meta.get("val"))
    try:
        result = replacement(*args, **kwargs)
    except Exception:  # no such overload, or an argument without a recorded value
        return False
    write.target = replacement
    return bool(result.dtype == args[0].dtype)  # type: ignore[union-attr]


def is_view(node: fx.Node) -> bool:
    """Whether the result of an operation shares, or may share, memory with its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, OpOverload):
        return False
    returns = [returned.alias_info for returned in node.target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _is_always_view(view: fx.Node) -> bool:
    """Whether an operation never copies. A reshape may."""
    return view.target is operator.getitem or base_name(view.target) in (*_VIEWS, *_LISTS)  # type: ignore[arg-type]


def _views_to_base(node: fx.Node) -> list[fx.Node]:
    """Return the views from the written one down to the base tensor, which owns the memory."""
    chain = [node]
    while is_view(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]  # a node, because is_view is true
    return chain


def _is_last_read(chain: list[fx.Node], write: fx.Node, order: dict[fx.Node, float]) -> bool:
    """Whether no tensor that shares the written memory, except the written view, is read after the write."""
    visited, pending = {chain[0]}, [chain[-1]]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if any(order[user] > order[write] for user in node.users):
            return False
        pending += [user for user in node.users if is_view(user)]
    return True


def _find_live_views(chain: list[fx.Node], write: fx.Node, order: dict[fx.Node, float]) -> list[fx.Node]:
    """Return the views of the base tensor that exist before the write and are read after it, in graph order."""
    views: list[fx.Node] = []
    pending = [chain[-1]]
    while pending:
        new_views = [user for user in pending.pop().users if order[user] < order[write] and is_view(user)]
        views += new_views
        pending += new_views
    needed = {chain[0]} if write.users else set()
    for view in sorted(views, key=order.__getitem__, reverse=True):
        if any(_is_after(user, write, order) or user in needed for user in view.users):
            needed.add(view)
        if view in needed and view.args[0] is not chain[-1]:
            needed.add(view.args[0])  # type: ignore[arg-type]  # a node, because is_view is true
    return sorted(needed - {chain[-1]}, key=order.__getitem__)


def _is_after(node: fx.Node, write: fx.Node, order: dict[fx.Node, float]) -> bool:
    """Whether a node comes after a write, and is not one of those that replace it."""
    return order[node] >= order[write] + 1


def _update_readers(
    graph: fx.Graph, write: fx.Node, chain: list[fx.Node], live_views: list[fx.Node], order: dict[fx.Node, float]
) -> None:
    """Compute the new base and its views after the write, and let later readers read them."""
    last = write

    def call(function: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any]) -> fx.Node:
        nonlocal last
        previous = last
        with graph.inserting_after(last):
            last = graph.call_function(function, args, kwargs)
        last.meta = dict(like.meta)
        order[last] = order[previous] + 1e-6
        return last

    value = write
    for view, parent in pairwise(chain):
        value = call(_SCATTERS[view.target], (parent, value, *view.args[1:]), parent, dict(view.kwargs))
    replacements = {chain[-1]: value}
    for view in live_views:
        source = replacements[view.args[0]]  # type: ignore[index]  # a node, because is_view is true
        replacements[view] = call(view.target, (source, *view.args[1:]), view, dict(view.kwargs))
    if chain[0] in replacements and len(chain) > 1:
        replacements[write] = replacements[chain[0]]
    for old, new in replacements.items():
        for user in [user for user in old.users if _is_after(user, write, order)]:
            user.replace_input_with(old, new)


def join_batch_norms(graph: fx.Graph) -> None:
    """Replace the decomposed batch norms of run_decompositions by aten.batch_norm, which can be folded."""
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
