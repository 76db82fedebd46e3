"""Blocks of torch.autocast and torch.set_grad_enabled in a forward: captured as what stands in them.

    with torch.autocast(..): y = f(x)  ->  y = f(x), in the types of the model's parameters

Autocast is how a model is trained and run fast in float; which types a file computes in is the target's affair. While a
model is traced autocast is off, so that no line sees a narrow tensor. torch.export keeps such blocks as calls of graphs
of their own, which stand in the graph itself here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from scalepoint.compat import patches_enabled
from scalepoint.compat.autocast import autocast_ignored
from scalepoint.compat.torch_names import HigherOrderOperator
from scalepoint.errors import CaptureError
from scalepoint.graph.user_traceback import is_user_file, recorded_line

_GRAPH = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}  # the place of the block's graph in the arguments


@contextmanager
def autocast_off() -> Iterator[set[str]]:
    """Inside this context, torch.autocast does not cast. Yields the locations of the blocks that would have."""
    locations: set[str] = set()

    def add_location(dtype: torch.dtype) -> None:
        locations.add(f"{_current_user_line()} to {str(dtype).removeprefix('torch.')}")

    with autocast_ignored(add_location):
        yield locations


def _current_user_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def inline_wrapped_blocks(graph_module: fx.GraphModule) -> None:
    """In place: the operations of such blocks where the blocks were called."""
    while blocks := [node for node in graph_module.graph.nodes if _name(node) in _GRAPH]:
        for node in blocks:
            _inline(graph_module, node)


def _name(node: fx.Node) -> str:
    is_block = node.op == "call_function" and isinstance(node.target, HigherOrderOperator)
    return str(getattr(node.target, "__name__", "")) if is_block else ""


def _inline(graph_module: fx.GraphModule, block: fx.Node) -> None:
    place = _GRAPH[_name(block)]
    # Strict torch.export (dynamo) does not run the patch. Without patches every block is recorded as enabled.
    if _name(block) == "wrap_with_autocast" and block.args[2] and patches_enabled():
        line = recorded_line(block.stack_trace)
        raise CaptureError(
            f"torch.autocast{line} cannot be captured here: it casts to {block.args[1]} in a graph that only the "
            "strict way of torch.export takes. Switch it off for the deployment, torch.autocast(..., enabled=False)"
        )
    called: Any = block.args[place]
    inner: Any = graph_module.get_submodule(str(called.target))
    values: dict[fx.Node, Any] = dict(
        zip((node for node in inner.graph.nodes if node.op == "placeholder"), block.args[place + 1 :], strict=True)
    )
    with graph_module.graph.inserting_before(block):
        for node in inner.graph.nodes:
            if node.op == "output":
                outputs = fx.map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = graph_module.graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    values[node].target = f"{called.target}.{node.target}"
    for user in list(block.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(block)
    if not called.users:
        graph_module.graph.erase_node(called)
