"""A sweep as one HTML page: quality against size and against speed with the front marked, and the table."""

from collections.abc import Sequence

from scalepoint.report.charts import label_near, line_of, steps, svg
from scalepoint.report.markup import Child, Html, data_block, join, name, tag
from scalepoint.report.shell import document
from scalepoint.report.story import table as html_table
from scalepoint.report.sweep import Sweep, SweepRow, cells, marks
from scalepoint.words import one_line, short

LONGEST = 1000
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1000.0, 320.0, 60.0, 40.0, 18.0


def sweep_page(sweep: Sweep) -> str:
    """One self-contained page."""
    quality = "score" if sweep.is_scored else "SQNR of the last layer in dB"
    parts = (
        ("size", "Quality against size", _chart(sweep, "size", f"size in MB; upwards: {quality}")),
        ("speed", "Quality against speed", _chart(sweep, "speed", f"times the float file's speed; upwards: {quality}")),
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


def _chart(sweep: Sweep, cost: str, label: str) -> Html:
    known = [row for row in sweep.rows if row.is_done and row.quality is not None and _cost(row, cost) is not None]
    if not known:
        return Html()
    costs, qualities = [_cost(row, cost) or 0.0 for row in known], [_finite(row) for row in known]
    start, end = _widened(min(costs), max(costs))
    low, high = _widened(min(qualities), max(qualities))

    def at(row: SweepRow) -> tuple[float, float]:
        x = LEFT + 10 + (WIDTH - LEFT - 30) * ((_cost(row, cost) or 0.0) - start) / (end - start)
        return round(x, 1), round(TOP + (HEIGHT - TOP - BOTTOM) * (high - _finite(row)) / (high - low), 1)

    drawn = [*_grid(start, end, low, high), _axis(label)]
    front = sweep.front(cost)
    drawn.append(tag("path", d=line_of([at(row) for row in front]), class_="trace front-line"))
    taken: list[tuple[float, float, float]] = []
    for row in sorted(known, key=lambda row: row not in front):
        x, y = at(row)
        is_best = row in front
        title = tag("title", f"{short(row.name)}: {', '.join(filter(None, cells(row)))}")
        radius, class_ = (6, "dot") if is_best else (4, "dot-weight")
        drawn.append(tag("g", title, tag("circle", cx=x, cy=y, r=radius, class_=class_)))
        if is_best:
            drawn.append(label_near(short(row.name, 28), x, y, taken, "front-name"))
    picture = svg(WIDTH, HEIGHT, *drawn, label=f"{len(known)} runs: {label}", class_="depth")
    legend = [
        tag("li", tag("i", class_="key dot-key"), "on the front: no other run is better in both"),
        tag("li", tag("i", class_="key weight-key"), "beaten by another"),
    ]
    frame = tag("div", picture, class_="scroll", tabindex="0", role="region", aria_label=label)
    return tag("div", frame, tag("ul", *legend, class_="legend"), class_="card")


def _grid(start: float, end: float, low: float, high: float) -> list[Html]:
    drawn = []
    for value in steps(low, high):
        y = round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - 4, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", f"{value:.5g}", x=LEFT - 6, y=y + 4, text_anchor="end", class_="tick"))
    for value in steps(start, end, 8):
        x = round(LEFT + 10 + (WIDTH - LEFT - 30) * (value - start) / (end - start), 1)
        drawn.append(tag("text", f"{value:.4g}", x=x, y=HEIGHT - BOTTOM + 16, text_anchor="middle", class_="tick"))
    return drawn


def _axis(label: str) -> Html:
    return tag("text", label, x=WIDTH / 2, y=HEIGHT - 6, text_anchor="middle", class_="tick")


def _cost(row: SweepRow, cost: str) -> float | None:
    if cost == "speed":
        return row.speed
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
            *cells(row),
            tag("span", on[row.name], class_="badge good") if on[row.name] else "",
            short(row.verdict if row.is_done else row.message, 200),
        )
        for row in sweep.rows
    ]
    columns = ("Run", "Score", "Last dB", "Size", "Speed", "Latency", "In low", "Front", "Verdict")
    table = html_table(columns, rows, (1, 2, 3, 4, 5, 6))
    return tag("div", table, class_="card scroll", tabindex="0", role="region", aria_label="Runs")
