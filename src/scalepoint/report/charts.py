"""Coordinates of the charts. `templates/macros.html.j2` writes them as SVG; colours are classes of the style sheet."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scalepoint.results import LayerError, PrecisionAllocation, TensorHistogram, TunedLayer
from scalepoint.support.formatting import (
    FAIR_DB,
    GOOD_DB,
    POOR_DB,
    format_decibels,
    format_plural,
    format_share,
    shorten,
)

MAX_TITLED_POINTS = 400  # with more points, all are one SVG path and only the worst have a title
MAX_DRAWN_BINS = 60
MAX_LAYER_TICKS = 8
MAX_DRAWN_ERROR = 1e6  # larger errors are drawn as this one
LETTER_WIDTH = 7.2  # approximate width of a letter in a label, in SVG units
LABEL_OFFSETS = (19, -10, 34, -25, 49, -40)  # y of a label relative to its point: below, above, then further away
MIN_LABEL_Y, MAX_LABEL_Y = 12, 238  # inside the plot area
COST_LABELS = {
    "size": "size of the file, as a share of the float file",
    "bits": "bits of a weight, on average",
    "speed": "times the speed of the float model, by MACs",
    "cost": "share of the float model's size + share of its time",
}

Point = tuple[float, float]


@dataclass(frozen=True)
class SvgElement:
    """One SVG element. Browsers show `title` as a tooltip."""

    element: str
    attributes: Mapping[str, object]
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart: its size, its label for screen readers, and its elements from back to front."""

    width: float
    height: float
    label: str
    css: str
    shapes: Sequence[SvgElement]


@dataclass(frozen=True)
class ChartBar:
    """One bar of a bar chart; the width is in percent."""

    label: str
    text: str
    width: float
    css: str


@dataclass(frozen=True)
class BarShare:
    """One segment of a stacked bar; left and width are in percent."""

    text: str
    left: float
    width: float
    css: str


@dataclass
class LabelPlacer:
    """Places labels next to their points so that they do not overlap."""

    right: float = 996.0  # the right limit of all labels
    # Left, right and y of each placed label.
    label_boxes: list[tuple[float, float, float]] = field(default_factory=list)

    def near(self, text: str, x: float, y: float, css: str = "worst-name") -> SvgElement:
        """Place a label at the first of LABEL_OFFSETS where it overlaps no other label."""
        width = LETTER_WIDTH * len(text)
        left = min(max(x - width / 2, 46.0), self.right - width)
        candidates = [y + offset for offset in LABEL_OFFSETS]
        inside = [candidate for candidate in candidates if MIN_LABEL_Y <= candidate <= MAX_LABEL_Y] or candidates[:1]
        label_y = next((candidate for candidate in inside if self._is_free(left, left + width, candidate)), inside[0])
        self.label_boxes.append((left, left + width, label_y))
        return text_shape(text, round(left, 1), round(label_y, 1), css)

    def _is_free(self, left: float, right: float, y: float) -> bool:
        """Whether a label with these ends overlaps no placed label."""
        for placed_left, placed_right, placed_y in self.label_boxes:
            is_beside = left > placed_right + 6 or right < placed_left - 6
            is_above_or_below = abs(y - placed_y) >= 14
            if not is_beside and not is_above_or_below:
                return False
        return True


def text_shape(text: str, x: float, y: float, css: str = "tick", anchor: str | None = None) -> SvgElement:
    return SvgElement("text", {"x": format_number(x), "y": format_number(y), "text-anchor": anchor, "class": css}, text)


def line_shape(x1: float, y1: float, x2: float, y2: float, css: str = "grid", title: str = "") -> SvgElement:
    ends = {"x1": format_number(x1), "x2": format_number(x2), "y1": format_number(y1), "y2": format_number(y2)}
    return SvgElement("line", {**ends, "class": css}, title=title)


def circle(x: float, y: float, radius: float, css: str, title: str = "") -> SvgElement:
    return SvgElement(
        "circle",
        {"cx": format_number(x), "cy": format_number(y), "r": format_number(radius), "class": css},
        title=title,
    )


def rectangle(x: float, y: float, width: float, height: float, css: str) -> SvgElement:
    size = {"width": format_number(width), "height": format_number(height)}
    return SvgElement("rect", {"x": format_number(x), "y": format_number(y), **size, "class": css})


def polyline(points: Sequence[Point], css: str) -> SvgElement:
    """Return a line through the points."""
    steps = "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""
    return SvgElement("path", {"d": steps, "class": css})


def format_number(value: float) -> str:
    return f"{value:.10g}"


