"""From the operations that torch.export recorded to a graph of modules that reads like the user's model.

For each operation, in this order:
  1. the user's own module did it (`layer1.0.conv1`, an nn.Conv2d with these very parameters): call that module;
  2. it has parameters or is worth a name (conv, linear, norms, activations, add, matmul, attention, ...): an Operation;
  3. anything else (shapes, indexing): stays a function.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.graph.kinds import LIFTED, MODULE_KINDS, base_name, kind_of_function
from scalepoint.graph.modules import Operation, Reference, Slot

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def lift(graph_module: fx.GraphModule, owner: nn.Module) -> fx.GraphModule:
    """Rewrite the aten graph in place; its attributes are already those of the model, which is `owner`."""
    graph = graph_module.graph
    _untranspose(graph)
    tree = Tree(graph_module)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _lift_node(tree, node, owner)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph_module.recompile()
    return graph_module


class Tree:
    """The modules of the graph by path and paths by module, and names for new ones."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.modules = dict(root.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}

    def add(self, name: str, module: nn.Module) -> str:
        free, number = name, 0
        while free in self.modules or hasattr(self.modules.get(free.rpartition(".")[0]), free.rpartition(".")[2]):
            number += 1
            free = f"{name}_{number}"
        self.root.add_submodule(free, module)
        self.modules[free] = module
        return free


def _lift_node(tree: Tree, node: fx.Node, owner: nn.Module) -> None:
    arguments = arguments_of(node)
    settings = {name: value for name, value in arguments.items() if not list(nodes_in(value))}
    kind = kind_of_function(node.target, settings)  # type: ignore[arg-type]  # call_function targets are callables
    if kind in ("matmul", "addmm") and _is_parameter(arguments.get("other", arguments.get("mat2"))):
        kind = "linear"
    node.meta["kind"] = kind
    if kind not in LIFTED or not isinstance(node.target, torch._ops.OpOverload):
        return
    inputs: list[fx.Node] = []
    bound = {name: bind(value, inputs, tree.root) for name, value in arguments.items()}
    if not inputs:
        return
    path = _own_module(tree, module_path(node), kind, bound, inputs) if tensor_of(node) is not None else None
    if path is None:
        path = module_path(node)
        leaf = _leaf_name(kind, bound)
        operation = Operation(kind, node.target, bound)
        operation.in_train = _in_train(tree.modules.get(path) if path else owner, kind, bound)
        target = tree.add(f"{path}.{leaf}" if path else leaf, operation)
    else:
        target, inputs = path, inputs[:1]
    with node.graph.inserting_before(node):
        lifted = node.graph.call_module(target, tuple(inputs))
    lifted.meta = {**node.meta, "kind": kind, "path": path}
    node.replace_all_uses_with(lifted)
    node.graph.erase_node(node)


