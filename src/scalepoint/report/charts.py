"""Small charts as SVG text: bars, shares, error by depth, histograms. Colours are classes of the style sheet."""

import math
from collections.abc import Callable, Iterable, Sequence

from scalepoint.report.chosen import Allocated, ChosenCodes
from scalepoint.report.markup import Html, join, name, tag
from scalepoint.report.model import Histogram, ReportedLayer
from scalepoint.words import FAIR_DB, GOOD_DB, POOR_DB, decibel, plural, share_of, short

MANY = 400  # points beyond this are one path, without a title each
BINS = 60
BROKEN = 1e6  # an error beyond this is drawn as if it were this
LETTER = 7.2  # about the width of one in the names of the worst layers


def svg(width: float, height: float, *children: Html, label: str, class_: str) -> Html:
    size = f"0 0 {width:g} {height:g}"
    return tag("svg", tag("title", label), *children, viewBox=size, role="img", class_=class_, width=width)


def bars(rows: Sequence[tuple[str, float, str]], classes: Sequence[str]) -> Html:
    """Label, bar, value: one line a row, all on one scale from zero; infinity fills its line."""
    finite = [abs(value) for _, value, _ in rows if math.isfinite(value)]
    most = max(finite, default=0.0) or 1.0
    lines = []
    for (label, value, text), class_ in zip(rows, classes, strict=True):
        width = 0 if math.isnan(value) else round(100 * min(abs(value), most) / most, 2)
        bar = tag("rect", x=0, y=0, width=max(width, 0.5), height=8, class_=class_)
        drawn = tag("svg", bar, viewBox="0 0 100 8", preserveAspectRatio="none", class_="bar", aria_hidden="true")
        lines.append(join((tag("span", label, class_="bar-label"), drawn, tag("span", text, class_="bar-value"))))
    return tag("div", *(tag("div", line, class_="bar-row") for line in lines), class_="bars")


def shares(parts: Sequence[tuple[str, float]], classes: Sequence[str], label: str) -> Html:
    """One bar cut into shares."""
    pieces, left = [], 0.0
    for (text, share), class_ in zip(parts, classes, strict=True):
        title = tag("title", f"{text}: {share_of(share)}")
        width = max(0.0, min(share, 1.0)) * 100
        pieces.append(
            tag("g", title, tag("rect", x=round(left, 3), y=0, width=round(width, 3), height=8, class_=class_))
        )
        left += width
    drawn = tag("svg", *pieces, viewBox="0 0 100 8", preserveAspectRatio="none", class_="bar", aria_hidden="true")
    return tag("div", tag("span", label, class_="bar-label"), drawn, class_="bar-row share-row")


def steps(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / about
    if not 1e-300 < rough < math.inf:  # also a report of somebody else, with numbers of any size
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)][:20]


def depth(layers: Sequence[ReportedLayer], floats: frozenset[str]) -> Html:
    """SQNR of every layer in the order of execution; what is low hurts."""
    width, height, left, bottom, top = 1000.0, 270.0, 44.0, 30.0, 14.0
    finite = [each.sqnr_db for each in layers if math.isfinite(each.sqnr_db)]
    finite += [each.weight_sqnr_db for each in layers if each.weight_sqnr_db and math.isfinite(each.weight_sqnr_db)]
    low, high = min([0.0, *finite]), max(finite, default=10.0) * 1.08 or 10.0
    low = max(low, -60.0)

    def x_of(index: float) -> float:
        return round(left + 8 + (width - left - 20) * (index / max(1, len(layers) - 1)), 1)

    def y_of(value: float) -> float:
        value = low if math.isnan(value) else min(max(value, low), high)
        return round(top + (height - top - bottom) * (1 - (value - low) / ((high - low) or 1)), 1)

    grid = []
    for bound, word in ((GOOD_DB, "very good"), (FAIR_DB, "good"), (POOR_DB, "fair")):
        if low < bound < high:
            line = tag("line", x1=left, x2=width - 4, y1=y_of(bound), y2=y_of(bound), class_="grid bound")
            grid += [line, tag("text", word, x=left + 4, y=y_of(bound) - 4, class_="tick")]
    for value in steps(low, high):
        line = tag("line", x1=left, x2=width - 4, y1=y_of(value), y2=y_of(value), class_="grid")
        grid += [line, tag("text", f"{value:g}", x=left - 6, y=y_of(value) + 4, text_anchor="end", class_="tick")]
    for index in steps(0, len(layers) - 1, 8):
        grid.append(tag("text", f"{index:g}", x=x_of(index), y=height - 10, text_anchor="middle", class_="tick"))
    weights = [(x_of(i), y_of(each.weight_sqnr_db)) for i, each in enumerate(layers) if each.weight_sqnr_db is not None]
    points = [(x_of(index), y_of(each.sqnr_db)) for index, each in enumerate(layers)]
    drawn = [
        tag("path", d=line_of(points), class_="trace"),
        tag("path", d=_dots(weights, 2.2), class_="dot-weight"),
        *_points(layers, points, floats),
    ]
    label = f"SQNR in dB of {plural(len(layers), 'layer')}, in the order of execution"
    return svg(width, height, *grid, *drawn, label=label, class_="depth")