def make_bars(rows: Iterable[tuple[str, float, str, str]]) -> list[ChartBar]:
    """Return bars for (label, value, text, CSS class), on one scale from zero. Infinity is a full bar."""
    rows = list(rows)
    finite = [abs(value) for _, value, _, _ in rows if math.isfinite(value)]
    largest = max(finite, default=0.0) or 1.0
    bars = []
    for label, value, text, css in rows:
        width = 0.0 if math.isnan(value) else 100 * min(abs(value), largest) / largest
        bars.append(ChartBar(label, text, max(round(width, 2), 0.5), css))
    return bars


def make_shares(parts: Iterable[tuple[str, float, str]]) -> list[BarShare]:
    """Return the segments of a stacked bar for (name, share, class)."""
    segments, left = [], 0.0
    for name, share, css in parts:
        width = max(0.0, min(share, 1.0)) * 100
        segments.append(BarShare(f"{name}: {format_share(share)}", round(left, 3), round(width, 3), css))
        left += width
    return segments


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers between two values, at most 20."""
    min_step = (high - low) / about
    if not 1e-300 < min_step < math.inf:  # a report.json from an unknown source may contain any number
        return [low]
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= min_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)][:20]


def integer_step(count: int) -> int:
    """Return the distance of the ticks on an axis of `count` numbered layers: 1, 2, 5, 10, 20, ..."""
    power = 1
    while power * 10 * MAX_LAYER_TICKS < count:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * MAX_LAYER_TICKS >= count)


@dataclass(frozen=True)
class Axes:
    """A plot area: layers from left to right, decibels upwards."""

    height: float
    bottom: float
    top: float
    low: float
    high: float
    count: int
    width: float = 1000.0
    left: float = 44.0

    def x(self, index: float) -> float:
        return round(self.left + 8 + (self.width - self.left - 20) * (index / max(1, self.count - 1)), 1)

    def y(self, value: float) -> float:
        value = self.low if math.isnan(value) else min(max(value, self.low), self.high)
        area = self.height - self.top - self.bottom
        return round(self.top + area * (1 - (value - self.low) / ((self.high - self.low) or 1)), 1)

    def level(self, value: float, css: str = "grid") -> SvgElement:
        """Return a horizontal line at a value."""
        return line_shape(self.left, self.y(value), self.width - 4, self.y(value), css)

    def grid(self, from_bottom: float) -> list[SvgElement]:
        """Return horizontal lines with their values, and layer numbers along the bottom."""
        shapes = []
        for value in round_ticks(self.low, self.high):
            shapes += [self.level(value), text_shape(f"{value:g}", self.left - 6, self.y(value) + 4, anchor="end")]
        for index in range(0, self.count, integer_step(self.count)):
            shapes.append(text_shape(str(index), self.x(index), self.height - from_bottom, anchor="middle"))
        return shapes


def draw_errors(layers: Sequence[LayerError], floats: frozenset[str]) -> Picture:
    """Draw the SQNR of every layer in the order of execution, with the names of the three worst."""
    finite = [layer.sqnr_db for layer in layers if math.isfinite(layer.sqnr_db)]
    finite += [layer.weight_sqnr_db for layer in layers if layer.weight_sqnr_db and math.isfinite(layer.weight_sqnr_db)]
    low, high = max(min([0.0, *finite]), -60.0), max(finite, default=10.0) * 1.08 or 10.0
    axes = Axes(height=270.0, bottom=30.0, top=14.0, low=low, high=high, count=len(layers))
    shapes = []
    for bound, word in ((GOOD_DB, "very good"), (FAIR_DB, "good"), (POOR_DB, "fair")):
        if low < bound < high:
            shapes += [
                axes.level(bound, "grid bound"),
                text_shape(word, axes.width - 8, axes.y(bound) - 4, anchor="end"),
            ]
    shapes += axes.grid(from_bottom=10)
    points = [(axes.x(index), axes.y(layer.sqnr_db)) for index, layer in enumerate(layers)]
    weights = [
        (axes.x(index), axes.y(layer.weight_sqnr_db))
        for index, layer in enumerate(layers)
        if layer.weight_sqnr_db is not None
    ]
    shapes += [polyline(points, "trace"), _squares(weights, 2.2, "dot-weight"), *_layer_points(layers, points, floats)]
    label = f"SQNR in dB of {format_plural(len(layers), 'layer')}, in the order of execution"
    return Picture(axes.width, axes.height, label, "depth", shapes)


def _layer_points(layers: Sequence[LayerError], points: Sequence[Point], floats: frozenset[str]) -> list[SvgElement]:
    """Draw a point per layer. With very many layers, only the worst are circles with a title."""
    # Indices of the layers, the worst first; NaN is worse than any number.
    order = sorted(range(len(layers)), key=lambda index: (not math.isnan(layers[index].sqnr_db), layers[index].sqnr_db))
    worst = set(order[:3])
    is_crowded = len(layers) > MAX_TITLED_POINTS
    shapes = [_squares(points, 2.0, "dot")] if is_crowded else []
    labels = LabelPlacer()
    for index in sorted(order[:40]) if is_crowded else range(len(layers)):
        layer, (x, y) = layers[index], points[index]
        css = "dot-float" if layer.name in floats else "dot"
        if index in worst:
            css = "dot-worst"
        title = f"{shorten(layer.name)}: {format_decibels(layer.sqnr_db)} dB"
        shapes.append(circle(x, y, 5.0 if index in worst else 3.4, css, title))
        if index in worst:
            shapes.append(labels.near(shorten(layer.name, 28), x, y))
    return shapes


def _squares(points: Sequence[Point], half: float, css: str) -> SvgElement:
    """Draw small squares as one path."""
    side = 2 * half
    d = "".join(f"M{x - half:g} {y - half:g}h{side:g}v{side:g}h-{side:g}z" for x, y in points)
    return SvgElement("path", {"d": d, "class": css})


def _drawn_decibels(error: float, least: float) -> float:
    """Convert an error to signal-to-noise in dB, after clipping the error to [least, MAX_DRAWN_ERROR]."""
    drawn_error = min(max(error, least), MAX_DRAWN_ERROR) if math.isfinite(error) else MAX_DRAWN_ERROR
    return -10 * math.log10(drawn_error)


def _least_error(errors: Iterable[float]) -> float:
    """Return half of the smallest error above zero. An exact output is drawn with this error."""
    return min([error for error in errors if 0 < error < MAX_DRAWN_ERROR], default=1e-3) / 2


def draw_front(allocated: PrecisionAllocation) -> Picture:
    """Draw signal-to-noise at the output against cost, on a logarithmic scale.

    Shows the Pareto front, the chosen point, and the points at which all layers have the same precision.
    """
    width, height, left, bottom, top = 1000.0, 320.0, 48.0, 40.0, 18.0
    drawn = [(point.cost, point.error) for point in allocated.front]
    drawn += [*allocated.uniform.values(), (allocated.reached, allocated.error)]
    least = _least_error(error for _, error in drawn)
    levels = [_drawn_decibels(error, least) for _, error in drawn]
    costs = [*(cost for cost, _ in drawn), allocated.limit or 0.0]
    costs = [cost for cost in costs if 0 < cost < math.inf] or [1]
    low, high = min(levels) - 2, max(levels) + 2
    start, end = min(costs) / 1.05, max(costs) * 1.08
    floor = height - bottom

    def y_of(level: float) -> float:
        return round(top + (floor - top) * (high - level) / (high - low), 1)

    def at(cost: float, error: float) -> Point:
        inside = min(max(cost, start), end) if math.isfinite(cost) else start
        x = left + (width - left - 12) * math.log(inside / start) / math.log(end / start)
        return round(x, 1), y_of(_drawn_decibels(error, least))

    shapes = []
    for value in round_ticks(low, high):
        shapes.append(line_shape(left, y_of(value), width - 4, y_of(value)))
        shapes.append(text_shape(f"{value:g}", left - 6, y_of(value) + 4, anchor="end"))
    shapes += [
        text_shape(f"{cost:.4g}", at(cost, 1)[0], floor + 16, anchor="middle") for cost in round_ticks(start, end, 8)
    ]
    label = COST_LABELS.get(allocated.unit, allocated.unit)
    shapes.append(text_shape(f"{label}; upwards: dB", width / 2, height - 6, anchor="middle"))
    if allocated.limit is not None:
        x = at(allocated.limit, 1)[0]
        shapes.append(line_shape(x, top, x, floor, "limit"))
        shapes.append(text_shape(f"budget {allocated.limit:g}", x + 5, top + 10))
    points = [at(point.cost, point.error) for point in allocated.front]
    shapes.append(polyline(points, "trace"))
    for point, (x, y) in zip(allocated.front, points, strict=True):
        counts = ", ".join(f"{count} {shorten(choice, 40)}" for choice, count in point.counts.items())
        title = f"{point.cost:.4g}: {_drawn_decibels(point.error, least):.1f} dB; {counts}"
        shapes.append(circle(x, y, 3.4, "dot", title))
    shapes += _chosen_and_uniform(allocated, at)
    return Picture(width, height, f"dB against {label}", "depth", shapes)


def _chosen_and_uniform(allocated: PrecisionAllocation, at: Callable[[float, float], Point]) -> list[SvgElement]:
    x, y = at(allocated.reached, allocated.error)
    shapes = [circle(x, y, 6, "dot-worst"), LabelPlacer().near("chosen", x, y)]
    for choice, (cost, error) in allocated.uniform.items():
        x, y = at(cost, error)
        shapes.append(rectangle(x - 4, y - 4, 8, 8, "dot-weight"))
        shapes.append(text_shape(f"all {shorten(choice, 24)}", x + 8, y + 15))
    return shapes


def draw_gains(layers: Sequence[TunedLayer]) -> Picture:
    """Draw signal-to-noise of every layer's output before and after tuning, in the order of execution."""
    least = _least_error(error for layer in layers for error in (layer.before, layer.after))
    pairs = [(_drawn_decibels(layer.before, least), _drawn_decibels(layer.after, least)) for layer in layers]
    low = min(0.0, *(min(pair) for pair in pairs))
    largest = max(max(pair) for pair in pairs)
    high = largest + 0.08 * abs(largest) + 1
    axes = Axes(height=230.0, bottom=26.0, top=12.0, low=low, high=high, count=len(layers))
    shapes = axes.grid(from_bottom=8)
    for index, (layer, (before, after)) in enumerate(zip(layers, pairs, strict=True)):
        x, y_before, y_after = axes.x(index), axes.y(before), axes.y(after)
        title = f"{shorten(layer.name)}: {before:.1f} dB, then {after:.1f}; {format_share(layer.moved)} moved"
        shapes.append(line_shape(x, y_before, x, y_after, "gain", title))
        shapes += [circle(x, y_before, 2.6, "dot-weight", title), circle(x, y_after, 3.4, "dot", title)]
    label = f"dB of {format_plural(len(layers), 'layer')} before and after, in the order of execution"
    return Picture(axes.width, axes.height, label, "depth", shapes)


