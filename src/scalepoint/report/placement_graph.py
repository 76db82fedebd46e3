"""Draws the placement graph of the report, one picture per block of the model.

Names are paths, so the model is a tree of blocks. A picture has a box per operation, and one box per inner block, which
links to its picture. Inner blocks are opened if the picture still has few boxes. The row of a box is the length of the
longest path from the inputs. Quantized tensors have another colour.

    nodes -> build_blocks (boxes of each block) -> draw_placement (coordinates) -> templates/sections/placement.html.j2
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from scalepoint.report.charts import SvgElement, format_number, rectangle, text_shape
from scalepoint.report.model import GraphNode
from scalepoint.support.formatting import describe_precision, format_plural, shorten

WHOLE_MODEL = "the whole model"
MAX_DEPTH = 8  # of nested blocks
MAX_BOXES = 200  # per picture
MAX_OPENED_BOXES = 24  # inner blocks are opened while a picture has at most this many boxes
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 280, 40, 26, 26, 18  # of boxes, in SVG units

INDENT = "\u00a0\u00a0"

BlockPath = tuple[str, ...]
Corner = tuple[float, float]  # the upper left corner of a box


@dataclass
class Box:
    """One operation, or one inner block.

    Attributes:
        label: Name in the picture.
        note: Kind of operation.
        nodes: Indices of its operations.
        block: Path of the inner block; None for an operation.
        row, column: Position in the picture.
        inputs: Indices of the boxes that it reads.
        codes: The `inputs` whose tensors are quantized.
        outside: Names of operations outside the picture that it reads.
    """

    label: str
    note: str
    nodes: list[int]
    block: BlockPath | None = None
    row: int = 0
    column: int = 0
    inputs: set[int] = field(default_factory=set)
    codes: set[int] = field(default_factory=set)
    outside: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """The boxes of one block of the model: all operations whose path starts with `path`."""

    path: BlockPath
    boxes: tuple[Box, ...]
    left_out: int
    size: int

    @property
    def title(self) -> str:
        return ".".join(self.path) or WHOLE_MODEL


def build_blocks(graph: Sequence[GraphNode]) -> list[Block]:
    """Return all blocks in the order of the model, the whole model first."""
    paths = [tuple(node.name.split(".", MAX_DEPTH)) for node in graph]
    members: dict[BlockPath, list[int]] = {(): list(range(len(graph)))}
    for index, path in enumerate(paths):
        for length in range(1, min(len(path), MAX_DEPTH + 1)):
            members.setdefault(path[:length], []).append(index)
    blocks = _find_blocks(members)
    position = {node.name: index for index, node in enumerate(graph)}
    built = []
    for path in blocks:
        closed = _find_closed_blocks(paths, path, members[path], blocks)
        built.append(_build_block(graph, paths, path, members[path], closed, position))
    return built


def _find_closed_blocks(
    paths: Sequence[BlockPath], prefix: BlockPath, nodes: Sequence[int], blocks: Collection[BlockPath]
) -> set[BlockPath]:
    """Return the inner blocks that stay one box.

    All blocks of the outermost level are opened together, level by level, while the picture has few boxes.
    """

    def list_boxes(closed: set[BlockPath]) -> set[BlockPath | int]:
        """Return the boxes of the picture: closed blocks by their path, operations by their index."""
        return {_box_of(paths[index], prefix, closed) or index for index in nodes}

    closed = set(blocks)
    while shown_blocks := closed & list_boxes(closed):
        level = min(map(len, shown_blocks))
        opened = {path for path in shown_blocks if len(path) == level}
        if len(list_boxes(closed - opened)) > MAX_OPENED_BOXES:
            break
        closed -= opened
    return closed


def _box_of(path: BlockPath, prefix: BlockPath, closed: Collection[BlockPath]) -> BlockPath | None:
    """Return the inner block whose box contains the operation; None if the operation has its own box."""
    blocks = (path[:length] for length in range(len(prefix) + 1, len(path)))  # the outermost block first
    return next((block for block in blocks if block in closed), None)


def _find_blocks(members: Mapping[BlockPath, Sequence[int]]) -> list[BlockPath]:
    """Return blocks with more than one operation, without those that contain only one inner block."""
    inner: dict[BlockPath, int] = {}  # block -> operations of its largest inner block
    for path, nodes in members.items():
        if path:
            inner[path[:-1]] = max(inner.get(path[:-1], 0), len(nodes))
    return [path for path, nodes in members.items() if len(nodes) > 1 and inner.get(path) != len(nodes)] or [()]


def _build_block(
    graph: Sequence[GraphNode],
    paths: Sequence[BlockPath],
    prefix: BlockPath,
    nodes: Sequence[int],
    closed: Collection[BlockPath],
    position: dict[str, int],
) -> Block:
    boxes: list[Box] = []
    box_of_node: dict[int, int] = {}  # index of an operation -> index of its box
    box_of_block: dict[BlockPath, int] = {}
    left_out = 0
    for index in nodes:
        path = paths[index]
        block = _box_of(path, prefix, closed)
        if block is not None and block in box_of_block:
            box_of_node[index] = box_of_block[block]
            boxes[box_of_block[block]].nodes.append(index)
            continue
        if len(boxes) == MAX_BOXES:
            left_out += 1
            continue
        box_of_node[index] = len(boxes)
        if block is not None:
            box_of_block[block] = len(boxes)
        label = ".".join((block or path)[len(prefix) :])
        boxes.append(Box(label or graph[index].name, graph[index].kind, [index], block))
    for index, box in box_of_node.items():
        for source in graph[index].inputs:
            other = box_of_node.get(position.get(source, -1))
            if other is None:
                boxes[box].outside[source] = None
            elif other != box:
                boxes[box].inputs.add(other)
                if source in graph[index].codes:
                    boxes[box].codes.add(other)
    _arrange(boxes)
    return Block(prefix, tuple(boxes), left_out, len(nodes))


def _arrange(boxes: Sequence[Box]) -> None:
    """Set rows and columns. The row is 1 + the largest row of the earlier boxes that a box reads."""
    row_lengths: dict[int, int] = {}
    for index, box in enumerate(boxes):
        box.row = max((boxes[source].row + 1 for source in box.inputs if source < index), default=0)
        box.column = row_lengths.get(box.row, 0)
        row_lengths[box.row] = box.column + 1


@dataclass(frozen=True)
class DrawnBox:
    """One box with its SVG elements; `link` is the id of its block's picture."""

    title: str
    shapes: Sequence[SvgElement]
    link: str | None


