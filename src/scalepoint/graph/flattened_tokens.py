"""Remove reshapes around a linear layer that flatten tokens and restore them, as Conv1D of GPT-2 does.

linear(x.view(-1, k)).view(*batch, n)   ->   linear(x)
"""

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from scalepoint.graph.nodes import get_fake_tensor, get_kind
from scalepoint.graph.operations import Operation
from scalepoint.graph.products import affine


def remove_token_flattening(graph_module: fx.GraphModule) -> None:
    """Remove such reshapes from a graph, in place."""
    for linear in list(graph_module.graph.nodes):
        if linear.op != "call_module" or get_kind(linear) != "linear" or len(linear.users) != 1:
            continue
        flatten, unflatten = linear.args[0], next(iter(linear.users))
        if not _is_reshape(flatten) or not _is_reshape(unflatten) or unflatten.args[0] is not linear:
            continue
        if not _restores_axes(flatten, linear, unflatten):
            continue
        module = graph_module.get_submodule(str(linear.target))
        if isinstance(module, Operation) and not _takes_tokens(module):
            continue
        linear.args = (flatten.args[0],)
        linear.meta["val"] = unflatten.meta["val"]
        unflatten.replace_all_uses_with(linear)
        graph_module.graph.erase_node(unflatten)
        if not flatten.users:
            graph_module.graph.erase_node(flatten)
    graph_module.recompile()


def _takes_tokens(operation: Operation) -> bool:
    """Whether the operation accepts inputs of more than two axes."""
    return operation.function in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default, affine)


def _is_reshape(node: object) -> bool:
    return isinstance(node, fx.Node) and get_kind(node) == "reshape" and node.op == "call_function"


def _restores_axes(flatten: fx.Node, linear: fx.Node, unflatten: fx.Node) -> bool:
    """Whether all axes but the last are joined before the layer and restored after it."""
    source = flatten.args[0] if isinstance(flatten.args[0], fx.Node) else flatten
    values = [get_fake_tensor(node) for node in (source, flatten, linear, unflatten)]
    shapes = [list(value.shape) for value in values if value is not None]
    if len(shapes) < len(values):
        return False
    x, rows, product, result = shapes
    if len(rows) != 2 or len(x) < 3 or len(x) != len(result):
        return False
    # Sizes may be symbolic: two of them are equal only if that holds for every batch and length.
    outer_sizes = list(zip(x[:-1], result[:-1], strict=True))
    last_sizes = [(x[-1], rows[-1]), (product[-1], result[-1])]
    return all(statically_known_true(size == other_size) for size, other_size in (*outer_sizes, *last_sizes))