def draw_histogram(values: TensorHistogram) -> Picture:
    """Draw the counts on a logarithmic scale, and the range that the codes cover."""
    edges, counts = _merged_bins(values)
    least, most = values.code_range
    width, height, bottom, top = 320.0, 150.0, 22.0, 16.0
    ends = [value for value in (edges[0], edges[-1], least, most) if math.isfinite(value)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if not high > low:
        low, high = low - 1, high + 1
    pad = (high - low) * 0.03
    low, high = low - pad, high + pad

    def x_of(value: float) -> float:
        value = min(max(value, low), high) if not math.isnan(value) else low
        return round(width * (value - low) / (high - low), 2)

    floor, largest = height - bottom, math.log1p(max([*counts, 1]))
    range_width = round(max(x_of(most) - x_of(least), 0.5), 2)
    shapes = [rectangle(x_of(least), top, range_width, floor - top, "range")]
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            bar_height = round((floor - top) * math.log1p(max(count, 0)) / largest, 2)
            css = "inside" if least <= (left + right) / 2 <= most else "outside"
            bar_width = round(max(x_of(right) - x_of(left) - 0.4, 0.4), 2)
            shapes.append(rectangle(x_of(left), round(floor - bar_height, 2), bar_width, bar_height, css))
    shapes += [line_shape(x, top - 6, x, floor, "limit") for x in (x_of(least), x_of(most))]
    shapes.append(line_shape(0, floor, width, floor, "axis"))
    for value in round_ticks(low, high, 4):
        shapes.append(text_shape(f"{value:.6g}", min(max(x_of(value), 10), width - 10), height - 6, anchor="middle"))
    return Picture(width, height, f"{values.kind} values of {shorten(values.name)}", "histogram", shapes)


def share_outside(values: TensorHistogram) -> float:
    """Return the share of values in bins whose middle is outside the range of the codes."""
    total, (least, most) = sum(values.counts) or 1, values.code_range
    middles = [(low + high) / 2 for low, high in zip(values.edges, values.edges[1:], strict=False)]
    pairs = zip(middles, values.counts, strict=True)
    return sum(count for middle, count in pairs if not least <= middle <= most) / total


def _merged_bins(values: TensorHistogram) -> tuple[list[float], list[int]]:
    """Merge bins until at most MAX_DRAWN_BINS remain, without empty bins at both ends."""
    filled = [index for index, count in enumerate(values.counts) if count] or [0]
    start, end = filled[0], filled[-1] + 1
    step = max(1, math.ceil((end - start) / MAX_DRAWN_BINS))
    starts = range(start, end, step)
    counts = [sum(values.counts[index : min(index + step, end)]) for index in starts]
    return [*(values.edges[index] for index in starts), values.edges[min(end, len(values.edges) - 1)]], counts
