"""Conversions: rewrites of the graph before patterns are matched, such as removing identities.

Each conversion is a function that changes the graph in place and returns the number of its changes. All conversions are
repeated until none changes anything.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from scalepoint.graph.kinds import OPAQUE, base_name
from scalepoint.graph.nodes import get_fake_tensor, get_kind, set_info
from scalepoint.graph.operations import Operation, Reference, get_tensors
from scalepoint.graph.tree import ModuleTree
from scalepoint.patterns.gelu import join_gelu

POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_ASSERTS = ("assert", "assert_scalar", "assert_tensor_metadata", "assert_async", "sym_constrain_range_for_size")


def remove_asserts(model: fx.GraphModule) -> int:
    """Remove checks of shapes and values. They held for the example inputs."""
    nodes = [
        node
        for node in model.graph.nodes
        if node.op == "call_function" and base_name(node.target).strip("_") in _ASSERTS and not node.users
    ]
    for node in nodes:
        model.graph.erase_node(node)
    return len(nodes)


def remove_identities(model: fx.GraphModule) -> int:
    """Remove nn.Identity, alias and detach."""
    nodes = [node for node in model.graph.nodes if get_kind(node) == "identity" and len(node.all_input_nodes) == 1]
    for node in nodes:
        _bypass(model, node)
    return len(nodes)


def remove_pools_without_effect(model: fx.GraphModule) -> int:
    """Remove pools that change no input: windows of one value, or adaptive pools to the size of the input."""
    nodes = [node for node in model.graph.nodes if get_kind(node) in POOLS and _has_no_effect(model, node)]
    for node in nodes:
        _bypass(model, node)
    return len(nodes)


def _has_no_effect(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings if isinstance(module, Operation) else vars(module)
    if settings.get("return_indices"):
        return False
    if get_kind(node).startswith("adaptive"):
        return _all_equal(settings.get("output_size", 0), None)  # None: the size of the input
    return (
        _all_equal(settings.get("kernel_size", 0), 1)
        and _all_equal(settings.get("stride") or 1, 1)
        and _all_equal(settings.get("padding") or 0, 0)
        and (settings.get("divisor_override") or 1) == 1
    )


def _all_equal(value: object, expected: int | None) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(item == expected for item in items)


def _bypass(model: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    model.graph.erase_node(node)


def head_to_convolution(model: fx.GraphModule) -> int:
    """Replace linear(flatten(global pool)) by flatten(1x1 convolution), which keeps the layout of convolutions."""
    changed = 0
    for flatten in list(model.graph.nodes):
        pool = flatten.all_input_nodes[0] if get_kind(flatten) == "flatten" and flatten.all_input_nodes else None
        linear = next(iter(flatten.users)) if len(flatten.users) == 1 else None
        if pool is None or linear is None or linear.op != "call_module" or get_kind(linear) != "linear":
            continue
        if _pools_to_one(model, pool) and _flattens_to_channels(model, flatten) and _is_plain_linear(model, linear):
            _swap_flatten_and_linear(model, flatten, linear)
            changed += 1
    return changed


def _flattens_to_channels(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a flatten turns (batch, channels, 1, 1) into (batch, channels)."""
    value = get_fake_tensor(node.all_input_nodes[0])
    if node.op != "call_module" or (value is not None and value.ndim != 4):
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings if isinstance(module, Operation) else vars(module)
    return settings.get("start_dim", 0) in (1, -3) and settings.get("end_dim", -1) in (3, -1)