def _points(
    layers: Sequence[ReportedLayer], points: Sequence[tuple[float, float]], floats: frozenset[str]
) -> list[Html]:
    """Points with titles; of very many layers, only the worst have one."""
    order = sorted(range(len(layers)), key=lambda index: (not math.isnan(layers[index].sqnr_db), layers[index].sqnr_db))
    worst = set(order[:3])
    titled = range(len(layers)) if len(layers) <= MANY else sorted(order[:40])
    drawn = []
    taken: list[tuple[float, float, float]] = []
    if len(layers) > MANY:
        drawn.append(tag("path", d=_dots(points, 2.0), class_="dot"))
    for index in titled:
        each, (x, y) = layers[index], points[index]
        class_ = "dot-worst" if index in worst else "dot-float" if each.name in floats else "dot"
        title = tag("title", f"{short(each.name)}: {decibel(each.sqnr_db)} dB")
        radius = 5.0 if index in worst else 3.4
        drawn.append(tag("g", title, tag("circle", cx=x, cy=y, r=radius, class_=class_)))
        if index in worst:
            drawn.append(label_near(short(each.name, 28), x, y, taken))
    return drawn


def label_near(
    text: str,
    x: float,
    y: float,
    taken: list[tuple[float, float, float]],
    class_: str = "worst-name",
    right: float = 996.0,
) -> Html:
    """A name near its point: below, above or further away, where no other name stands yet; up to the right end."""
    wide = LETTER * len(text)
    start = min(max(x - wide / 2, 46.0), right - wide)
    heights = [y + 19, y - 10, y + 34, y - 25, y + 49, y - 40]
    inside = [each for each in heights if 12 <= each <= 238] or heights[:1]
    free = (each for each in inside if all(_apart(start, wide, each, other) for other in taken))
    height = next(free, inside[0])
    taken.append((start, start + wide, height))
    return tag("text", text, x=round(start, 1), y=round(height, 1), class_=class_)


def _apart(start: float, wide: float, height: float, other: tuple[float, float, float]) -> bool:
    return start > other[1] + 6 or start + wide < other[0] - 6 or abs(height - other[2]) >= 14


