"""A sweep as one HTML page: quality against size and against speed with the front marked, and a table of the runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalepoint.report.charts import Labels, Picture, Shape, circle, line_shape, path, text_shape, ticks
from scalepoint.report.html import render_page
from scalepoint.report.sweep import Sweep, SweepRow, cells, marks
from scalepoint.support.formatting import short

WIDTH, NARROW, HEIGHT, LEFT, BOTTOM, TOP = 1000.0, 340.0, 320.0, 60.0, 40.0, 18.0
BEST_DB = 150.0  # an exact output is drawn here


def sweep_page(sweep: Sweep) -> str:
    """Render a sweep as one self-contained page."""
    quality = "score" if sweep.is_scored else "SQNR of the last layer in dB"
    labels = {
        "size": f"size in MB; upwards: {quality}",
        "speed": f"times the speed of the fastest float file; upwards: {quality}",
    }
    plots = [(cost, f"Quality against {cost}", label, _pictures(sweep, cost, label)) for cost, label in labels.items()]
    failed = [row for row in sweep.rows if not row.is_done]
    return render_page(
        "sweep.html.j2", "sweep", sweep.to_dict(), sweep=sweep, plots=plots, failed=failed, cells=cells,
        fronts=marks(sweep),
    )  # fmt: skip


@dataclass(frozen=True)
class _Frame:
    """A plot area with its ranges of cost and quality."""

    width: float
    costs: tuple[float, float]
    qualities: tuple[float, float]

    def x(self, cost: float) -> float:
        start, end = self.costs
        return round(LEFT + 10 + (self.width - LEFT - 30) * (cost - start) / (end - start), 1)

    def y(self, quality: float) -> float:
        low, high = self.qualities
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - quality) / (high - low), 1)


def _pictures(sweep: Sweep, cost: str, label: str) -> list[Picture]:
    """The same plot for wide and for narrow screens; the style sheet shows one of them."""
    known = [
        row for row in sweep.rows if row.is_done and row.quality is not None and _cost(sweep, row, cost) is not None
    ]
    if not known:
        return []
    costs, qualities = [_cost(sweep, row, cost) or 0.0 for row in known], [_quality(row) for row in known]
    ranges = _widened(min(costs), max(costs)), _widened(min(qualities), max(qualities))
    return [
        _picture(sweep, known, cost, label, _Frame(width, *ranges), css)
        for width, css in ((WIDTH, "depth wide"), (NARROW, "narrow"))
    ]


def _picture(sweep: Sweep, known: Sequence[SweepRow], cost: str, label: str, frame: _Frame, css: str) -> Picture:
    def at(row: SweepRow) -> tuple[float, float]:
        return frame.x(_cost(sweep, row, cost) or 0.0), frame.y(_quality(row))

    front = sweep.front(cost)
    labels = Labels(right=frame.width - 4)
    shapes = [*_grid(frame, label), path([at(row) for row in front], "trace front-line")]
    for row in sorted(known, key=lambda row: row not in front):
        x, y = at(row)
        radius, dot = (6, "dot") if row in front else (4, "dot-weight")
        shapes.append(circle(x, y, radius, dot, f"{short(row.name)}: {', '.join(filter(None, cells(sweep, row)))}"))
        if row in front:
            shapes.append(labels.near(short(row.name, 28), x, y, "front-name"))
    return Picture(frame.width, HEIGHT, f"{len(known)} runs: {label}", css, shapes)


def _grid(frame: _Frame, label: str) -> list[Shape]:
    shapes = []
    for quality in ticks(*frame.qualities):
        y = frame.y(quality)
        shapes += [line_shape(LEFT, y, frame.width - 4, y), text_shape(f"{quality:.5g}", LEFT - 6, y + 4, anchor="end")]
    for cost in ticks(*frame.costs, 8 if frame.width == WIDTH else 3):
        shapes.append(text_shape(f"{cost:.4g}", frame.x(cost), HEIGHT - BOTTOM + 16, anchor="middle"))
    shapes.append(text_shape(label, frame.width / 2, HEIGHT - 6, anchor="middle"))
    return shapes


def _cost(sweep: Sweep, row: SweepRow, cost: str) -> float | None:
    if cost == "speed":
        return sweep.speed_of(row)
    return None if row.size is None else row.size / 1e6


def _quality(row: SweepRow) -> float:
    return min(row.quality or 0.0, BEST_DB)


def _widened(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad
