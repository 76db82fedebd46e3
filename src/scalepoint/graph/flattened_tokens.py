"""A linear layer that flattens its tokens for the product and restores them is one on the tokens themselves.

linear(x.view(-1, k)).view(*batch, n)   ->   linear(x)         GPT-2's Conv1D is written so, with addmm
"""

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from scalepoint.graph.nodes import get_fake_tensor, get_kind
from scalepoint.graph.operations import Operation
from scalepoint.graph.products import affine


def remove_token_flattening(graph_module: fx.GraphModule) -> None:
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and get_kind(node) == "linear" and len(node.users) == 1:
            flat, back = node.args[0], next(iter(node.users))
            if _is_reshape(flat) and _is_reshape(back) and back.args[0] is node and _restores(flat, node, back):
                module = graph_module.get_submodule(str(node.target))
                if not isinstance(module, Operation) or _takes_tokens(module):
                    node.args = (flat.args[0],)
                    node.meta["val"] = back.meta["val"]
                    back.replace_all_uses_with(node)
                    graph_module.graph.erase_node(back)
                    if not flat.users:
                        graph_module.graph.erase_node(flat)
    graph_module.recompile()


def _takes_tokens(operation: Operation) -> bool:
    """Whether the operation takes more than two axes."""
    return operation.function in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default, affine)


def _is_reshape(node: object) -> bool:
    return isinstance(node, fx.Node) and get_kind(node) == "reshape" and node.op == "call_function"


def _restores(flat: fx.Node, linear: fx.Node, back: fx.Node) -> bool:
    """Whether all axes but the last are joined before the product and the same again after it."""
    source = flat.args[0] if isinstance(flat.args[0], fx.Node) else flat
    values = [get_fake_tensor(node) for node in (source, flat, linear, back)]
    if any(value is None for value in values):
        return False
    x, rows, product, result = (list(value.shape) for value in values if value is not None)
    if len(rows) != 2 or len(x) < 3 or len(x) != len(result):
        return False
    pairs = [*zip(x[:-1], result[:-1], strict=True), (x[-1], rows[-1]), (product[-1], result[-1])]
    return all(statically_known_true(one == other) for one, other in pairs)
