"""Who reads which weights, so that none is silently missing.

What is made of parameters alone (a transposed or masked weight) and what picks or moves a part of one (the experts that
the data choose) pass them on: the question is who computes with them and the data.
"""

from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.functionalize import is_view
from scalepoint.graph.kinds import ACTIVATIONS, CASTS, VALUE_PRESERVING, WEIGHTED
from scalepoint.graph.nodes import find_constant_nodes, get_kind
from scalepoint.graph.operations import BIASES, WEIGHTS, Operation, get_tensors

_ARITHMETIC = ("add", "sub", "mul", "div", "cat", "stack", "softmax", "attention", "dropout", "where", "lerp", "mean")
_COPIES = (*VALUE_PRESERVING, *CASTS, "half", "copy", "repeat", "roll", "pad", "constant_pad_nd")
_HARMLESS = frozenset((*_ARITHMETIC, *_COPIES, "size", "getattr", "output", *ACTIVATIONS))
_PICKS = ("index", "index_select", "gather", "take_along_dim")  # of the parts of a weight, as the data say
_MOVES = frozenset((*_COPIES, *_PICKS))
_WEIGHT_ARGUMENTS = (*WEIGHTS, *BIASES)


def get_weights(model: fx.GraphModule) -> dict[int, tuple[str, int]]:
    """Name and number of elements of every parameter, and of buffers that products multiply by; by identity."""
    weights = {id(value): (name, value.numel()) for name, value in model.named_parameters()}
    buffers = {id(value): (name, value.numel()) for name, value in model.named_buffers()}
    for module in model.modules():
        if isinstance(module, Operation) and module.kind in WEIGHTED:
            held = [id(reference.value) for name, reference in module.references().items() if name in _WEIGHT_ARGUMENTS]
            weights |= {key: buffers[key] for key in held if key in buffers}
    return weights


def iterate_weight_readers(
    model: fx.GraphModule, takes: Callable[[fx.Node], bool], moves: Container[str] = _MOVES
) -> Iterator[tuple[fx.Node, set[int]]]:
    """Every node that computes with weights, and their identities; what `takes` says keeps them to itself, and what is
    of the kinds that `moves` names passes on what it was given."""
    known = get_weights(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    fixed = find_constant_nodes(model.graph)
    passed: dict[fx.Node, set[int]] = {}
    for node in model.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        held = {key for key in _held_weights(model, node, module) if key in known}
        whole = held.union(*(passed.get(source, ()) for source in node.all_input_nodes))
        if takes(node):
            yield node, whole
        elif node in fixed:
            passed[node] = whole
        elif (moved := _moved_weights(node, passed)) and get_kind(node) in moves:
            passed[node] = moved
        elif whole:
            yield node, whole


def find_unknown_readers(model: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Every node that reads a parameter of two axes or more and whose kind says nothing of it, with its name."""
    names = {id(value): name for name, value in model.named_parameters() if value.ndim > 1}
    modules = dict(model.named_modules(remove_duplicate=False))

    def is_known(node: fx.Node) -> bool:
        return get_kind(node) in WEIGHTED or get_kind(node) == "left"

    for node, keys in iterate_weight_readers(model, is_known, moves=()):
        weight = next((name for key, name in names.items() if key in keys), "")
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if weight and node.op != "output" and not is_known(node) and not _is_harmless(node, module):
            yield node, weight


def _moved_weights(node: fx.Node, passed: dict[fx.Node, set[int]]) -> set[int]:
    """The weights of which a node that moves values gives a part, or the whole in another shape."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return set() if source is None else passed.get(source, set())


def _held_weights(model: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> Iterable[int]:
    """The identities of the tensors that a node holds itself."""
    if module is not None:
        return map(id, get_tensors(module))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [id(getattr(model.get_submodule(owner), name))]
    return ()


def _is_harmless(node: fx.Node, module: nn.Module | None) -> bool:
    function = module.function if isinstance(module, Operation) else node.target
    if get_kind(node) in _HARMLESS or is_view(node):
        return True
    return isinstance(function, OpOverload) and torch.Tag.pointwise in function.tags
