"""From the operations that torch.export recorded to a graph of modules that reads like the user's model.

For each operation, in this order:
  1. the user's own module did it (`layer1.0.conv1`, an nn.Conv2d with these very parameters): call that module;
  2. it has parameters or is worth a name (conv, linear, norms, activations, add, matmul, attention, ...): an Operation;
  3. anything else (shapes, indexing): stays a function.
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
    is_matrix,
    iterate_nodes,
    module_path,
    set_info,
)
from scalepoint.graph.operations import Operation, Reference
from scalepoint.graph.products import affine, normalize_products
from scalepoint.graph.tree import ModuleTree

_DATA = ("input", "self", "mat1", "query", "key", "value", "indices")  # what a product takes beside its weight
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def lift(graph_module: fx.GraphModule, owner: nn.Module) -> fx.GraphModule:
    """Rewrite the aten graph in place; its attributes are already those of the model, which is `owner`."""
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
    if kind in ("matmul", "addmm") and is_matrix(arguments.get("other", arguments.get("mat2"))):
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
    path = _find_own_module(tree, module_path(node), kind, bound, inputs) if get_fake_tensor(node) is not None else None
    if path is None:
        path = module_path(node)
        leaf = _leaf_name(kind, bound)
        operation = Operation(kind, function, bound)
        operation.in_train = _train_settings(tree.modules.get(path) if path else owner, kind, bound)
        target = tree.add(f"{path}.{leaf}" if path else leaf, operation)
    else:
        target, inputs = path, inputs[:1]
    with node.graph.inserting_before(node):
        lifted = node.graph.call_module(target, tuple(inputs))
    inherit_meta(lifted, node, path=path)
    node.replace_all_uses_with(lifted)
    node.graph.erase_node(node)


def _train_settings(module: nn.Module | None, kind: str, bound: dict[str, Any]) -> dict[str, Any]:
    """What capture in eval switched off, and train() switches on again: dropout, batch statistics."""
    live: dict[str, Any] = {name: True for name in ("train", "training") if bound.get(name) is False}
    if kind == "attention" and not bound.get("dropout_p"):
        rates = (getattr(module, name, None) for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_p"))
        share = next((value for value in rates if isinstance(value, float)), 0.0)
        live |= {"dropout_p": share} if share else {}
    return live


def _leaf_name(kind: str, bound: dict[str, Any]) -> str:
    """in_proj for what multiplies in_proj_weight, else the kind."""
    weight = bound.get("weight")
    name = weight.name if isinstance(weight, Reference) else ""
    return name.removesuffix("_weight") if name.endswith("_weight") else kind


def as_operation(node: fx.Node, root: nn.Module) -> tuple[Operation, list[fx.Node]]:
    """A function node as a module of its own, and the nodes it takes."""
    kind = get_info(node).kind or node.name
    bound, inputs = bind_arguments(get_arguments(node), kind, root)
    if not inputs:  # made of parameters alone: they are its inputs
        bound = {name: bind_argument(value, inputs, root, holds=False) for name, value in get_arguments(node).items()}
    by_place = 0 if isinstance(node.target, OpOverload) else len(node.args)
    return Operation(kind, node.target, bound, by_place), inputs  # type: ignore[arg-type]


def bind_arguments(arguments: dict[str, Any], kind: str, root: nn.Module) -> tuple[dict[str, Any], list[fx.Node]]:
    """Arguments as an Operation holds them, and its inputs. What a product multiplies its weight with is an input, be
    it a buffer."""
    data = _DATA if kind in WEIGHTED or kind in ("attention", "matmul") else ()
    data = (*data, "other", "mat2") if kind == "matmul" else data
    inputs: list[fx.Node] = []
    return {name: bind_argument(value, inputs, root, name not in data) for name, value in arguments.items()}, inputs


def _find_own_module(
    tree: ModuleTree, path: str, kind: str, bound: dict[str, Any], inputs: list[fx.Node]
) -> str | None:
    """The path of the user's plain torch.nn module that does exactly this: where it ran, or where its weight lives."""
    weight = bound.get("weight")
    paths = [path, tree.paths.get(id(weight.owner), "")] if isinstance(weight, Reference) else [path]
    return next((path for path in paths if _does_this(tree.modules.get(path), kind, bound, inputs)), None)


def _does_this(module: nn.Module | None, kind: str, bound: dict[str, Any], inputs: list[fx.Node]) -> bool:
    if module is None or MODULE_KINDS.get(type(module)) != kind or len(inputs) != 1:
        return False
    if any(getattr(module, hooks) for hooks in _HOOKS) or nn.utils.parametrize.is_parametrized(module):
        return False
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return False  # the padding is an operation of its own in the graph
    references = [value for value in bound.values() if isinstance(value, Reference)]
    own_tensors = {id(tensor) for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}
    held = {id(reference.value) for reference in references}
    needed = own_tensors - {id(getattr(module, "num_batches_tracked", None))}
    return held == needed and all(reference.owner is module for reference in references)
