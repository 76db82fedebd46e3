"""Weights and biases that the model computes from its parameters, such as a standardized weight or a part of a matrix.

    conv(x, normalize(w))  ->  conv with a reference to ComputedTensor(normalize(w)), evaluated at every call

The product then has a weight that can be quantized and stored, and gradients still reach the parameters.
"""

from torch import fx, nn

from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.kinds import kind_of_function
from scalepoint.graph.nodes import bind_argument, get_arguments, get_fake_tensor, module_path
from scalepoint.graph.operations import BIASES, WEIGHTS, ComputationStep, ComputedTensor
from scalepoint.graph.tree import ModuleTree

_PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "addmm")


def reference_computed_tensors(tree: ModuleTree) -> None:
    """Replace weights and biases that are computed from parameters by references to a ComputedTensor."""
    graph = tree.root.graph
    constant_nodes = find_constant_nodes(graph)
    module_names: dict[fx.Node, str] = {}  # the computed value -> its ComputedTensor
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        for name, value in _weight_and_bias(node):
            if value.op != "call_function" or value not in constant_nodes or not _is_layer_weight(node, name, value):
                continue
            if value not in module_names:
                path = module_path(node)
                leaf = f"computed_{'weight' if name in WEIGHTS else 'bias'}"
                computed = ComputedTensor(_collect_steps(value, tree.root))
                module_names[value] = tree.add(f"{path}.{leaf}" if path else leaf, computed)
            with graph.inserting_before(node):
                reference = graph.create_node("get_attr", f"{module_names[value]}.value")
            reference.meta = dict(value.meta)
            node.replace_input_with(value, reference)
    if not module_names:
        return
    for node in reversed([node for node in graph.nodes if node in constant_nodes and node.op == "call_function"]):
        if not node.users:
            graph.erase_node(node)


def _weight_and_bias(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Return the weight and bias arguments of a product, as far as they are nodes."""
    kind = kind_of_function(node.target, {})  # type: ignore[arg-type]  # a callable
    if kind not in _PRODUCTS:
        return []
    arguments = get_arguments(node)
    names = [*WEIGHTS, *BIASES]
    if kind == "addmm":
        names.append("self")
    return [(name, arguments[name]) for name in names if isinstance(arguments.get(name), fx.Node)]


def _is_layer_weight(node: fx.Node, name: str, value: fx.Node) -> bool:
    """Whether the product is a layer with this weight: its data is another tensor, and a matmul operand is 2-d."""
    tensor, arguments = get_fake_tensor(value), get_arguments(node)
    data = arguments.get("mat1", arguments.get("input", arguments.get("self")))
    return tensor is not None and data is not value and (tensor.ndim == 2 or name not in ("other", "mat2"))


def _collect_steps(node: fx.Node, root: nn.Module) -> list[ComputationStep]:
    """Collect the functions that compute a tensor, in execution order."""
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        source = pending.pop()
        if source.op == "call_function" and source not in needed:
            needed.add(source)
            pending += source.all_input_nodes
    ordered = [source for source in node.graph.nodes if source in needed]
    return [
        ComputationStep(
            source.target,
            [bind_argument(value, ordered, root) for value in source.args],
            {name: bind_argument(value, ordered, root) for name, value in source.kwargs.items()},
        )
        for source in ordered
    ]
