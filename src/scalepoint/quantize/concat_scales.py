"""Tensors that go into a join and nowhere else have its parameters: integers are then copied, not rounded once more.

    cat(relu(conv(x)), conv(y))    both inputs and the output: one stub, calibrated over all of them

A tensor that something else reads too keeps a scale of its own, and is rounded to that of the join in front of it.
"""

from collections.abc import Sequence

from torch import fx

from scalepoint.patterns import Point, get_kind
from scalepoint.quantize.placement import Decision
from scalepoint.spec import QuantizationSpec

LastConcats = dict[
    tuple[fx.Node, QuantizationSpec], fx.Node
]  # a tensor in a precision -> the last join that it goes into


def find_last_concats(decisions: Sequence[Decision], joins: frozenset[str], shares: frozenset[str]) -> LastConcats:
    """Of the joins of these kinds; through what shares the parameters of its input."""
    found: LastConcats = {}
    for decision in reversed(decisions):
        node = decision.site.node
        given = next((spec for point, _, spec in decision.points if point == Point.OUTPUT), None)
        if decision.site.kind not in joins or given is None:
            continue
        root = found.get((node, given), node)
        for point, tensor, spec in decision.points:
            if point == Point.INPUT and spec == given:
                found.update({(each, spec): root for each in _find_exclusive_inputs(tensor, node, shares)})
    return found


def _find_exclusive_inputs(tensor: fx.Node, reader: fx.Node, shares: frozenset[str]) -> list[fx.Node]:
    """The tensor, and those that it was moved from, where nothing but the next of them and the reader reads them."""
    chain = []
    while set(tensor.users) == {reader}:
        chain.append(tensor)
        if get_kind(tensor) not in shares or not tensor.all_input_nodes:
            return chain
        reader, tensor = tensor, tensor.all_input_nodes[0]
    return []