def _in_train(module: nn.Module | None, kind: str, bound: dict[str, Any]) -> dict[str, Any]:
    """What capture in eval switched off, and train() switches on again: dropout, batch statistics."""
    live: dict[str, Any] = {name: True for name in ("train", "training") if bound.get(name) is False}
    if kind == "attention" and not bound.get("dropout_p"):
        found = (getattr(module, name, None) for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_p"))
        share = next((value for value in found if isinstance(value, float)), 0.0)
        live |= {"dropout_p": share} if share else {}
    return live


def _leaf_name(kind: str, bound: dict[str, Any]) -> str:
    """in_proj for what multiplies in_proj_weight, else the kind."""
    weight = bound.get("weight")
    name = weight.name if isinstance(weight, Reference) else ""
    return name.removesuffix("_weight") if name.endswith("_weight") else kind


def as_operation(node: fx.Node, root: nn.Module) -> tuple[Operation, list[fx.Node]]:
    """A function node as a module of its own, and the nodes it takes."""
    inputs: list[fx.Node] = []
    bound = {name: bind(value, inputs, root) for name, value in arguments_of(node).items()}
    by_place = 0 if isinstance(node.target, torch._ops.OpOverload) else len(node.args)
    return Operation(node.meta.get("kind", node.name), node.target, bound, by_place), inputs  # type: ignore[arg-type]


def _is_parameter(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _untranspose(graph: fx.Graph) -> None:
    """x @ w.T and addmm(b, x, w.T), w a parameter, are linear(x, w, b); w @ x is linear(x.T, w).T."""
    for node in list(graph.nodes):
        _turn(graph, node)
    for node in list(graph.nodes):
        name = base_name(node.target) if node.op == "call_function" else ""
        if name not in ("matmul", "mm", "addmm") or node.kwargs:
            continue
        *bias, x, other = node.args
        if len(bias) > 1 or not (isinstance(other, fx.Node) and _transposes_parameter(other)):
            continue
        with graph.inserting_before(node):
            linear = graph.call_function(torch.ops.aten.linear.default, (x, other.args[0], *bias))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        if not other.users:
            graph.erase_node(other)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default and len(node.args) == 2:
            _absorb_bias(graph, node)


def _turn(graph: fx.Graph, node: fx.Node) -> None:
    """w @ x, w a matrix and x tokens in columns, as a linear layer on tokens in rows."""
    if node.op != "call_function" or node.target not in (torch.ops.aten.matmul.default, torch.ops.aten.mm.default):
        return
    weight, x = node.args
    value, taken = (tensor_of(arg) if isinstance(arg, fx.Node) else None for arg in (weight, x))
    if not _is_parameter(weight) or _is_parameter(x) or value is None or taken is None:
        return
    if value.ndim != 2 or taken.ndim < 2:
        return
    with graph.inserting_before(node):
        rows = graph.call_function(torch.ops.aten.transpose.int, (x, -2, -1))
        linear = graph.call_function(torch.ops.aten.linear.default, (rows, weight))
        columns = graph.call_function(torch.ops.aten.transpose.int, (linear, -2, -1))
    for made, like in ((rows, taken), (linear, tensor_of(node)), (columns, tensor_of(node))):
        turned = like if made is columns or like is None else like.transpose(-2, -1)
        made.meta = dict(node.meta) | {"val": turned}
    node.replace_all_uses_with(columns)
    graph.erase_node(node)


def _absorb_bias(graph: fx.Graph, linear: fx.Node) -> None:
    """linear(x, w) + b, b a parameter with a value for each output, is linear(x, w, b)."""
    add = next(iter(linear.users)) if len(linear.users) == 1 else None
    if add is None or add.target not in (torch.ops.aten.add.Tensor, operator.add) or add.kwargs or len(add.args) != 2:
        return
    bias = next((arg for arg in add.args if arg is not linear), None)
    value, weight = (tensor_of(node) if isinstance(node, fx.Node) else None for node in (bias, linear.args[1]))
    if not _is_parameter(bias) or value is None or weight is None or value.shape != weight.shape[:1]:
        return
    with graph.inserting_before(add):
        whole = graph.call_function(torch.ops.aten.linear.default, (*linear.args, bias))
    whole.meta = dict(add.meta)
    add.replace_all_uses_with(whole)
    graph.erase_node(add)
    graph.erase_node(linear)


def _transposes_parameter(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.args or not _is_parameter(node.args[0]):
        return False
    value = tensor_of(node)
    name = base_name(node.target)  # type: ignore[arg-type]  # call_function targets are callables
    swaps = name in ("t", "numpy_T", "mT", "matrix_H") or (
        name in ("transpose", "permute") and sorted(_flat(node.args[1:])) in ([0, 1], [-2, -1], [-1, 0])
    )
    return swaps and value is not None and value.ndim == 2


def _flat(values: Any) -> list[int]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of its schema; defaults left out are left out."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)


def bind(value: Any, inputs: list[fx.Node], root: nn.Module) -> Any:
    """An argument as the Operation holds it: parameters as references, other nodes as slots."""
    if isinstance(value, fx.Node):
        if value.op == "get_attr" and isinstance(value.target, str):
            owner, _, name = value.target.rpartition(".")
            return Reference(root.get_submodule(owner), name)
        if value not in inputs:
            inputs.append(value)
        return Slot(inputs.index(value))
    if isinstance(value, list | tuple):
        return [bind(item, inputs, root) for item in value]
    return value


def module_path(node: fx.Node) -> str:
    """Where in the user's model an operation stands: the path of the innermost module that ran it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if not path.startswith("_empty_nn_module_stack")]
    return paths[-1].split("@")[0] if paths else ""


def _own_module(tree: Tree, path: str, kind: str, bound: dict[str, Any], inputs: list[fx.Node]) -> str | None:
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
    own = {id(tensor) for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}
    held = {id(reference.value) for reference in references}
    needed = own - {id(getattr(module, "num_batches_tracked", None))}
    return held == needed and all(reference.owner is module for reference in references)


def tensor_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that export left as the value of a node: its shape and dtype."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None
