"""Turn the aten operations that torch.export recorded into calls of modules, so that the graph reads like the model.

For each operation, in this order:
  1. A module of the user computes exactly this (`layer1.0.conv1`, an nn.Conv2d with these parameters): call it.
  2. The kind is in LIFTED_KINDS (conv, linear, norms, activations, add, matmul, attention, ...): call an Operation.
  3. Anything else (shapes, indexing) stays a function.
"""

from typing import Any

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import OpOverload
from scalepoint.graph.computed_weights import reference_computed_tensors
from scalepoint.graph.kinds import LIFTED_KINDS, MODULE_KINDS, WEIGHTED, kind_of_function
from scalepoint.graph.nodes import (
    bind_argument,
    get_arguments,
    get_fake_tensor,
    get_info,
    inherit_meta,
    iterate_nodes,
    module_path,
    set_info,
)
from scalepoint.graph.operations import Operation, Reference
from scalepoint.graph.products import affine, normalize_products
from scalepoint.graph.tree import ModuleTree

_DATA_ARGUMENTS = ("input", "self", "mat1", "query", "key", "value", "indices")  # of products: not the weight
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def lift(graph_module: fx.GraphModule, owner: nn.Module) -> fx.GraphModule:
    """Rewrite an aten graph in place. Its modules and parameters are already those of the model `owner`."""
    graph = graph_module.graph
    normalize_products(graph)
    tree = ModuleTree(graph_module)
    reference_computed_tensors(tree)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _lift_node(tree, node, owner)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _lift_node(tree: ModuleTree, node: fx.Node, owner: nn.Module) -> None:
    function: Any = node.target
    arguments = get_arguments(node)
    settings = {name: value for name, value in arguments.items() if not list(iterate_nodes(value))}
    kind = kind_of_function(function, settings)
    if kind in ("matmul", "addmm") and _is_matrix(arguments.get("other", arguments.get("mat2"))):
        kind = "linear"
    set_info(node, kind=kind)
    if kind not in LIFTED_KINDS or not isinstance(node.target, OpOverload):
        return
    if kind == "linear" and function is torch.ops.aten.addmm.default:
        function = affine
        arguments = {"input": arguments["mat1"], "mat2": arguments["mat2"], "bias": arguments["self"]}
    bound, inputs = bind_arguments(arguments, kind, tree.root)
    if not inputs:
        return
    path = None
    if get_fake_tensor(node) is not None:  # not an LSTM, whose module nests its results and whose operation does not
        path = _find_user_module(tree, module_path(node), kind, bound, inputs)
    if path is not None:
        target, inputs = path, inputs[:1]
    else:
        path = module_path(node)
        leaf = _leaf_name(kind, bound)
        operation = Operation(kind, function, bound)
        operation.in_train = _train_settings(tree.modules.get(path) if path else owner, kind, bound)
        target = tree.add(f"{path}.{leaf}" if path else leaf, operation)
    with node.graph.inserting_before(node):
        lifted = node.graph.call_module(target, tuple(inputs))
    inherit_meta(lifted, node, path=path)
    node.replace_all_uses_with(lifted)
    node.graph.erase_node(node)


def _is_matrix(value: object) -> bool:
    """Whether a value is a parameter with two axes, like the weight of a linear layer."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    tensor = get_fake_tensor(value)
    return tensor is not None and tensor.ndim == 2


def _train_settings(module: nn.Module | None, kind: str, bound: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ in train mode: dropout and batch statistics, off in eval."""
    settings: dict[str, Any] = {name: True for name in ("train", "training") if bound.get(name) is False}
    if kind == "attention" and not bound.get("dropout_p"):
        names = ("dropout", "attention_dropout", "attn_dropout", "dropout_p")
        rates = (getattr(module, name, None) for name in names)
        rate = next((value for value in rates if isinstance(value, float)), 0.0)
        if rate:
            settings["dropout_p"] = rate
    return settings


def _leaf_name(kind: str, bound: dict[str, Any]) -> str:
    """Return "in_proj" for an operation with the weight in_proj_weight, else the kind."""
    weight = bound.get("weight")
    name = weight.name if isinstance(weight, Reference) else ""
    return name.removesuffix("_weight") if name.endswith("_weight") else kind


def as_operation(node: fx.Node, root: nn.Module) -> tuple[Operation, list[fx.Node]]:
    """Return a function node as an Operation, and the nodes that are its inputs."""
    kind = get_info(node).kind or node.name
    bound, inputs = bind_arguments(get_arguments(node), kind, root)
    if not inputs:  # all arguments are parameters: make them inputs instead of references
        bound = {
            name: bind_argument(value, inputs, root, references_parameters=False)
            for name, value in get_arguments(node).items()
        }
    positional = 0 if isinstance(node.target, OpOverload) else len(node.args)
    return Operation(kind, node.target, bound, positional), inputs  # type: ignore[arg-type]


def bind_arguments(arguments: dict[str, Any], kind: str, root: nn.Module) -> tuple[dict[str, Any], list[fx.Node]]:
    """Convert arguments to the slots and references of an Operation, and list its inputs.

    The data argument of a product is always an input, even if it is a parameter or buffer.
    """
    data = _DATA_ARGUMENTS if kind in WEIGHTED or kind in ("attention", "matmul") else ()
    data = (*data, "other", "mat2") if kind == "matmul" else data
    inputs: list[fx.Node] = []
    return {name: bind_argument(value, inputs, root, name not in data) for name, value in arguments.items()}, inputs


def _find_user_module(
    tree: ModuleTree, path: str, kind: str, bound: dict[str, Any], inputs: list[fx.Node]
) -> str | None:
    """Return the path of a torch.nn module that computes exactly this: the one that ran, or the one with the weight."""
    weight, paths = bound.get("weight"), [path]
    if isinstance(weight, Reference):
        paths.append(tree.paths.get(id(weight.owner), ""))
    return next((path for path in paths if _computes_same(tree.modules.get(path), kind, bound, inputs)), None)


def _computes_same(module: nn.Module | None, kind: str, bound: dict[str, Any], inputs: list[fx.Node]) -> bool:
    """Whether a module has this kind, no hooks, and exactly the parameters and buffers of the operation."""
    if module is None or MODULE_KINDS.get(type(module)) != kind or len(inputs) != 1:
        return False
    if any(getattr(module, hooks) for hooks in _HOOKS) or nn.utils.parametrize.is_parametrized(module):
        return False
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return False  # the padding is an operation of its own in the graph
    references = [value for value in bound.values() if isinstance(value, Reference)]
    module_tensors = {id(tensor) for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}
    module_tensors -= {id(getattr(module, "num_batches_tracked", None))}
    referenced_tensors = {id(reference.value) for reference in references}
    return referenced_tensors == module_tensors and all(reference.owner is module for reference in references)