def _is_plain_linear(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a linear layer has a stored weight of shape (out, in), and one input."""
    module = model.get_submodule(str(node.target))
    if isinstance(module, Operation) and (module.has_transposed_weight or module.is_computed):
        return False
    return len(node.all_input_nodes) == 1


def _swap_flatten_and_linear(model: fx.GraphModule, flatten: fx.Node, linear: fx.Node) -> None:
    head = HeadConvolution(model.get_submodule(str(linear.target)))
    name = ModuleTree(model).add(f"{linear.target}_conv", head)
    with model.graph.inserting_before(linear):
        conv = model.graph.call_module(name, (flatten.all_input_nodes[0],))
        conv.meta = {"nn_module_stack": {}}
        set_info(conv, kind="head", replaced_layer=str(linear.target))
        new_flatten = model.graph.node_copy(flatten, lambda _: conv)
        new_flatten.meta = dict(flatten.meta) | {"val": linear.meta.get("val")}
    linear.replace_all_uses_with(new_flatten)
    model.graph.erase_node(linear)
    model.graph.erase_node(flatten)


def _pools_to_one(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an adaptive 2-d average pool to one value per channel."""
    if get_kind(node) != "adaptive_avg_pool" or node.op != "call_module":
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings.values() if isinstance(module, Operation) else [getattr(module, "output_size", None)]
    is_2d = isinstance(module, nn.AdaptiveAvgPool2d) or "2d" in str(getattr(module, "function", ""))
    return is_2d and any(size in (1, (1, 1), [1, 1]) for size in settings)


class HeadConvolution(nn.Module):
    """A linear layer as a 1x1 convolution with the same weight."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = Reference(linear, "weight")

    @property
    def weight(self) -> Tensor:
        return self.linear.value[:, :, None, None]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.linear.owner, "bias", None)

    def tensors(self) -> list[Tensor]:
        return get_tensors(self.linear.owner)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias)


def shorten_type_as(model: fx.GraphModule) -> int:
    """Let softmax(scores.float()).type_as(scores) read the dtype of q, so that the scores have one reader."""
    changed = 0
    for node in model.graph.nodes:
        if get_kind(node) != "type_as" or len(node.all_input_nodes) != 2:
            continue
        dtype_source = node.all_input_nodes[1]
        earlier_source = dtype_source
        while _has_dtype_of_first_operand(earlier_source):
            earlier_source = earlier_source.all_input_nodes[0]
        if earlier_source is not dtype_source and _get_dtype(earlier_source) is not None:
            node.replace_input_with(dtype_source, earlier_source)
            changed += 1
    return changed


def _has_dtype_of_first_operand(node: fx.Node) -> bool:
    if get_kind(node) not in ("matmul", "mul", "div", "add"):
        return False
    return _get_dtype(node) == _get_dtype(node.all_input_nodes[0])


def _get_dtype(node: fx.Node) -> torch.dtype | None:
    value = get_fake_tensor(node)
    return None if value is None else value.dtype


def infer_one_size(model: fx.GraphModule) -> int:
    """Replace view(x, [a, n, b]) by view(x, [a, -1, b]) if n is computed in the graph, so that it need not be."""
    changed = 0
    for node in model.graph.nodes:
        sizes = node.args[1] if get_kind(node) == "reshape" and len(node.args) == 2 else None
        if not isinstance(sizes, list | tuple) or -1 in sizes:
            continue
        if sum(isinstance(size, fx.Node) for size in sizes) == 1 and 0 not in sizes:
            node.args = (node.args[0], [-1 if isinstance(size, fx.Node) else size for size in sizes])
            changed += 1
    return changed


def remove_dead_code(model: fx.GraphModule) -> int:
    """Remove operations without readers: a shape that only an assert used, a pooler whose output is dropped."""
    nodes = [node for node in model.graph.nodes if not node.users and _is_pure(node)]
    for node in reversed(nodes):
        model.graph.erase_node(node)
    return len(nodes)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node can be removed if nothing reads it. Opaque modules may have side effects."""
    is_removable = node.op in ("call_function", "get_attr") or (node.op == "call_module" and get_kind(node) != OPAQUE)
    return is_removable and not node.is_impure()


Conversion = Callable[[fx.GraphModule], int]
CONVERSIONS: tuple[Conversion, ...] = (
    remove_asserts,
    remove_identities,
    remove_pools_without_effect,
    head_to_convolution,
    join_gelu,
    shorten_type_as,
    infer_one_size,
    remove_dead_code,
)


def convert(model: fx.GraphModule, conversions: Sequence[Conversion] = CONVERSIONS) -> dict[str, int]:
    """Apply all conversions until none changes the graph, and return the number of changes by conversion."""
    totals = dict.fromkeys((conversion.__name__ for conversion in conversions), 0)
    while True:
        changes = {conversion.__name__: conversion(model) for conversion in conversions}
        for name, count in changes.items():
            totals[name] += count
        if not any(changes.values()):
            model.recompile()
            return {name: count for name, count in totals.items() if count}
