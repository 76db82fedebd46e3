"""Weights that an operation reads in a way that no kind knows: they are told, so that none is silently missing.

Elementwise and shape operations are no such readers (a position that is added, a scale, a class token), nor is what is
made of parameters alone (a transposed or masked weight): the question is who multiplies it with the data.
"""

from collections.abc import Iterator

import torch
from torch import fx, nn

from scalepoint.graph.kinds import ACTIVATIONS, WEIGHTED
from scalepoint.graph.modules import Operation
from scalepoint.graph.writes import is_view

_ARITHMETIC = ("add", "sub", "mul", "div", "cat", "stack", "softmax", "attention", "dropout", "where", "lerp", "mean")
_SHAPES = ("reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "repeat", "clone", "getitem")
_COPIES = ("contiguous", "copy", "to", "_to_copy", "type_as", "float", "half", "roll", "pad", "constant_pad_nd", "size")
_PARTS = ("select", "slice", "split", "split_with_sizes", "chunk", "unbind", "unflatten", "getattr", "output")
_HARMLESS = frozenset((*_ARITHMETIC, *_SHAPES, *_COPIES, *_PARTS, *ACTIVATIONS))


def unknown_readers(model: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Every node that reads a parameter of two axes or more and whose kind says nothing of it, with its name."""
    names = {id(value): name for name, value in model.named_parameters() if value.ndim > 1}
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[fx.Node, str] = {}  # nodes made of parameters alone -> the first weight among them
    for node in model.graph.nodes:
        kind = node.meta.get("kind", node.op)
        if kind in WEIGHTED or kind == "left" or node.op in ("placeholder", "output"):
            continue
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        held = [names[key] for key in _held(model, node, module) if key in names]
        weight = next(iter([*held, *(made[source] for source in node.all_input_nodes if made.get(source))]), "")
        if _is_constant(node, made):
            made[node] = weight
        elif weight and not _is_harmless(node, kind, module):
            yield node, weight


def _held(model: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> list[int]:
    """The identities of the tensors that a node holds itself."""
    if isinstance(module, Operation):
        return [id(reference.value) for reference in module.references().values()]
    if module is not None:
        return [id(value) for value in module.parameters()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [id(getattr(model.get_submodule(owner), name))]
    return []


def _is_constant(node: fx.Node, made: dict[fx.Node, str]) -> bool:
    if node.op == "get_attr":
        return True
    is_known = node.op == "call_function" or bool(node.all_input_nodes)
    return is_known and all(source in made for source in node.all_input_nodes)


def _is_harmless(node: fx.Node, kind: str, module: nn.Module | None) -> bool:
    function = module.function if isinstance(module, Operation) else node.target
    if kind in _HARMLESS or is_view(node):
        return True
    return isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags
