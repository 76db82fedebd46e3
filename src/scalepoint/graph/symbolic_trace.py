"""Capture without example inputs: torch.fx records modules, functions and methods, and the lift names them alike.

It sees no shapes, no control flow that depends on values, and takes `z += y` for `z = z + y`, which differs where the
old z has another name; with example inputs torch.export sees all of it.
"""

import operator
from typing import Any

import torch
from torch import fx, nn

from scalepoint.errors import CaptureError
from scalepoint.graph.kinds import KINDS_BY_NAME, LIFTED_KINDS, MODULE_KINDS, kind_of_function
from scalepoint.graph.lift import bind_arguments
from scalepoint.graph.nodes import inherit_meta, set_info
from scalepoint.graph.operations import Operation, Reference, Slot
from scalepoint.graph.tree import ModuleTree
from scalepoint.graph.user_traceback import user_line

# Names of the arguments that functions of these kinds take by place.
_NAMES = {
    "linear": ("input", "weight", "bias"),
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv_transpose": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias"),
    "embedding": ("input", "weight"),
    "flatten": ("input", "start_dim", "end_dim"),
    "attention": ("query", "key", "value", "attn_mask"),
}
_FUNCTIONAL = {operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub}


def trace(model: nn.Module) -> fx.GraphModule:
    """The lifted graph of a model that torch.fx can record."""
    try:
        graph_module = fx.symbolic_trace(model)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be recorded without example inputs{user_line(error)} "
            f"({type(error).__name__}: {error}): pass inputs as the model takes them"
        ) from error
    for name, child in model.named_children():
        graph_module.add_module(name, child)
    _follow_writes(graph_module)
    _expand_attention(graph_module)
    tree = ModuleTree(graph_module)
    for node in list(graph_module.graph.nodes):
        _lift_node(tree, node)
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _follow_writes(graph_module: fx.GraphModule) -> None:
    """What is written in place becomes a new value, and whoever reads the old one afterwards reads the new one."""
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node, index in order.items():
        if node.args and isinstance(node.args[0], fx.Node) and _writes(graph_module, node):
            for user in [user for user in node.args[0].users if order[user] > index]:
                user.replace_input_with(node.args[0], node)


def _writes(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(graph_module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and (node.target in _FUNCTIONAL or bool(node.kwargs.get("inplace")))


def _lift_node(tree: ModuleTree, node: fx.Node) -> None:
    if node.op == "call_module":
        module = tree.modules[str(node.target)]
        kind = module.kind if isinstance(module, Operation) else MODULE_KINDS.get(type(module), "module")
        set_info(node, kind=kind, path=str(node.target))
        return
    if node.op not in ("call_function", "call_method"):
        return
    function: Any = node.target
    if node.op == "call_method":
        name = str(node.target).removesuffix("_") if not str(node.target).startswith("__") else str(node.target)
        function = getattr(torch.Tensor, name, None)
        kind = KINDS_BY_NAME.get(name, name)
    else:
        function = _FUNCTIONAL.get(function, function)
        kind = kind_of_function(function, dict(node.kwargs))
    set_info(node, kind=kind)
    if kind not in LIFTED_KINDS or function is None or not node.all_input_nodes:
        return
    _replace(tree, node, kind, function)


def _replace(tree: ModuleTree, node: fx.Node, kind: str, function: Any) -> None:
    names = _NAMES.get(kind, ())
    arguments = {names[i] if i < len(names) else f"argument_{i}": value for i, value in enumerate(node.args)}
    keyword = {name: False if name == "inplace" else value for name, value in node.kwargs.items()}
    bound, inputs = bind_arguments({**arguments, **keyword}, kind, tree.root)
    if not inputs:
        return  # made of parameters alone
    path = _owner_path(node)
    target = tree.add(f"{path}.{kind}" if path else kind, Operation(kind, function, bound, len(node.args)))
    with node.graph.inserting_before(node):
        lifted = node.graph.call_module(target, tuple(inputs))
    inherit_meta(lifted, node, path=path)
    node.replace_all_uses_with(lifted)
    node.graph.erase_node(node)


def _owner_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _expand_attention(graph_module: fx.GraphModule) -> None:
    """nn.MultiheadAttention as projections and an attention core, where it is self-attention without masks."""
    tree = ModuleTree(graph_module)
    for node in list(graph_module.graph.nodes):
        module = tree.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.MultiheadAttention) and _is_plain_self_attention(node, module):
            _expand(tree, node, module)


def _is_plain_self_attention(node: fx.Node, module: nn.MultiheadAttention) -> bool:
    takes = set(node.kwargs) - {"need_weights"}
    picks = [user for user in node.users if user.target is operator.getitem]
    reads = {user.args[1] for user in picks if user.users}
    one_input = len(node.args) == 3 and node.args[0] is node.args[1] is node.args[2]
    plain = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
    return one_input and plain and not takes and len(picks) == len(node.users) and reads <= {0}


def _expand(tree: ModuleTree, node: fx.Node, module: nn.MultiheadAttention) -> None:
    path, graph = str(node.target), node.graph
    heads, width = module.num_heads, module.head_dim

    def call(function: Any, *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    def add(name: str, kind: str, function: Any, bound: dict[str, Any], *inputs: fx.Node) -> fx.Node:
        target = tree.add(f"{path}.{name}", Operation(kind, function, bound, len(bound)))
        made = graph.call_module(target, inputs)
        set_info(made, kind=kind, path=path)
        return made

    with graph.inserting_before(node):
        x: Any = node.args[0]
        x = x if module.batch_first else call(torch.transpose, x, 0, 1)
        bias = None if module.in_proj_bias is None else Reference(module, "in_proj_bias")
        weights = {"input": Slot(0), "weight": Reference(module, "in_proj_weight"), "bias": bias}
        packed = add("in_proj", "linear", nn.functional.linear, weights, x)
        parts = [call(operator.getitem, call(torch.chunk, packed, 3, -1), index) for index in range(3)]
        split = [call(torch.transpose, call(torch.unflatten, part, -1, (heads, width)), 1, 2) for part in parts]
        slots = {"query": Slot(0), "key": Slot(1), "value": Slot(2)}
        core = add("attention", "attention", nn.functional.scaled_dot_product_attention, slots, *split)
        joined = call(torch.flatten, call(torch.transpose, core, 1, 2), 2)
        out = graph.call_module(f"{path}.out_proj", (joined,))
        out = out if module.batch_first else call(torch.transpose, out, 0, 1)
    for user in list(node.users):
        if user.users:
            user.replace_all_uses_with(out)
        graph.erase_node(user)
    graph.erase_node(node)
