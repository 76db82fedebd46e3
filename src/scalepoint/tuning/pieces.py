"""A graph in pieces: what is solved, judged and advanced together. They come from the graph, never from class names.

    layer   a node with a quantized layer, and what stands before it
    block   between two places where one value alone goes on: residual blocks, attention with its join, or a few layers
    model   everything

Values that are the same in both streams (masks, positions) may pass a cut: nothing is lost by them.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

Unit = Literal["layer", "block", "model"]
MIN_LAYERS_PER_BLOCK = 2  # a block goes on over cuts until it has so many


@dataclass(frozen=True)
class Piece:
    """Nodes in their order, what they read from before, and what is read after them."""

    nodes: tuple[fx.Node, ...]
    entries: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    last_reads: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)  # node -> values it reads last


def cut_into_pieces(
    graph: fx.Graph, same: Collection[fx.Node], has_layer: Callable[[fx.Node], bool], unit: Unit
) -> list[Piece]:
    """All nodes but the placeholders and the output, in pieces; the last may have no layer."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    parts: list[list[fx.Node]] = [[]]
    layers, going = 0, set[fx.Node]()
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in nodes:
        parts[-1].append(node)
        layers += has_layer(node)
        going.add(node)
        going = {each for each in going if any(order[user] > order[node] for user in each.users)}
        is_narrow = len([each for each in going if each not in same]) <= 1
        ends = {"layer": layers >= 1, "block": layers >= MIN_LAYERS_PER_BLOCK and is_narrow, "model": False}[unit]
        if ends:
            parts.append([])
            layers = 0
    return [_make_piece(part) for part in parts if part]


def _make_piece(nodes: list[fx.Node]) -> Piece:
    inside = set(nodes)
    entries = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    exits = tuple(node for node in nodes if any(user not in inside for user in node.users))
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last |= dict.fromkeys(node.all_input_nodes, node)
    reads: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        if value not in exits:
            reads.setdefault(reader, []).append(value)
    return Piece(tuple(nodes), tuple(entries), exits, {node: tuple(values) for node, values in reads.items()})
