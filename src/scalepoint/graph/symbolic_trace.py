"""Capture without example inputs: torch.fx records modules, functions and methods, which become Operations.

torch.fx records no shapes and no control flow that depends on values. `z += y` is captured as `z = z + y`, which
differs if the old z has another name. With example inputs, torch.export records all of this correctly.
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

# Names of the positional arguments of functions, by kind.
_ARGUMENT_NAMES = {
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
_FUNCTIONAL_OPERATORS = {operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub}


def trace(model: nn.Module) -> fx.GraphModule:
    """Capture a model with torch.fx and lift its operations.

    Raises:
        CaptureError: torch.fx cannot record the model.
    """
    try:
        graph_module = fx.symbolic_trace(model)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured without example inputs{user_line(error)} "
            f"({type(error).__name__}: {error}): pass example inputs"
        ) from error
    for name, child in model.named_children():
        graph_module.add_module(name, child)
    _functionalize_writes(graph_module)
    _expand_attention(graph_module)
    tree = ModuleTree(graph_module)
    for node in list(graph_module.graph.nodes):
        _lift_node(tree, node)
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _functionalize_writes(graph_module: fx.GraphModule) -> None:
    """Let later readers of a tensor that is written in place read the result of the write."""
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node, index in order.items():
        if node.args and isinstance(node.args[0], fx.Node) and _writes_in_place(graph_module, node):
            for user in [user for user in node.args[0].users if order[user] > index]:
                user.replace_input_with(node.args[0], node)


def _writes_in_place(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(graph_module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and (node.target in _FUNCTIONAL_OPERATORS or bool(node.kwargs.get("inplace")))


def _lift_node(tree: ModuleTree, node: fx.Node) -> None:
    if node.op == "call_module":
        module = tree.modules[str(node.target)]
        kind = module.kind if isinstance(module, Operation) else MODULE_KINDS.get(type(module), "module")
        set_info(node, kind=kind, path=str(node.target))
        return
    if node.op not in ("call_function", "call_method"):
        return
    function, kind = _get_function_and_kind(node)
    set_info(node, kind=kind)
    if kind in LIFTED_KINDS and function is not None and node.all_input_nodes:
        _replace_by_operation(tree, node, kind, function)


def _get_function_and_kind(node: fx.Node) -> tuple[Any, str]:
    """Return the function or method that a node calls, or the one that is not in-place, and its kind."""
    if node.op == "call_function":
        function: Any = _FUNCTIONAL_OPERATORS.get(node.target, node.target)  # type: ignore[arg-type]
        return function, kind_of_function(function, dict(node.kwargs))
    name = str(node.target)
    if not name.startswith("__"):
        name = name.removesuffix("_")  # relu_ -> relu
    return getattr(torch.Tensor, name, None), KINDS_BY_NAME.get(name, name)


def _replace_by_operation(tree: ModuleTree, node: fx.Node, kind: str, function: Any) -> None:
    names = _ARGUMENT_NAMES.get(kind, ())
    arguments = {names[i] if i < len(names) else f"argument_{i}": value for i, value in enumerate(node.args)}
    arguments |= node.kwargs
    if "inplace" in arguments:
        arguments["inplace"] = False
    bound, inputs = bind_arguments(arguments, kind, tree.root)
    if not inputs:
        return  # computed from parameters only
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
    """Replace nn.MultiheadAttention by projections and an attention core if it is self-attention without masks."""
    tree = ModuleTree(graph_module)
    for node in list(graph_module.graph.nodes):
        module = tree.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.MultiheadAttention) and _is_plain_self_attention(node, module):
            _expand_node(tree, node, module)


def _is_plain_self_attention(node: fx.Node, module: nn.MultiheadAttention) -> bool:
    has_options = bool(set(node.kwargs) - {"need_weights"})
    has_one_input = len(node.args) == 3 and node.args[0] is node.args[1] is node.args[2]
    is_plain = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
    items = [user for user in node.users if user.target is operator.getitem]
    read_indices = {item.args[1] for item in items if item.users}
    # The second output, the attention weights, is not computed by the expanded form.
    reads_output_only = len(items) == len(node.users) and read_indices <= {0}
    return has_one_input and is_plain and not has_options and reads_output_only


def _expand_node(tree: ModuleTree, node: fx.Node, module: nn.MultiheadAttention) -> None:
    path, graph = str(node.target), node.graph
    heads, width = module.num_heads, module.head_dim

    def call(function: Any, *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    def add(name: str, kind: str, function: Any, bound: dict[str, Any], *inputs: fx.Node) -> fx.Node:
        target = tree.add(f"{path}.{name}", Operation(kind, function, bound, len(bound)))
        new_node = graph.call_module(target, inputs)
        set_info(new_node, kind=kind, path=path)
        return new_node

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
