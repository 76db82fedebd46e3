"""Finds tensors that are only concatenated: they share the quantizer of the result, so their codes are copied.

    cat(relu(conv(x)), conv(y))    both inputs and the output: one quantizer, calibrated over all of them

A tensor with other readers keeps its own scale, and is rounded to that of the concat in front of it.
"""

from collections.abc import Sequence

from torch import fx

from scalepoint.patterns import Point, get_kind
from scalepoint.quantize.placement import Decision
from scalepoint.spec import QuantizationSpec

# A tensor with the spec of its quantizer -> the last concat that its codes reach unchanged.
LastConcats = dict[tuple[fx.Node, QuantizationSpec], fx.Node]


def find_last_concats(
    decisions: Sequence[Decision], concat_kinds: frozenset[str], sharing_kinds: frozenset[str]
) -> LastConcats:
    """Find the tensors that share the quantizer of a concat.

    Args:
        decisions: One per fused group, in graph order.
        concat_kinds: Kinds of operations that the target runs as a concat of codes.
        sharing_kinds: Kinds of operations whose output has the parameters of their input, such as reshape.
    """
    last_concats: LastConcats = {}
    for decision in reversed(decisions):
        node = decision.site.node
        output_spec = next((spec for point, _, spec in decision.points if point == Point.OUTPUT), None)
        if decision.site.kind not in concat_kinds or output_spec is None:
            continue
        last_concat = last_concats.get((node, output_spec), node)  # the result may go into another concat
        for point, tensor, spec in decision.points:
            if point == Point.INPUT and spec == output_spec:
                for source in _find_exclusive_sources(tensor, node, sharing_kinds):
                    last_concats[source, spec] = last_concat
    return last_concats


def _find_exclusive_sources(tensor: fx.Node, reader: fx.Node, sharing_kinds: frozenset[str]) -> list[fx.Node]:
    """Return the tensor and the tensors it was reshaped or moved from; none if one of them has another reader."""
    chain = []
    while set(tensor.users) == {reader}:
        chain.append(tensor)
        if get_kind(tensor) not in sharing_kinds or not tensor.all_input_nodes:
            return chain
        reader, tensor = tensor, tensor.all_input_nodes[0]
    return []