def line_of(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def _dots(points: Sequence[tuple[float, float]], half: float) -> str:
    side = 2 * half
    return "".join(f"M{x - half:g} {y - half:g}h{side:g}v{side:g}h-{side:g}z" for x, y in points)


def _level(error: float, least: float) -> float:
    """Signal to noise in dB, up to a highest that is drawn; what is no number is lowest."""
    return -10 * math.log10(min(max(error, least), BROKEN)) if math.isfinite(error) else -10 * math.log10(BROKEN)


def _least(errors: Iterable[float]) -> float:
    """Below the least error that is not none: where what is exact is drawn."""
    return min([error for error in errors if 0 < error < BROKEN], default=1e-3) / 2


def front(found: Allocated, label: str) -> Html:
    """Signal to noise at the output against cost, whose scale is logarithmic: the front, what was chosen of it, and all
    layers alike."""
    width, height, left, bottom, top = 1000.0, 320.0, 48.0, 40.0, 18.0
    known = [*((each.cost, each.error) for each in found.front), *found.uniform.values(), (found.reached, found.error)]
    least = _least(error for _, error in known)
    levels = [_level(error, least) for _, error in known]
    costs = [cost for cost in (*(cost for cost, _ in known), found.limit or 0.0) if cost > 0 and cost < math.inf] or [1]
    low, high, start, end = min(levels) - 2, max(levels) + 2, min(costs) / 1.05, max(costs) * 1.08

    def at(cost: float, error: float) -> tuple[float, float]:
        inside = min(max(cost, start), end) if math.isfinite(cost) else start
        x = left + (width - left - 12) * math.log(inside / start) / math.log(end / start)
        return round(x, 1), round(top + (height - top - bottom) * (high - _level(error, least)) / (high - low), 1)

    drawn = []
    for value in steps(low, high):
        y = round(top + (height - top - bottom) * (high - value) / (high - low), 1)
        drawn.append(tag("line", x1=left, x2=width - 4, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", f"{value:g}", x=left - 6, y=y + 4, text_anchor="end", class_="tick"))
    floor = height - bottom
    drawn += [
        tag("text", f"{value:.4g}", x=at(value, 1)[0], y=floor + 16, text_anchor="middle", class_="tick")
        for value in steps(start, end, 8)
    ]
    drawn.append(tag("text", f"{label}; upwards: dB", x=width / 2, y=height - 6, text_anchor="middle", class_="tick"))
    if found.limit is not None:
        x = at(found.limit, 1)[0]
        drawn.append(tag("line", x1=x, x2=x, y1=top, y2=floor, class_="limit"))
        drawn.append(tag("text", f"budget {found.limit:g}", x=x + 5, y=top + 10, class_="tick"))
    points = [at(each.cost, each.error) for each in found.front]
    drawn.append(tag("path", d=line_of(points), class_="trace"))
    for each, (x, y) in zip(found.front, points, strict=True):
        counts = ", ".join(f"{number} {short(choice, 40)}" for choice, number in each.counts.items())
        title = tag("title", f"{each.cost:.4g}: {_level(each.error, least):.1f} dB; {counts}")
        drawn.append(tag("g", title, tag("circle", cx=x, cy=y, r=3.4, class_="dot")))
    return svg(width, height, *drawn, *_marked(found, at), label=f"dB against {label}", class_="depth")


def _marked(found: Allocated, at: Callable[[float, float], tuple[float, float]]) -> list[Html]:
    """All layers alike, and what was chosen."""
    drawn = []
    taken: list[tuple[float, float, float]] = []
    x, y = at(found.reached, found.error)
    drawn.append(tag("circle", cx=x, cy=y, r=6, class_="dot-worst"))
    drawn.append(label_near("chosen", x, y, taken))
    for choice, (cost, error) in found.uniform.items():
        x, y = at(cost, error)
        drawn.append(tag("rect", x=x - 4, y=y - 4, width=8, height=8, class_="dot-weight"))
        drawn.append(tag("text", f"all {short(choice, 24)}", x=x + 8, y=y + 15, class_="tick"))
    return drawn


def gains(layers: Sequence[ChosenCodes]) -> Html:
    """Signal to noise of every layer's output before and after, in the order of execution."""
    width, height, left, bottom, top = 1000.0, 230.0, 44.0, 26.0, 12.0
    least = _least(error for each in layers for error in (each.before, each.after))
    pairs = [(_level(each.before, least), _level(each.after, least)) for each in layers]
    low, high = min(0.0, *(min(pair) for pair in pairs)), max(max(pair) for pair in pairs) * 1.08 + 1

    def y_of(value: float) -> float:
        return round(top + (height - top - bottom) * (high - value) / (high - low), 1)

    drawn = []
    for value in steps(low, high):
        drawn.append(tag("line", x1=left, x2=width - 4, y1=y_of(value), y2=y_of(value), class_="grid"))
        drawn.append(tag("text", f"{value:g}", x=left - 6, y=y_of(value) + 4, text_anchor="end", class_="tick"))
    for index, (each, (before, after)) in enumerate(zip(layers, pairs, strict=True)):
        x = round(left + 8 + (width - left - 20) * (index / max(1, len(layers) - 1)), 1)
        title = tag("title", f"{short(each.name)}: {before:.1f} dB, then {after:.1f}; {share_of(each.moved)} moved")
        line = tag("line", x1=x, x2=x, y1=y_of(before), y2=y_of(after), class_="gain")
        dots = (tag("circle", cx=x, cy=y_of(before), r=2.6, class_="dot-weight"),
                tag("circle", cx=x, cy=y_of(after), r=3.4, class_="dot"))  # fmt: skip
        drawn.append(tag("g", title, line, *dots))
    for place in steps(0, len(layers) - 1, 8):
        x = round(left + 8 + (width - left - 20) * (place / max(1, len(layers) - 1)), 1)
        drawn.append(tag("text", f"{place:g}", x=x, y=height - 8, text_anchor="middle", class_="tick"))
    label = f"dB of {plural(len(layers), 'layer')} before and after, in the order of execution"
    return svg(width, height, *drawn, label=label, class_="depth")


def histogram(each: Histogram) -> Html:
    """Counts on a logarithmic scale over the range that the codes reach."""
    edges, counts = _fewer(each)
    width, height, bottom, top = 320.0, 150.0, 22.0, 16.0
    ends = [value for value in (edges[0], edges[-1], each.low, each.high) if math.isfinite(value)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    pad = (high - low) * 0.03
    low, high = low - pad, high + pad

    def x_of(value: float) -> float:
        value = min(max(value, low), high) if not math.isnan(value) else low
        return round(width * (value - low) / (high - low), 2)

    floor, most = height - bottom, math.log1p(max([*counts, 1]))
    wide = max(x_of(each.high) - x_of(each.low), 0.5)
    drawn = [tag("rect", x=x_of(each.low), y=top, width=round(wide, 2), height=floor - top, class_="range")]
    for left, right, number in zip(edges, edges[1:], counts, strict=False):
        tall = round((floor - top) * math.log1p(max(number, 0)) / most, 2)
        class_ = "inside" if each.low <= (left + right) / 2 <= each.high else "outside"
        bar = round(max(x_of(right) - x_of(left) - 0.4, 0.4), 2)
        if number:
            drawn.append(tag("rect", x=x_of(left), y=round(floor - tall, 2), width=bar, height=tall, class_=class_))
    ends = [x_of(each.low), x_of(each.high)]
    drawn += [tag("line", x1=x, x2=x, y1=top - 6, y2=floor, class_="limit") for x in ends]
    drawn.append(tag("line", x1=0, x2=width, y1=floor, y2=floor, class_="axis"))
    for value in steps(low, high, 4):
        x = min(max(x_of(value), 10), width - 10)
        drawn.append(tag("text", f"{value:.6g}", x=x, y=height - 6, text_anchor="middle", class_="tick"))
    label = f"{each.kind} values of {short(each.layer)}"
    picture = svg(width, height, *drawn, label=label, class_="histogram")
    caption = tag("figcaption", tag("strong", name(each.layer, 60)), tag("span", each.kind, class_="muted"))
    note = f"codes reach {each.low:.4g} to {each.high:.4g}; {share_of(_outside(each)) or '0%'} of the values outside"
    return tag("figure", caption, picture, tag("p", note, class_="muted small"), class_="card")


def _outside(each: Histogram) -> float:
    """The share of values in bins whose middle is out of the range."""
    total = sum(each.counts) or 1
    middles = [(low + high) / 2 for low, high in zip(each.edges, each.edges[1:], strict=False)]
    pairs = zip(middles, each.counts, strict=True)
    return sum(number for middle, number in pairs if not each.low <= middle <= each.high) / total


def _fewer(each: Histogram) -> tuple[list[float], list[int]]:
    """At most sixty bins, from the first to the last that is not empty: neighbours are added up."""
    filled = [index for index, number in enumerate(each.counts) if number] or [0]
    start, end = filled[0], filled[-1] + 1
    step = max(1, math.ceil((end - start) / BINS))
    at = range(start, end, step)
    counts = [sum(each.counts[index : min(index + step, end)]) for index in at]
    return [*(each.edges[index] for index in at), each.edges[min(end, len(each.edges) - 1)]], counts