@dataclass(frozen=True)
class DrawnBlock:
    """The picture of one block."""

    id: str
    title: str
    label: str
    size: int
    indent: str
    width: float
    height: float
    edges: Sequence[SvgElement]
    boxes: Sequence[DrawnBox]
    left_out: int
    outer: "DrawnBlock | None"


@dataclass(frozen=True)
class Placement:
    """All pictures of a graph, and the legend as (CSS class, text)."""

    blocks: Sequence[DrawnBlock]
    legend: Sequence[tuple[str, str]]


def draw_placement(
    graph: Sequence[GraphNode], classes: Mapping[str, str], colour_names: Mapping[str, str]
) -> Placement:
    """Draw every block of the graph; `classes` gives each precision its colour, `colour_names` each colour its text."""
    blocks = build_blocks(graph)
    ids = {block.path: f"block-{index}" for index, block in enumerate(blocks)}
    drawn: dict[BlockPath, DrawnBlock] = {}
    for block in blocks:
        drawn[block.path] = _draw_block(block, graph, ids, classes, drawn)
    used = dict.fromkeys(classes[node.precision] for node in graph)
    legend = [(css, colour_names[css]) for css in used]
    if any(node.codes for node in graph):
        legend.append(("line-key", "a quantized tensor"))
    if any(node.inputs for node in graph):
        legend.append(("line-key plain-line", "a float tensor"))
    if len(drawn) > 1:
        legend.append(("block-key", "a block: its boxes are a picture of their own"))
    return Placement(list(drawn.values()), legend)


def _draw_block(
    block: Block,
    graph: Sequence[GraphNode],
    ids: Mapping[BlockPath, str],
    classes: Mapping[str, str],
    drawn: Mapping[BlockPath, DrawnBlock],
) -> DrawnBlock:
    boxes = block.boxes
    columns: dict[int, int] = {}  # row -> number of boxes
    for box in boxes:
        columns[box.row] = max(columns.get(box.row, 0), box.column + 1)
    full_width = max(columns.values(), default=1) * (WIDTH + GAP_X) - GAP_X
    corners: list[Corner] = []
    for box in boxes:
        row_width = columns[box.row] * (WIDTH + GAP_X) - GAP_X
        x = MARGIN + (full_width - row_width) / 2 + box.column * (WIDTH + GAP_X)
        corners.append((x, MARGIN + box.row * (HEIGHT + GAP_Y)))
    edges = []
    longest = 0  # rows that the longest edge crosses
    for index, box in enumerate(boxes):
        for source in sorted(box.inputs):
            path = _edge_path(corners[source], corners[index], boxes[source].row, box.row)
            css = "edge codes" if source in box.codes else "edge"
            edges.append(SvgElement("path", {"d": path, "class": css}))
            longest = max(longest, abs(box.row - boxes[source].row))
    parents = (block.path[:length] for length in range(len(block.path) - 1, -1, -1))
    outer = next((path for path in parents if path in ids), None)
    return DrawnBlock(
        id=ids[block.path],
        title=block.title,
        label=f"placement in {shorten(block.title)}: {format_plural(block.size, 'operation')}",
        size=block.size,
        indent=INDENT * len(block.path),
        width=full_width + 2 * MARGIN + (_bulge(longest) if longest > 1 else 0),
        height=2 * MARGIN + (max(columns, default=0) + 1) * (HEIGHT + GAP_Y) - GAP_Y,
        edges=edges,
        boxes=[_draw_box(box, corner, graph, ids, classes) for box, corner in zip(boxes, corners, strict=True)],
        left_out=block.left_out,
        outer=None if outer is None else drawn[outer],
    )


