"""Rewrite torch.einsum and torch.tensordot with a weight as linear layers.

    einsum("bthd,hdge->btge", x, w)  ->  unflatten(linear(flatten(x), w of (ge, hd)))

A letter names an axis, as in einsum. Letters that x and w share must all be summed, and have one size in both: einsum
also broadcasts a shared axis of size 1. The other letters of x are tokens, those of w are outputs.
"""

from dataclasses import dataclass
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from scalepoint.graph.nodes import get_fake_tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """The letters of a product of x and a weight, one string for each tensor."""

    x: str
    weight: str
    result: str
    summed: str  # the letters that are summed, in the order of x

    @property
    def tokens(self) -> str:
        return "".join(letter for letter in self.x if letter not in self.summed)

    @property
    def outputs(self) -> str:
        return "".join(letter for letter in self.weight if letter not in self.summed)


def rewrite_contraction(graph: fx.Graph, node: fx.Node, constant_nodes: set[fx.Node]) -> None:
    """Replace a product of data and a weight by a linear layer, in place, if one computes the same."""
    if node.target not in (_aten.einsum.default, _aten.tensordot.default):
        return
    operands = _find_operands(node)
    if len(operands) != 2 or None in map(get_fake_tensor, operands):
        return
    if sum(operand in constant_nodes for operand in operands) != 1:
        return
    x, weight = operands if operands[1] in constant_nodes else operands[::-1]
    letters, result = _assign_letters(node, operands)
    contraction = _find_contraction(letters[x], letters[weight], result)
    if contraction is None or not _have_equal_sizes(contraction, x, weight):
        return
    with graph.inserting_before(node):
        linear = _build_linear(contraction, x, weight, node)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)


def _find_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensors of einsum(terms, [x, w]) or tensordot(x, w, x_axes, w_axes)."""
    arguments: Any = node.args[1] if node.target is _aten.einsum.default else node.args[:2]
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _assign_letters(node: fx.Node, operands: list[fx.Node]) -> tuple[dict[fx.Node, str], str]:
    """Return one letter for each axis of the operands, and the letters of the result.

    The result of an einsum without "->" has no letters here, so it is not rewritten.
    """
    values = map(get_fake_tensor, operands)
    ranks = [value.ndim for value in values if value is not None]
    if node.target is _aten.tensordot.default:
        return _letters_of_tensordot(node, operands, ranks)
    terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
    operand_terms = terms.split(",")
    unused_letters = "".join(letter for letter in ascii_lowercase + ascii_uppercase if letter not in terms)
    extra = max(rank - len(term.replace("...", "")) for rank, term in zip(ranks, operand_terms, strict=True))
    dots = unused_letters[:extra]  # the axes that "..." stands for
    expanded_terms = [term.replace("...", dots) for term in operand_terms]
    return dict(zip(operands, expanded_terms, strict=True)), result.replace("...", dots)


def _letters_of_tensordot(node: fx.Node, operands: list[fx.Node], ranks: list[int]) -> tuple[dict[fx.Node, str], str]:
    first, second = ascii_lowercase[: ranks[0]], list(ascii_uppercase[: ranks[1]])
    summed_axes: Any = node.args[2:4]
    for first_axis, second_axis in zip(*summed_axes, strict=True):
        second[second_axis] = first[first_axis]
    shared = {letter for letter in first if letter in second}
    result = "".join(letter for letter in (*first, *second) if letter not in shared)
    return dict(zip(operands, (first, "".join(second)), strict=True)), result


def _find_contraction(x: str, weight: str, result: str) -> Contraction | None:
    """Return the contraction if a linear layer computes it: no letter twice, and only shared letters are summed."""
    # "".isalpha() is False: a tensor without axes is not plain.
    is_plain = all(term.isalpha() and len(set(term)) == len(term) for term in (x, weight, result))
    summed = "".join(letter for letter in x if letter in weight)
    if not is_plain or not summed or set(summed) & set(result):
        return None
    contraction = Contraction(x, weight, result, summed)
    covers_result = bool(contraction.outputs) and set(contraction.tokens + contraction.outputs) == set(result)
    return contraction if covers_result else None


def _have_equal_sizes(contraction: Contraction, x: fx.Node, weight: fx.Node) -> bool:
    """Return whether the summed axes of x and the weight have the same sizes, for every batch and length."""
    x_sizes, weight_sizes = _map_sizes(contraction.x, x), _map_sizes(contraction.weight, weight)
    return all(statically_known_true(x_sizes[letter] == weight_sizes[letter]) for letter in contraction.summed)


def _map_sizes(letters: str, node: fx.Node) -> dict[str, Any]:
    value: Any = get_fake_tensor(node)
    return dict(zip(letters, value.shape, strict=True))


def _build_linear(contraction: Contraction, x: fx.Node, weight: fx.Node, like: fx.Node) -> fx.Node:
    """Add the linear layer. Nodes of the weight get its meta, all others the meta of the product, `like`."""
    sizes = _map_sizes(contraction.weight, weight)
    rows = _permute(x, contraction.x, contraction.tokens + contraction.summed, like)
    if len(contraction.summed) > 1:
        rows = _call(_aten.flatten.using_ints, (rows, len(contraction.tokens), -1), like)
    matrix = _permute(weight, contraction.weight, contraction.outputs + contraction.summed, weight)
    if len(contraction.weight) != 2:
        matrix_shape = [_product(sizes, contraction.outputs), _product(sizes, contraction.summed)]
        matrix = _call(_aten.reshape.default, (matrix, matrix_shape), weight)
    result = _call(_aten.linear.default, (rows, matrix), like)
    if len(contraction.outputs) > 1:
        output_sizes = [int(sizes[letter]) for letter in contraction.outputs]
        result = _call(_aten.unflatten.int, (result, -1, output_sizes), like)
    return _permute(result, contraction.tokens + contraction.outputs, contraction.result, like)


def _product(sizes: dict[str, Any], letters: str) -> int:
    return prod(int(sizes[letter]) for letter in letters)


def _permute(node: fx.Node, letters: str, new_order: str, like: fx.Node) -> fx.Node:
    if letters == new_order:
        return node
    return _call(_aten.permute.default, (node, [letters.index(letter) for letter in new_order]), like)


def _call(function: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Add a call next to `like`, with its meta and the fake tensor of the result."""
    node = like.graph.call_function(function, args)
    values = fx.node.map_aggregate(args, lambda arg: get_fake_tensor(arg) if isinstance(arg, fx.Node) else arg)
    node.meta = {**like.meta, "val": function(*values)}
    return node
