"""A sweep as one HTML page: quality against size and against speed with the front marked, and the table."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalepoint.report.charts import label_near, line_of, steps, svg
from scalepoint.report.markup import Child, Html, data_block, join, name, tag
from scalepoint.report.shell import document
from scalepoint.report.story import table as html_table
from scalepoint.report.sweep import Sweep, SweepRow, cells, marks
from scalepoint.words import one_line, short

LONGEST = 1000
WIDTH, NARROW, HEIGHT, LEFT, BOTTOM, TOP = 1000.0, 340.0, 320.0, 60.0, 40.0, 18.0


def sweep_page(sweep: Sweep) -> str:
    """One self-contained page."""
    quality = "score" if sweep.is_scored else "SQNR of the last layer in dB"
    parts = (
        ("size", "Quality against size", _chart(sweep, "size", f"size in MB; upwards: {quality}")),
        (
            "speed",
            "Quality against speed",
            _chart(sweep, "speed", f"times the speed of the fastest float file; upwards: {quality}"),
        ),
        ("runs", "Runs", _table(sweep)),
    )
    shown = [tag("section", tag("h2", title), drawn, id=identifier) for identifier, title, drawn in parts if drawn]
    failed = [tag("li", name(row.name), f": {short(row.message, LONGEST)}") for row in sweep.rows if not row.is_done]
    warned = tag("div", tag("strong", "Failed"), tag("ul", *failed), class_="warnings", role="note") if failed else None
    header = tag(
        "header",
        tag("p", "scalepoint sweep", class_="brand"),
        tag("h1", f"{len(sweep.rows)} runs"),
        tag("p", one_line(sweep.summary()), class_="verdict plain"),
    )
    return document("sweep", join((header, tag("main", warned, *shown))), data_block(sweep.to_dict(), "report-data"))


@dataclass(frozen=True)
class _Frame:
    """Where values stand in a picture of this width."""

    width: float
    costs: tuple[float, float]
    qualities: tuple[float, float]

    def x(self, cost: float) -> float:
        start, end = self.costs
        return round(LEFT + 10 + (self.width - LEFT - 30) * (cost - start) / (end - start), 1)

    def y(self, quality: float) -> float:
        low, high = self.qualities
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - quality) / (high - low), 1)


def _chart(sweep: Sweep, cost: str, label: str) -> Html:
    """The same picture for wide and for narrow screens, of which the page shows one."""
    known = [
        row for row in sweep.rows if row.is_done and row.quality is not None and _cost(sweep, row, cost) is not None
    ]
    if not known:
        return Html()
    costs, qualities = [_cost(sweep, row, cost) or 0.0 for row in known], [_finite(row) for row in known]
    ranges = _widened(min(costs), max(costs)), _widened(min(qualities), max(qualities))
    pictures = [
        _picture(sweep, known, cost, label, _Frame(width, *ranges), class_)
        for width, class_ in ((WIDTH, "depth wide"), (NARROW, "narrow"))
    ]
    legend = [
        tag("li", tag("i", class_="key dot-key"), "on the front: no other run is better in both"),
        tag("li", tag("i", class_="key weight-key"), "beaten by another"),
    ]
    frame = tag("div", *pictures, class_="scroll", tabindex="0", role="region", aria_label=label)
    return tag("div", frame, tag("ul", *legend, class_="legend"), class_="card")


def _picture(sweep: Sweep, known: Sequence[SweepRow], cost: str, label: str, frame: _Frame, class_: str) -> Html:
    def at(row: SweepRow) -> tuple[float, float]:
        return frame.x(_cost(sweep, row, cost) or 0.0), frame.y(_finite(row))

    drawn = _grid(frame, label)
    front = sweep.front(cost)
    drawn.append(tag("path", d=line_of([at(row) for row in front]), class_="trace front-line"))
    taken: list[tuple[float, float, float]] = []
    for row in sorted(known, key=lambda row: row not in front):
        x, y = at(row)
        is_best = row in front
        title = tag("title", f"{short(row.name)}: {', '.join(filter(None, cells(sweep, row)))}")
        radius, dot = (6, "dot") if is_best else (4, "dot-weight")
        drawn.append(tag("g", title, tag("circle", cx=x, cy=y, r=radius, class_=dot)))
        if is_best:
            drawn.append(label_near(short(row.name, 28), x, y, taken, "front-name", frame.width - 4))
    return svg(frame.width, HEIGHT, *drawn, label=f"{len(known)} runs: {label}", class_=class_)


def _grid(frame: _Frame, label: str) -> list[Html]:
    drawn = []
    for value in steps(*frame.qualities):
        y = frame.y(value)
        drawn.append(tag("line", x1=LEFT, x2=frame.width - 4, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", f"{value:.5g}", x=LEFT - 6, y=y + 4, text_anchor="end", class_="tick"))
    for value in steps(*frame.costs, 8 if frame.width == WIDTH else 3):
        place = {"x": frame.x(value), "y": HEIGHT - BOTTOM + 16}
        drawn.append(tag("text", f"{value:.4g}", **place, text_anchor="middle", class_="tick"))
    drawn.append(tag("text", label, x=frame.width / 2, y=HEIGHT - 6, text_anchor="middle", class_="tick"))
    return drawn


def _cost(sweep: Sweep, row: SweepRow, cost: str) -> float | None:
    if cost == "speed":
        return sweep.speed_of(row)
    return None if row.size is None else row.size / 1e6


def _finite(row: SweepRow) -> float:
    """What is exact is drawn on top."""
    return min(row.quality or 0.0, 150.0)


def _widened(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _table(sweep: Sweep) -> Html:
    on = marks(sweep)
    rows: list[Sequence[Child]] = [
        (
            name(row.name, 60),
            *cells(sweep, row),
            tag("span", on[row.name], class_="badge good") if on[row.name] else "",
            short(row.verdict if row.is_done else row.message, 200),
        )
        for row in sweep.rows
    ]
    columns = ("Run", "Score", "Last dB", "Size", "Speed", "Latency", "In low", "Front", "Verdict")
    table = html_table(columns, rows, (1, 2, 3, 4, 5, 6))
    return tag("div", table, class_="card scroll", tabindex="0", role="region", aria_label="Runs")
