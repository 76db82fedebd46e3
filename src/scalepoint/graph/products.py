"""One spelling for products with a weight, before they become modules.

x @ w.T, addmm(b, x, w.T) and linear(x, w) + b are linear(x, w, b); w @ x is linear(x.T, w).T; an einsum with a weight
is a linear layer where one computes it (contractions.py); a bias that the data make is added after the product.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.graph.contractions import rewrite_contraction
from scalepoint.graph.kinds import base_name
from scalepoint.graph.nodes import find_constant_nodes, get_arguments, get_fake_tensor

_aten = torch.ops.aten
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def affine(input: Tensor, mat2: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's name
    """input @ mat2 + bias: torch.addmm for tokens of any number of axes."""
    product = input @ mat2
    return product if bias is None else product + bias


def normalize_products(graph: fx.Graph) -> None:
    for rewrite in (rewrite_contraction, _split_bias, _transpose_product, _untranspose, _absorb_bias):
        fixed = find_constant_nodes(graph)
        for node in list(graph.nodes):
            if node.op == "call_function":
                rewrite(graph, node, fixed)


def _split_bias(graph: fx.Graph, node: fx.Node, fixed: set[fx.Node]) -> None:
    """A bias that is no vector of parameters is added after the product; so is that of addmm with factors."""
    arguments = get_arguments(node)
    if node.target is _aten.addmm.default:
        bias, name = arguments["self"], "self"
        weight = arguments["mat2"]
        is_plain = weight in fixed and not {"alpha", "beta"} & arguments.keys()
    elif node.target is _aten.linear.default or base_name(node.target) in _CONVOLUTIONS:  # type: ignore[arg-type]
        bias, name, is_plain = arguments.get("bias"), "bias", True
    else:
        return
    value = get_fake_tensor(bias) if isinstance(bias, fx.Node) else None
    if value is None or (is_plain and bias in fixed and value.ndim == 1 and value.shape[0] == _channels(node)):
        return
    with graph.inserting_before(node):
        if name == "self":
            product = _call(_aten.mm.default, (arguments["mat1"], arguments["mat2"]), node)
            product = _multiply(product, arguments.get("alpha", 1), node)
            bias = _multiply(bias, arguments.get("beta", 1), bias)
        else:
            product = graph.call_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
            product.meta = dict(node.meta)
            product.args = (*product.args[:2], None, *product.args[3:]) if len(product.args) > 2 else product.args
            product.kwargs = {key: given for key, given in product.kwargs.items() if key != "bias"}
        total = _call(_aten.add.Tensor, (product, _along_channels(node, bias)), node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _channels(node: fx.Node) -> Any:
    """How many output channels a product gives, as its own value tells."""
    value = get_fake_tensor(node)
    is_spatial = base_name(node.target) in _CONVOLUTIONS  # type: ignore[arg-type]
    dims = int(base_name(node.target)[-2]) if is_spatial else 0  # type: ignore[arg-type]
    return None if value is None else value.shape[-1 - dims]


def _along_channels(node: fx.Node, bias: fx.Node) -> fx.Node:
    """A bias as it broadcasts against the product."""
    name, value = base_name(node.target), get_fake_tensor(bias)  # type: ignore[arg-type]
    if name not in _CONVOLUTIONS or value is None:
        return bias
    sizes = [-1, *(1 for _ in range(int(name[-2])))]
    shaped = _call(_aten.reshape.default, (bias, sizes), node)
    shaped.meta["val"] = value.reshape(sizes)
    return shaped


def _multiply(node: fx.Node, factor: Any, like: fx.Node) -> fx.Node:
    return node if factor == 1 else _call(_aten.mul.Tensor, (node, factor), like)


def _call(function: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = like.graph.call_function(function, args)
    node.meta = dict(like.meta)
    return node


def _untranspose(graph: fx.Graph, node: fx.Node, fixed: set[fx.Node]) -> None:
    """x @ w.T and addmm(b, x, w.T), w a parameter, are linear(x, w, b)."""
    if base_name(node.target) not in ("matmul", "mm", "addmm") or node.kwargs:  # type: ignore[arg-type]
        return
    *bias, x, other = node.args
    if len(bias) > 1 or not (isinstance(other, fx.Node) and _transposes_parameter(other)):
        return
    with graph.inserting_before(node):
        linear = _call(_aten.linear.default, (x, other.args[0], *bias), node)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)
    if not other.users:
        graph.erase_node(other)


def _transpose_product(graph: fx.Graph, node: fx.Node, fixed: set[fx.Node]) -> None:
    """w @ x, w a matrix and x tokens in columns, as a linear layer on tokens in rows."""
    if node.target not in (_aten.matmul.default, _aten.mm.default):
        return
    weight, x = node.args
    value, taken = (get_fake_tensor(arg) if isinstance(arg, fx.Node) else None for arg in (weight, x))
    if weight not in fixed or x in fixed or value is None or taken is None:
        return
    if value.ndim != 2 or taken.ndim < 2:
        return
    with graph.inserting_before(node):
        rows = graph.call_function(_aten.transpose.int, (x, -2, -1))
        linear = graph.call_function(_aten.linear.default, (rows, weight))
        columns = graph.call_function(_aten.transpose.int, (linear, -2, -1))
    for made, like in ((rows, taken), (linear, get_fake_tensor(node)), (columns, get_fake_tensor(node))):
        turned = like if made is columns or like is None else like.transpose(-2, -1)
        made.meta = dict(node.meta) | {"val": turned}
    node.replace_all_uses_with(columns)
    graph.erase_node(node)


def _absorb_bias(graph: fx.Graph, linear: fx.Node, fixed: set[fx.Node]) -> None:
    """linear(x, w) + b, b a parameter with a value for each output, is linear(x, w, b)."""
    if linear.target is not _aten.linear.default or len(linear.args) != 2:
        return
    add = next(iter(linear.users)) if len(linear.users) == 1 else None
    if add is None or add.target not in (_aten.add.Tensor, operator.add) or add.kwargs or len(add.args) != 2:
        return
    bias = next((arg for arg in add.args if arg is not linear), None)
    value, weight = (get_fake_tensor(node) if isinstance(node, fx.Node) else None for node in (bias, linear.args[1]))
    if not isinstance(bias, fx.Node) or bias.op != "get_attr" or value is None or weight is None:
        return
    if value.shape != weight.shape[:1]:
        return
    with graph.inserting_before(add):
        whole = _call(_aten.linear.default, (*linear.args, bias), add)
    add.replace_all_uses_with(whole)
    graph.erase_node(add)
    graph.erase_node(linear)


def _transposes_parameter(node: fx.Node) -> bool:
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return False
    value = get_fake_tensor(node)
    name = base_name(node.target)  # type: ignore[arg-type]  # call_function targets are callables
    swaps = name in ("t", "numpy_T", "mT", "matrix_H") or (
        name in ("transpose", "permute") and sorted(_flat(node.args[1:])) in ([0, 1], [-2, -1], [-1, 0])
    )
    return swaps and value is not None and value.ndim == 2


def _flat(values: Any) -> list[int]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
