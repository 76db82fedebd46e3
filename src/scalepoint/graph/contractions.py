"""Products that were written as torch.einsum or torch.tensordot with a weight, as linear layers.

    einsum("bthd,hdge->btge", x, w)  ->  unflatten(linear(flatten(x), w of (ge, hd)))

Where every letter that both have is summed over: the rest of x stand for tokens, the rest of w for outputs.
"""

from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from torch import fx

from scalepoint.graph.nodes import get_fake_tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """The letters of x and w, those of the result, and those that are summed over, in the order of x."""

    x: str
    weight: str
    result: str
    summed: str

    @property
    def tokens(self) -> str:
        return "".join(each for each in self.x if each not in self.summed)

    @property
    def outputs(self) -> str:
        return "".join(each for each in self.weight if each not in self.summed)


def rewrite_contraction(graph: fx.Graph, node: fx.Node, fixed: set[fx.Node]) -> None:
    """In place, a product of the data and a weight that a linear layer computes."""
    operands = _operands(node)
    if len(operands) != 2 or sum(each in fixed for each in operands) != 1 or None in map(get_fake_tensor, operands):
        return
    x, weight = operands if operands[1] in fixed else operands[::-1]
    letters, result = _assign_letters(node, operands)
    contraction = _find_contraction(letters[x], letters[weight], result)
    if contraction is None:
        return
    with graph.inserting_before(node):
        linear = _build_linear(contraction, x, weight, node)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    arguments: Any = ()
    if node.target is _aten.einsum.default:
        arguments = node.args[1]
    elif node.target is _aten.tensordot.default:
        arguments = node.args[:2]
    return [each for each in arguments if isinstance(each, fx.Node)]


def _assign_letters(node: fx.Node, operands: list[fx.Node]) -> tuple[dict[fx.Node, str], str]:
    """One for each axis of the operands, and of the result."""
    ranks = [value.ndim for each in operands if (value := get_fake_tensor(each)) is not None]
    if node.target is _aten.tensordot.default:
        one, other = ascii_lowercase[: ranks[0]], list(ascii_uppercase[: ranks[1]])
        pairs: Any = node.args[2:4]
        for left, right in zip(*pairs, strict=True):
            other[right] = one[left]
        shared = {each for each in one if each in other}
        result = "".join(each for each in (*one, *other) if each not in shared)
        return dict(zip(operands, (one, "".join(other)), strict=True)), result
    terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
    operand_terms = terms.split(",")
    more = "".join(each for each in ascii_lowercase + ascii_uppercase if each not in terms)
    extra = max(rank - len(term.replace("...", "")) for rank, term in zip(ranks, operand_terms, strict=True))
    dots = more[:extra]  # the axes that "..." stands for
    whole = [term.replace("...", dots) for term in operand_terms]
    return dict(zip(operands, whole, strict=True)), result.replace("...", dots)


def _find_contraction(x: str, weight: str, result: str) -> Contraction | None:
    is_plain = all(term.isalpha() and len(set(term)) == len(term) for term in (x, weight, result))
    summed = "".join(each for each in x if each in weight)
    if not is_plain or not summed or set(summed) & set(result):
        return None
    contraction = Contraction(x, weight, result, summed)
    has_all = bool(contraction.outputs) and set(contraction.tokens + contraction.outputs) == set(result)
    return contraction if has_all else None


def _build_linear(contraction: Contraction, x: fx.Node, weight: fx.Node, like: fx.Node) -> fx.Node:
    value: Any = get_fake_tensor(weight)
    sizes = dict(zip(contraction.weight, value.shape, strict=True))
    rows = _permute(x, contraction.x, contraction.tokens + contraction.summed, like)
    if len(contraction.summed) > 1:
        rows = _call(_aten.flatten.using_ints, (rows, len(contraction.tokens), -1), like)
    matrix = _permute(weight, contraction.weight, contraction.outputs + contraction.summed, weight)
    if value.ndim != 2:
        whole = [_product(sizes, contraction.outputs), _product(sizes, contraction.summed)]
        matrix = _call(_aten.reshape.default, (matrix, whole), weight)
    result = _call(_aten.linear.default, (rows, matrix), like)
    if len(contraction.outputs) > 1:
        result = _call(_aten.unflatten.int, (result, -1, [int(sizes[each]) for each in contraction.outputs]), like)
    return _permute(result, contraction.tokens + contraction.outputs, contraction.result, like)


def _product(sizes: dict[str, Any], letters: str) -> int:
    total = 1
    for each in letters:
        total *= int(sizes[each])
    return total


def _permute(node: fx.Node, has: str, wants: str, like: fx.Node) -> fx.Node:
    return node if has == wants else _call(_aten.permute.default, (node, [has.index(each) for each in wants]), like)


def _call(function: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = like.graph.call_function(function, args)
    values = fx.node.map_aggregate(args, lambda each: get_fake_tensor(each) if isinstance(each, fx.Node) else each)
    node.meta = {**like.meta, "val": function(*values)}
    return node