def _bulge(span: int) -> int:
    """Return how far an edge over `span` rows curves to the right."""
    return 24 + 7 * min(span, 9)


def _edge_path(start: Corner, end: Corner, start_row: int, end_row: int) -> str:
    """Return the SVG path of an edge between two boxes, given their upper left corners.

    An edge to the next row leaves at the bottom and enters at the top. An edge over several rows curves around the
    boxes between, on their right.
    """
    if end_row - start_row == 1:
        x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1] - 1
        middle = (y1 + y2) / 2
        return f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    x1, y1, x2, y2 = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0] + WIDTH, end[1] + HEIGHT / 2
    far_right = max(x1, x2) + _bulge(abs(end_row - start_row)) * 1.2
    return f"M{x1:g} {y1:g}C{far_right:g} {y1:g} {far_right:g} {y2:g} {x2:g} {y2:g}"


def _draw_box(
    box: Box,
    corner: tuple[float, float],
    graph: Sequence[GraphNode],
    ids: Mapping[BlockPath, str],
    classes: Mapping[str, str],
) -> DrawnBox:
    x, y = corner
    first = graph[box.nodes[0]]
    counts: dict[str, int] = {}
    for index in box.nodes:
        counts[graph[index].precision] = counts.get(graph[index].precision, 0) + 1
    precisions = sorted(counts.items(), key=lambda item: -item[1])
    if box.block is None:
        name = first.name
        notes = (shorten(box.note, 22), shorten(_without_granularity(first.precision), 40))
        note = " · ".join(filter(None, notes))
    else:
        name, note = ".".join(box.block), format_plural(len(box.nodes), "operation")
    tooltip = "; ".join(f"{count} in {describe_precision(precision)}" for precision, count in precisions[:6])
    css = "node block-node" if box.block else "node"
    frame = SvgElement("rect", {"x": format_number(x), "y": y, "width": WIDTH, "height": HEIGHT, "rx": 6, "class": css})
    shapes = [
        *_outside_inputs(box, x, y),
        frame,
        *_precision_strip(x, y, precisions, classes),
        text_shape(shorten(box.label, 34), x + 14, y + 17, "node-name"),
        text_shape(note, x + 14, y + 32, "node-note"),
    ]
    return DrawnBox(f"{shorten(name, 400)}: {tooltip}", shapes, None if box.block is None else ids[box.block])


def _without_granularity(precision: str) -> str:
    """Return the precision in words that fit into a box."""
    return re.sub(r" per \w+", "", describe_precision(precision))


def _outside_inputs(box: Box, x: float, y: float) -> list[SvgElement]:
    """Draw a short line into a box that reads operations outside the picture, with their names."""
    if not box.outside:
        return []
    first, *rest = box.outside
    text = f"from {shorten(first, 24)}" + (f" and {len(rest)} more" if rest else "")
    end = x + WIDTH - 14
    line = SvgElement("path", {"d": f"M{end:g} {y - 12:g}v11", "class": "edge fed"})
    return [line, text_shape(text, end - 6, y - 4, "node-note", "end")]


def _precision_strip(
    x: float, y: float, precisions: Sequence[tuple[str, int]], classes: Mapping[str, str]
) -> list[SvgElement]:
    """Draw the precisions of a box as a strip on its left. The height of each colour is its share."""
    total = sum(count for _, count in precisions)
    top, rectangles = y + 4.0, []
    for precision, count in precisions:
        height = (HEIGHT - 8) * count / total
        rectangles.append(rectangle(x + 4, round(top, 2), 5, round(height, 2), classes[precision]))
        top += height
    return rectangles
