"""Capture the operations inside torch.autocast and torch.set_grad_enabled blocks without the blocks.

    with torch.autocast(..): y = f(x)  ->  y = f(x), in the dtypes of the model's parameters

Autocast is a setting for training and for fast float inference. The dtypes in a file are decided by the target, so
autocast is off while a model is traced. torch.export keeps such blocks as calls of subgraphs; they are inlined here.
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

# Higher-order operators for blocks, and the index of the block's graph in their arguments.
_SUBGRAPH_INDEX = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}


@contextmanager
def autocast_off() -> Iterator[set[str]]:
    """Inside this context, torch.autocast does not cast. Yields the locations of the blocks that would have."""
    locations: set[str] = set()

    def add_location(dtype: torch.dtype) -> None:
        locations.add(f"{_current_user_line()} to {str(dtype).removeprefix('torch.')}")

    with autocast_ignored(add_location):
        yield locations


def _current_user_line() -> str:
    """Return file:line of the innermost frame of user code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def inline_wrapped_blocks(graph_module: fx.GraphModule) -> None:
    """Replace the calls of such blocks by their operations, in place. Blocks may be nested."""
    while blocks := [node for node in graph_module.graph.nodes if _block_name(node) in _SUBGRAPH_INDEX]:
        for node in blocks:
            _inline(graph_module, node)


def _block_name(node: fx.Node) -> str:
    is_block = node.op == "call_function" and isinstance(node.target, HigherOrderOperator)
    return str(getattr(node.target, "__name__", "")) if is_block else ""


def _inline(graph_module: fx.GraphModule, block: fx.Node) -> None:
    index = _SUBGRAPH_INDEX[_block_name(block)]
    # Strict torch.export (dynamo) does not run the patch. Without patches every block is recorded as enabled.
    if _block_name(block) == "wrap_with_autocast" and block.args[2] and patches_enabled():
        line = recorded_line(block.stack_trace)
        raise CaptureError(
            f"torch.autocast{line} cannot be captured: it casts to {block.args[1]}, and this model can only be "
            "exported in strict mode, where autocast stays on. Turn it off for deployment: "
            "torch.autocast(..., enabled=False)"
        )
    subgraph_node: Any = block.args[index]
    subgraph: Any = graph_module.get_submodule(str(subgraph_node.target))
    placeholders = (node for node in subgraph.graph.nodes if node.op == "placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders, block.args[index + 1 :], strict=True))
    with graph_module.graph.inserting_before(block):
        for node in subgraph.graph.nodes:
            if node.op == "output":
                outputs = fx.map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = graph_module.graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    values[node].target = f"{subgraph_node.target}.{node.target}"
    for user in list(block.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(block)
    if not subgraph_node.users:
        graph_module.graph.erase_node(subgraph_node)
