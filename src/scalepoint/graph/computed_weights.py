"""Weights and biases that the model computes of its parameters: they are held like parameters, and made at every call.

A standardized or normalized weight, a part of a packed matrix, a bias of q and v around zeros: the product then has a
weight that can be quantized and stored, and gradients reach the parameters.
"""

from torch import fx, nn

from scalepoint.graph.kinds import kind_of_function
from scalepoint.graph.nodes import bind_argument, find_constant_nodes, get_arguments, get_fake_tensor, module_path
from scalepoint.graph.operations import BIASES, WEIGHTS, ComputationStep, ComputedTensor
from scalepoint.graph.tree import ModuleTree

_PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "addmm")


def reference_computed_tensors(tree: ModuleTree) -> None:
    """Give every product whose weight or bias is made of parameters a reference to the computed tensor."""
    graph = tree.root.graph
    fixed = find_constant_nodes(graph)
    held: dict[fx.Node, str] = {}
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        for name, value in _operands(node):
            if value.op != "call_function" or value not in fixed or not _fits(node, name, value):
                continue
            if value not in held:
                path = module_path(node)
                leaf = f"computed_{'weight' if name in WEIGHTS else 'bias'}"
                held[value] = tree.add(
                    f"{path}.{leaf}" if path else leaf, ComputedTensor(_collect_steps(value, tree.root))
                )
            with graph.inserting_before(node):
                made = graph.create_node("get_attr", f"{held[value]}.value")
            made.meta = dict(value.meta)
            node.replace_input_with(value, made)
    for node in reversed([node for node in graph.nodes if node in fixed and node.op == "call_function"]):
        if not node.users and held:
            graph.erase_node(node)


def _operands(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The nodes that stand where a product has its weight and its bias."""
    kind = kind_of_function(node.target, {})  # type: ignore[arg-type]  # a callable
    if kind not in _PRODUCTS:
        return []
    arguments = get_arguments(node)
    names = (*WEIGHTS, *BIASES, *(["self"] if kind == "addmm" else []))
    return [(name, arguments[name]) for name in names if isinstance(arguments.get(name), fx.Node)]


def _fits(node: fx.Node, name: str, value: fx.Node) -> bool:
    """A matrix product has a weight only if that has two axes, and is a layer only if its input is another."""
    tensor, arguments = get_fake_tensor(value), get_arguments(node)
    data = arguments.get("mat1", arguments.get("input", arguments.get("self")))
    return tensor is not None and data is not value and (tensor.ndim == 2 or name not in ("other", "mat2"))


def _collect_steps(node: fx.Node, root: nn.Module) -> list[ComputationStep]:
    """The functions that make a tensor, in order."""
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each.op == "call_function" and each not in needed:
            needed.add(each)
            pending += each.all_input_nodes
    ordered = [each for each in node.graph.nodes if each in needed]
    return [
        ComputationStep(
            each.target,
            [bind_argument(value, ordered, root) for value in each.args],
            {name: bind_argument(value, ordered, root) for name, value in each.kwargs.items()},
        )
        for each in ordered
    ]
