"""Cuts a graph into pieces, which are solved and compared as one. Only the graph decides, never names of classes.

    layer   a node with a quantized layer, and the nodes before it
    block   ends where later nodes read one value only: after a residual block, an attention with its add, or a few
            plain layers
    model   the whole graph

Values that are the same in both streams (masks, positions) do not count: quantization cannot change them.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

Unit = Literal["layer", "block", "model"]
MIN_LAYERS_PER_BLOCK = 2  # a block with fewer layers continues with the next one


@dataclass(frozen=True)
class Piece:
    """A part of the graph.

    Attributes:
        nodes: Its nodes, in order.
        entries: Nodes before it whose values it reads.
        exits: Its nodes whose values are read after it.
        last_reads: Node -> values that can be dropped after it, because nothing reads them later.
    """

    nodes: tuple[fx.Node, ...]
    entries: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    last_reads: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)


def cut_into_pieces(
    graph: fx.Graph, same: Collection[fx.Node], has_layer: Callable[[fx.Node], bool], unit: Unit
) -> list[Piece]:
    """Cut all nodes between the placeholders and the output into pieces.

    Args:
        graph: The graph.
        same: Nodes with one value for both streams.
        has_layer: Whether a node has a quantized layer.
        unit: Size of a piece.

    Returns:
        The pieces in order. The last one may have no layer.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    order = {node: index for index, node in enumerate(graph.nodes)}
    parts: list[list[fx.Node]] = [[]]
    min_layers = {"layer": 1, "block": MIN_LAYERS_PER_BLOCK, "model": math.inf}[unit]
    layer_count = 0  # in the last part
    read_later: set[fx.Node] = set()  # nodes so far whose values a later node reads
    for node in nodes:
        parts[-1].append(node)
        layer_count += has_layer(node)
        read_later.add(node)
        read_later = {source for source in read_later if any(order[user] > order[node] for user in source.users)}
        is_joined = len([source for source in read_later if source not in same]) <= 1
        if layer_count >= min_layers and (is_joined or unit == "layer"):
            parts.append([])
            layer_count = 0
    return [_make_piece(part) for part in parts if part]


def _make_piece(nodes: list[fx.Node]) -> Piece:
    """Find entries, exits and last reads of consecutive nodes."""
    inside = set(nodes)
    entries = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    exits = tuple(node for node in nodes if any(user not in inside for user in node.users))
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last_reader |= dict.fromkeys(node.all_input_nodes, node)
    last_reads: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last_reader.items():
        if value not in exits:
            last_reads.setdefault(reader, []).append(value)
    return Piece(tuple(nodes), tuple(entries), exits, {node: tuple(values) for node, values in last_reads.items()})
