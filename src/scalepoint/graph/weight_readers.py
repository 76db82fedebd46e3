"""Find the nodes that compute with each weight, so that no weight is silently missing from a report.

A weight is followed through operations on parameters only (a transposed or masked weight) and, unless `moves` is empty,
through operations that select or move a part of it (the experts of a mixture), to the node that computes with it and
the data, its reader. Weights are identified by the id of their tensor, because one tensor may have several names.

A weight product is a matrix product, convolution or lookup with a weight that a target could quantize. An elementwise
product with a parameter, and an attention of parameters, is none.
"""

from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.functionalize import is_view
from scalepoint.graph.kinds import ACTIVATIONS, CASTS, OPAQUE, VALUE_PRESERVING, WEIGHTED
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.operations import BIASES, WEIGHTS, Operation, get_tensors

_ELEMENTWISE = ("add", "sub", "mul", "div", "where", "lerp", "dropout")
_ACROSS_ELEMENTS = ("cat", "stack", "mean", "softmax", "attention")
_COPIES = (*VALUE_PRESERVING, *CASTS, "half", "copy", "repeat", "roll", "pad", "constant_pad_nd")
_KINDS_WITHOUT_WEIGHT_PRODUCT = frozenset(
    (*_ELEMENTWISE, *_ACROSS_ELEMENTS, *_COPIES, *ACTIVATIONS, "size", "getattr", "output")
)
_SELECTIONS = ("index", "index_select", "gather", "take_along_dim")  # of a part of a weight, by data
_MOVES = frozenset((*_COPIES, *_SELECTIONS))
_WEIGHT_ARGUMENTS = (*WEIGHTS, *BIASES)


def get_weights(model: fx.GraphModule) -> dict[int, tuple[str, int]]:
    """Return the name and size of every parameter, and of buffers that products multiply by; by id of the tensor."""
    weights = {id(value): (name, value.numel()) for name, value in model.named_parameters()}
    buffers = {id(value): (name, value.numel()) for name, value in model.named_buffers()}
    for module in model.modules():
        if not isinstance(module, Operation) or module.kind not in WEIGHTED:
            continue
        for name, reference in module.references().items():
            key = id(reference.value)
            if name in _WEIGHT_ARGUMENTS and key in buffers:
                weights[key] = buffers[key]
    return weights


def iterate_weight_readers(
    model: fx.GraphModule, is_reader: Callable[[fx.Node], bool], moves: Container[str] = _MOVES
) -> Iterator[tuple[fx.Node, set[int]]]:
    """Yield every node that computes with weights, and the ids of the weights.

    Args:
        model: A captured graph.
        is_reader: Nodes for which it is True are yielded in any case: with an empty set if they read no weight, and
            they never pass a weight on.
        moves: Kinds of operations that pass the weight in their first argument on to their own readers.
    """
    weights = get_weights(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    constant_nodes = find_constant_nodes(model.graph)
    passed_on: dict[fx.Node, set[int]] = {}  # weights in the value of a node that is not itself a reader
    for node in model.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        referenced = weights.keys() & set(_referenced_ids(model, node, module))  # by the node itself
        read = referenced.union(*(passed_on.get(source, ()) for source in node.all_input_nodes))
        if is_reader(node):
            yield node, read
        elif node in constant_nodes:  # depends on parameters only, such as a transposed weight
            passed_on[node] = read
        elif (moved := _moved_weights(node, passed_on)) and get_kind(node) in moves:  # such as the rows of some experts
            passed_on[node] = moved
        elif read:  # combines weights with data
            yield node, read


def find_unknown_readers(model: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Yield nodes of unknown kind that read a parameter of two or more axes, with the parameter's name.

    Kinds that compute no weight product are left out.
    """
    names = {id(value): name for name, value in model.named_parameters() if value.ndim > 1}
    modules = dict(model.named_modules(remove_duplicate=False))

    def is_known(node: fx.Node) -> bool:
        return get_kind(node) in WEIGHTED or get_kind(node) == OPAQUE

    # moves=(): a selection by data (index, gather) is of unknown kind itself, so it is reported instead of its readers.
    for node, keys in iterate_weight_readers(model, is_known, moves=()):
        weight = next((name for key, name in names.items() if key in keys), "")
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if weight and node.op != "output" and not is_known(node) and not _has_no_weight_product(node, module):
            yield node, weight


def _moved_weights(node: fx.Node, passed_on: dict[fx.Node, set[int]]) -> set[int]:
    """Return the weights in the first argument of a node that moves values: other arguments are indices and sizes."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return set() if source is None else passed_on.get(source, set())


def _referenced_ids(model: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> Iterable[int]:
    """Return the ids of the tensors that a node reads itself, not through other nodes."""
    if module is not None:
        return map(id, get_tensors(module))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [id(getattr(model.get_submodule(owner), name))]
    return ()


def _has_no_weight_product(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node computes no weight product, so that its weights do not need to be reported."""
    function = module.function if isinstance(module, Operation) else node.target
    if get_kind(node) in _KINDS_WITHOUT_WEIGHT_PRODUCT or is_view(node):
        return True
    return isinstance(function, OpOverload) and torch.Tag.pointwise in function.tags
