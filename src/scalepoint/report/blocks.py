"""The placement graph, one block of the model at a time.

Names are paths, so the model is a tree. A block shows what is in it: operations as boxes, inner blocks as one box each
that leads into them, or opened where that still gives few boxes. Boxes stand in rows by the longest way from the
inputs; every box is drawn once. Tensors that pass as codes are drawn in another colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scalepoint.report.markup import Html, join, name, tag
from scalepoint.report.model import GraphNode
from scalepoint.words import plural, short

WHOLE = "the whole model"
DEEPEST = 8
MOST_BOXES = 200
FEW_BOXES = 24  # up to so many, inner blocks are opened
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 280, 40, 26, 26, 18

Path = tuple[str, ...]


@dataclass
class Box:
    """One operation, or one inner block."""

    label: str
    note: str
    nodes: list[int]
    block: Path | None = None
    rank: int = 0
    column: int = 0
    inputs: set[int] = field(default_factory=set)  # boxes, by index
    codes: set[int] = field(default_factory=set)  # those of them that reach it quantized
    outside: dict[str, None] = field(default_factory=dict)  # what it reads from elsewhere, by name


@dataclass(frozen=True)
class Block:
    """What one path prefix holds."""

    path: Path
    boxes: tuple[Box, ...]
    left_out: int
    size: int

    @property
    def title(self) -> str:
        return ".".join(self.path) or WHOLE


def blocks_of(graph: Sequence[GraphNode]) -> list[Block]:
    """All blocks in the order of the model, the whole first."""
    paths = [tuple(node.name.split(".", DEEPEST)) for node in graph]
    members: dict[Path, list[int]] = {(): list(range(len(graph)))}
    for index, path in enumerate(paths):
        for length in range(1, min(len(path), DEEPEST + 1)):
            members.setdefault(path[:length], []).append(index)
    kept = _kept(members)
    position = {node.name: index for index, node in enumerate(graph)}
    return [
        _block(graph, paths, path, members[path], _closed(paths, path, members[path], kept), position) for path in kept
    ]


def _closed(paths: Sequence[Path], prefix: Path, nodes: Sequence[int], kept: dict[Path, None]) -> dict[Path, None]:
    """The inner blocks that stay one box: the outer ones are opened, level by level, while few boxes come of it."""
    closed = dict(kept)
    while True:
        shown = dict.fromkeys(_box_of(paths[index], prefix, closed) or (index,) for index in nodes)
        inner = [each for each in shown if each in closed]
        level = min(map(len, inner), default=0)
        opened = {path: None for path in closed if path not in inner or len(path) > level}
        after = {_box_of(paths[index], prefix, opened) or (index,) for index in nodes}
        if not inner or len(after) > FEW_BOXES:
            return closed
        closed = opened


def _box_of(path: Path, prefix: Path, closed: Mapping[Path, None]) -> Path | None:
    """The inner block that an operation is drawn in."""
    return next((path[:n] for n in range(len(prefix) + 1, len(path)) if path[:n] in closed), None)


def _kept(members: dict[Path, list[int]]) -> dict[Path, None]:
    """Blocks worth a picture: more than one operation, and not the same ones as the only block inside."""
    inner: dict[Path, int] = {}
    for path, nodes in members.items():
        if path:
            inner[path[:-1]] = max(inner.get(path[:-1], 0), len(nodes))
    kept = {path: None for path, nodes in members.items() if len(nodes) > 1 and inner.get(path) != len(nodes)}
    return kept or {(): None}


def _block(
    graph: Sequence[GraphNode],
    paths: Sequence[Path],
    prefix: Path,
    nodes: Sequence[int],
    kept: dict[Path, None],
    position: dict[str, int],
) -> Block:
    boxes: list[Box] = []
    where: dict[int, int] = {}  # node -> its box
    inner: dict[Path, int] = {}  # inner block -> its box
    left_out = 0
    for index in nodes:
        path = paths[index]
        block = _box_of(path, prefix, kept)
        if block is not None and block in inner:
            where[index] = inner[block]
            boxes[inner[block]].nodes.append(index)
            continue
        if len(boxes) == MOST_BOXES:
            left_out += 1
            continue
        where[index] = len(boxes)
        if block is not None:
            inner[block] = len(boxes)
        label = ".".join((block or path)[len(prefix) :])
        boxes.append(Box(label or graph[index].name, graph[index].kind, [index], block))
    for index, box in where.items():
        for source in graph[index].inputs:
            other = where.get(position.get(source, -1))
            if other is None:
                boxes[box].outside[source] = None
            elif other != box:
                boxes[box].inputs.add(other)
                boxes[box].codes |= {other} if source in graph[index].codes else set()
    _place(boxes)
    return Block(prefix, tuple(boxes), left_out, len(nodes))


def _place(boxes: Sequence[Box]) -> None:
    """Rank = 1 + the largest rank of the boxes before it that it reads; a block may also read a later one."""
    width: dict[int, int] = {}
    for index, box in enumerate(boxes):
        box.rank = max((boxes[other].rank + 1 for other in box.inputs if other < index), default=0)
        box.column = width.get(box.rank, 0)
        width[box.rank] = box.column + 1


def draw(block: Block, graph: Sequence[GraphNode], identifiers: Mapping[Path, str], classes: Mapping[str, str]) -> Html:
    """A picture of one block; `classes` gives each precision its colour."""
    boxes = block.boxes
    rows: dict[int, int] = {}
    for box in boxes:
        rows[box.rank] = max(rows.get(box.rank, 0), box.column + 1)
    widest = max(rows.values(), default=1)
    full = widest * (WIDTH + GAP_X) - GAP_X
    places = []
    for box in boxes:
        own = rows[box.rank] * (WIDTH + GAP_X) - GAP_X
        x = MARGIN + (full - own) / 2 + box.column * (WIDTH + GAP_X)
        places.append((x, MARGIN + box.rank * (HEIGHT + GAP_Y)))
    lanes = max((abs(box.rank - boxes[other].rank) for box in boxes for other in box.inputs), default=0)
    width = full + 2 * MARGIN + (_bulge(lanes) if lanes > 1 else 0)
    height = 2 * MARGIN + (max(rows, default=0) + 1) * (HEIGHT + GAP_Y) - GAP_Y
    edges = [
        tag(
            "path",
            d=_edge(places[other], places[index], boxes[other].rank, box.rank),
            class_="edge codes" if other in box.codes else "edge",
        )
        for index, box in enumerate(boxes)
        for other in sorted(box.inputs)
    ]
    drawn = [_box(box, place, graph, identifiers, classes) for box, place in zip(boxes, places, strict=True)]
    label = f"placement in {short(block.title)}: {plural(block.size, 'operation')}"
    title = tag("title", label)
    size = f"0 0 {width:g} {height:g}"
    picture = tag("svg", title, *edges, *drawn, viewBox=size, width=width, height=height, role="group", class_="graph")
    more = tag("p", f"and {block.left_out} more, not drawn", class_="muted") if block.left_out else None
    outer = next((block.path[:n] for n in range(len(block.path) - 1, -1, -1) if block.path[:n] in identifiers), None)
    up = None
    if outer is not None and block.path:
        link = tag("a", "up to ", name(".".join(outer) or WHOLE, 60), href=f"#{identifiers[outer]}")
        up = tag("p", link, class_="up")
    return join((up, tag("div", picture, more, class_="scroll", tabindex="0", role="region", aria_label=label)))


def _bulge(span: int) -> int:
    return 24 + 7 * min(span, 9)


def _edge(source: tuple[float, float], end: tuple[float, float], rank: int, other: int) -> str:
    """To the next row, from below to above; over several rows, around on the right."""
    if other - rank == 1:
        x1, y1, x2, y2 = source[0] + WIDTH / 2, source[1] + HEIGHT, end[0] + WIDTH / 2, end[1] - 1
        middle = (y1 + y2) / 2
        return f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    x1, y1, x2, y2 = source[0] + WIDTH, source[1] + HEIGHT / 2, end[0] + WIDTH, end[1] + HEIGHT / 2
    far = max(x1, x2) + _bulge(abs(other - rank)) * 1.2
    return f"M{x1:g} {y1:g}C{far:g} {y1:g} {far:g} {y2:g} {x2:g} {y2:g}"


def _box(
    box: Box,
    place: tuple[float, float],
    graph: Sequence[GraphNode],
    identifiers: Mapping[Path, str],
    classes: Mapping[str, str],
) -> Html:
    x, y = place
    first = graph[box.nodes[0]]
    counts: dict[str, int] = {}
    for index in box.nodes:
        counts[graph[index].precision] = counts.get(graph[index].precision, 0) + 1
    note = (
        plural(len(box.nodes), "operation")
        if box.block is not None
        else " · ".join(filter(None, (short(box.note, 22), short(first.precision, 30))))
    )
    words = "; ".join(
        f"{number} in {precision}" for precision, number in sorted(counts.items(), key=lambda each: -each[1])[:6]
    )
    title = tag("title", f"{short(first.name if box.block is None else '.'.join(box.block), 400)}: {words}")
    frame = tag("rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=6, class_="node block-node" if box.block else "node")
    text = [
        tag("text", short(box.label, 34), x=x + 14, y=y + 17, class_="node-name"),
        tag("text", note, x=x + 14, y=y + 32, class_="node-note"),
    ]
    drawn = tag("g", title, *_feeds(box, x, y), frame, *_strip(x, y, counts, classes), *text)
    if box.block is None:
        return drawn
    return tag("a", drawn, href=f"#{identifiers[box.block]}", class_="enter")


def _feeds(box: Box, x: float, y: float) -> list[Html]:
    """Where a box reads from, when that is not in the picture."""
    if not box.outside:
        return []
    first, *others = box.outside
    words = f"from {short(first, 24)}" + (f" and {len(others)} more" if others else "")
    end = x + WIDTH - 14
    line = tag("path", d=f"M{end:g} {y - 12:g}v11", class_="edge fed")
    return [line, tag("text", words, x=end - 6, y=y - 4, text_anchor="end", class_="node-note")]


def _strip(x: float, y: float, counts: dict[str, int], classes: Mapping[str, str]) -> list[Html]:
    """The precisions of a box as a strip on its left, each as tall as its share."""
    total, at, pieces = sum(counts.values()), y + 4.0, []
    for precision, number in sorted(counts.items(), key=lambda each: -each[1]):
        tall = (HEIGHT - 8) * number / total
        pieces.append(tag("rect", x=x + 4, y=round(at, 2), width=5, height=round(tall, 2), class_=classes[precision]))
        at += tall
    return pieces
