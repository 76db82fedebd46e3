"""Conversions: what is rewritten before patterns look: things that do nothing go, a classifier becomes a convolution.

Each is a function that changes the graph and says how often it did; all are repeated until nothing changes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from scalepoint.graph.kinds import base_name
from scalepoint.graph.nodes import get_fake_tensor, get_kind, set_info
from scalepoint.graph.operations import Operation, Reference, get_tensors
from scalepoint.graph.tree import ModuleTree
from scalepoint.patterns.gelu import join_gelu

POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_ASSERTS = ("assert", "assert_scalar", "assert_tensor_metadata", "assert_async", "sym_constrain_range_for_size")


def remove_asserts(model: fx.GraphModule) -> int:
    """Checks of shapes and values: they hold for the inputs that were captured."""
    nodes = [
        node
        for node in model.graph.nodes
        if node.op == "call_function" and base_name(node.target).strip("_") in _ASSERTS and not node.users
    ]
    for node in nodes:
        model.graph.erase_node(node)
    return len(nodes)


def remove_identities(model: fx.GraphModule) -> int:
    """nn.Identity, alias, detach."""
    nodes = [node for node in model.graph.nodes if get_kind(node) == "identity" and len(node.all_input_nodes) == 1]
    for node in nodes:
        _bypass(model, node)
    return len(nodes)


def remove_idle_pools(model: fx.GraphModule) -> int:
    """Pools that change no input of any size: windows of one value, or adaptive to the size that comes."""
    nodes = [node for node in model.graph.nodes if get_kind(node) in POOLS and _is_idle(model, node)]
    for node in nodes:
        _bypass(model, node)
    return len(nodes)


def head_to_convolution(model: fx.GraphModule) -> int:
    """linear(flatten(global pool)) becomes flatten(1x1 convolution): the classifier stays in the layout of the rest."""
    changed = 0
    for node in list(model.graph.nodes):
        pool = node.all_input_nodes[0] if get_kind(node) == "flatten" and node.all_input_nodes else None
        linear = next(iter(node.users)) if len(node.users) == 1 else None
        if pool is None or linear is None or linear.op != "call_module" or get_kind(linear) != "linear":
            continue
        if _pools_to_one(model, pool) and _joins_channels(model, node) and _is_plain_linear(model, linear):
            _swap_flatten_and_linear(model, node, linear)
            changed += 1
    return changed


def _joins_channels(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a flatten leaves (batch, channels) of (batch, channels, 1, 1)."""
    value = get_fake_tensor(node.all_input_nodes[0])
    if node.op != "call_module" or (value is not None and value.ndim != 4):
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings if isinstance(module, Operation) else vars(module)
    return settings.get("start_dim", 0) in (1, -3) and settings.get("end_dim", -1) in (3, -1)


def _is_plain_linear(model: fx.GraphModule, node: fx.Node) -> bool:
    module = model.get_submodule(str(node.target))
    is_own = not isinstance(module, Operation) or not (module.has_transposed_weight or module.is_computed)
    return is_own and len(node.all_input_nodes) == 1


def _swap_flatten_and_linear(model: fx.GraphModule, flatten: fx.Node, linear: fx.Node) -> None:
    head = HeadConvolution(model.get_submodule(str(linear.target)))
    name = ModuleTree(model).add(f"{linear.target}_conv", head)
    with model.graph.inserting_before(linear):
        conv = model.graph.call_module(name, (flatten.all_input_nodes[0],))
        conv.meta = {"nn_module_stack": {}}
        set_info(conv, kind="head", replaced_layer=str(linear.target))
        flat = model.graph.node_copy(flatten, lambda _: conv)
        flat.meta = dict(flatten.meta) | {"val": linear.meta.get("val")}
    linear.replace_all_uses_with(flat)
    model.graph.erase_node(linear)
    model.graph.erase_node(flatten)


def _pools_to_one(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an adaptive 2-d average pool to one value a channel."""
    if get_kind(node) != "adaptive_avg_pool" or node.op != "call_module":
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings.values() if isinstance(module, Operation) else [getattr(module, "output_size", None)]
    is_planar = isinstance(module, nn.AdaptiveAvgPool2d) or "2d" in str(getattr(module, "function", ""))
    return is_planar and any(size in (1, (1, 1), [1, 1]) for size in settings)


class HeadConvolution(nn.Module):
    """A linear layer as a 1x1 convolution on the same weight."""

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


def loosen_casts(model: fx.GraphModule) -> int:
    """softmax(scores.float()).type_as(scores) takes its type from the product's operand: scores have one reader."""
    changed = 0
    for node in model.graph.nodes:
        if get_kind(node) != "type_as" or len(node.all_input_nodes) != 2:
            continue
        source = like = node.all_input_nodes[1]
        while get_kind(source) in ("matmul", "mul", "div", "add") and _get_dtype(source) == _get_dtype(
            source.all_input_nodes[0]
        ):
            source = source.all_input_nodes[0]
        if source is not like and _get_dtype(source) is not None:
            node.replace_input_with(like, source)
            changed += 1
    return changed


def _get_dtype(node: fx.Node) -> torch.dtype | None:
    value = get_fake_tensor(node)
    return None if value is None else value.dtype


def infer_one_extent(model: fx.GraphModule) -> int:
    """view(x, [a, n, b]) with one extent that depends on the input becomes view(x, [a, -1, b]): n is not computed."""
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
    """What nobody reads: a shape that only an assert used, a pooler whose output the model drops."""
    nodes = [node for node in model.graph.nodes if not node.users and _is_pure(node)]
    for node in reversed(nodes):
        model.graph.erase_node(node)
    return len(nodes)


Conversion = Callable[[fx.GraphModule], int]
CONVERSIONS: tuple[Conversion, ...] = (
    remove_asserts,
    remove_identities,
    remove_idle_pools,
    head_to_convolution,
    join_gelu,
    loosen_casts,
    infer_one_extent,
    remove_dead_code,
)


def convert(model: fx.GraphModule, conversions: Sequence[Conversion] = CONVERSIONS) -> dict[str, int]:
    """Apply all until nothing changes; how often each did something."""
    done = dict.fromkeys((conversion.__name__ for conversion in conversions), 0)
    while True:
        changed = {conversion.__name__: conversion(model) for conversion in conversions}
        for name, count in changed.items():
            done[name] += count
        if not any(changed.values()):
            model.recompile()
            return {name: count for name, count in done.items() if count}


def _bypass(model: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    model.graph.erase_node(node)


def _is_idle(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return False
    module = model.get_submodule(str(node.target))
    settings = module.settings if isinstance(module, Operation) else vars(module)
    if get_kind(node).startswith("adaptive"):
        return _all_are(settings.get("output_size", 0), None) and not settings.get("return_indices")
    windows = [settings.get("kernel_size", 0), settings.get("stride") or 1]
    neutral = settings.get("padding") or 0, settings.get("divisor_override") or 1
    is_plain = _all_are(neutral[0], 0) and neutral[1] == 1 and not settings.get("return_indices")
    return is_plain and all(_all_are(value, 1) for value in windows)


def _all_are(value: object, expected: int | None) -> bool:
    return all(item == expected for item in (value if isinstance(value, list | tuple) else [value]))


def _is_pure(node: fx.Node) -> bool:
    is_ours = node.op in ("call_function", "get_attr") or (node.op == "call_module" and get_kind(node) != "left")
    return is_ours and not node.is_impure()
