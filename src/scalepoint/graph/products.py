"""Rewrite products with a weight to one form, before they become modules.

x @ w.T, addmm(b, x, w.T), linear(x, w) + b  ->  linear(x, w, b)
w @ x                                        ->  linear(x.T, w).T
einsum(x, w)                                 ->  a linear layer, if one computes the same (contractions.py)
linear(x, w, f(x))                           ->  linear(x, w) + f(x): a bias that depends on data is added later
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.contractions import rewrite_contraction
from scalepoint.graph.kinds import base_name
from scalepoint.graph.nodes import get_arguments, get_fake_tensor

_aten = torch.ops.aten
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def affine(input: Tensor, mat2: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's name
    """Compute input @ mat2 + bias. torch.addmm does this for inputs of two axes only."""
    product = input @ mat2
    return product if bias is None else product + bias


def normalize_products(graph: fx.Graph) -> None:
    """Apply all rewrites to a graph, in place."""
    for rewrite in (rewrite_contraction, _split_bias, _transpose_product, _to_linear, _absorb_bias):
        constant_nodes = find_constant_nodes(graph)
        for node in list(graph.nodes):
            if node.op == "call_function":
                rewrite(graph, node, constant_nodes)


def _split_bias(graph: fx.Graph, node: fx.Node, constant_nodes: set[fx.Node]) -> None:
    """Add a bias after the product if it is not a vector of parameters, or if addmm has alpha or beta."""
    is_addmm = node.target is _aten.addmm.default
    if not is_addmm and node.target is not _aten.linear.default and base_name(node.target) not in _CONVOLUTIONS:  # type: ignore[arg-type]
        return
    arguments = get_arguments(node)
    bias: Any = arguments.get("self" if is_addmm else "bias")
    value = get_fake_tensor(bias) if isinstance(bias, fx.Node) else None
    if value is None:
        return
    is_bias_of_layer = bias in constant_nodes and value.ndim == 1 and value.shape[0] == _output_channels(node)
    if is_addmm and (arguments["mat2"] not in constant_nodes or {"alpha", "beta"} & arguments.keys()):
        is_bias_of_layer = False
    if is_bias_of_layer:
        return
    with graph.inserting_before(node):
        if is_addmm:
            product = _call(_aten.mm.default, (arguments["mat1"], arguments["mat2"]), node)
            product = _multiply(product, arguments.get("alpha", 1), node)
            bias = _multiply(bias, arguments.get("beta", 1), bias)
        else:
            product = _copy_without_bias(node)
        total = _call(_aten.add.Tensor, (product, _reshape_bias(node, bias)), node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _copy_without_bias(node: fx.Node) -> fx.Node:
    """Add a copy of a linear layer or convolution without its bias, the third argument."""
    args = (*node.args[:2], None, *node.args[3:]) if len(node.args) > 2 else node.args
    kwargs = {name: argument for name, argument in node.kwargs.items() if name != "bias"}
    product = node.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    product.meta = dict(node.meta)
    return product


def _output_channels(node: fx.Node) -> Any:
    """Return the number of output channels of a product."""
    value = get_fake_tensor(node)
    is_convolution = base_name(node.target) in _CONVOLUTIONS  # type: ignore[arg-type]
    spatial_axes = int(base_name(node.target)[-2]) if is_convolution else 0  # type: ignore[arg-type]  # of "conv2d": 2
    return None if value is None else value.shape[-1 - spatial_axes]


def _reshape_bias(node: fx.Node, bias: fx.Node) -> fx.Node:
    """Reshape the bias of a convolution so that it broadcasts along the channels."""
    name, value = base_name(node.target), get_fake_tensor(bias)  # type: ignore[arg-type]
    if name not in _CONVOLUTIONS or value is None:
        return bias
    sizes = [-1, *(1 for _ in range(int(name[-2])))]
    reshaped = _call(_aten.reshape.default, (bias, sizes), node)
    reshaped.meta["val"] = value.reshape(sizes)
    return reshaped


def _multiply(node: fx.Node, factor: Any, like: fx.Node) -> fx.Node:
    return node if factor == 1 else _call(_aten.mul.Tensor, (node, factor), like)


def _call(function: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = like.graph.call_function(function, args)
    node.meta = dict(like.meta)
    return node


def _to_linear(graph: fx.Graph, node: fx.Node, constant_nodes: set[fx.Node]) -> None:
    """Replace x @ w.T and addmm(b, x, w.T) with a parameter w by linear(x, w, b)."""
    if base_name(node.target) not in ("matmul", "mm", "addmm") or node.kwargs:  # type: ignore[arg-type]
        return
    *bias, x, other = node.args
    # addmm(b, x, w) has one more argument than matmul(x, w).
    if len(bias) > 1 or not (isinstance(other, fx.Node) and _transposes_parameter(other)):
        return
    with graph.inserting_before(node):
        linear = _call(_aten.linear.default, (x, other.args[0], *bias), node)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)
    if not other.users:
        graph.erase_node(other)


def _transpose_product(graph: fx.Graph, node: fx.Node, constant_nodes: set[fx.Node]) -> None:
    """Replace w @ x, with a matrix w and tokens in the columns of x, by a linear layer on the transposed x."""
    if node.target not in (_aten.matmul.default, _aten.mm.default):
        return
    weight, x = node.args
    if weight not in constant_nodes or x in constant_nodes:
        return
    weight_value, x_value = (get_fake_tensor(arg) if isinstance(arg, fx.Node) else None for arg in (weight, x))
    if weight_value is None or x_value is None or weight_value.ndim != 2 or x_value.ndim < 2:
        return
    result_value = get_fake_tensor(node)
    with graph.inserting_before(node):
        rows = graph.call_function(_aten.transpose.int, (x, -2, -1))
        linear = graph.call_function(_aten.linear.default, (rows, weight))
        columns = graph.call_function(_aten.transpose.int, (linear, -2, -1))
    linear_value = None if result_value is None else result_value.transpose(-2, -1)
    for new_node, value in ((rows, x_value.transpose(-2, -1)), (linear, linear_value), (columns, result_value)):
        new_node.meta = dict(node.meta) | {"val": value}
    node.replace_all_uses_with(columns)
    graph.erase_node(node)


def _absorb_bias(graph: fx.Graph, linear: fx.Node, constant_nodes: set[fx.Node]) -> None:
    """Replace linear(x, w) + b by linear(x, w, b) if b is a parameter with one value for each output."""
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
        with_bias = _call(_aten.linear.default, (*linear.args, bias), add)
    add.replace_all_uses_with(with_bias)
    graph.erase_node(add)
    graph.erase_node(linear)


def _transposes_parameter(node: fx.Node) -> bool:
    """Whether a node is the transpose of a parameter with two axes."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return False
    value = get_fake_tensor(node)
    name = base_name(node.target)  # type: ignore[arg-type]  # call_function targets are callables
    swaps = name in ("t", "numpy_T", "mT", "matrix_H") or (
        name in ("transpose", "permute") and sorted(_flatten(node.args[1:])) in ([0, 1], [-2, -1], [-1, 0])
    )
    return swaps and value is not None and value.ndim == 2


def _flatten(values: Any) -> list[int]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
