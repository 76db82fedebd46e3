"""The table and page of a sweep: the settings and results of each run, and the Pareto fronts.

    front: the runs for which no other run is at least as good in quality and cost, and better in one of them

Each run measured its speed relative to its own float file, which may be of another target or export. The table has the
speed relative to the fastest of these float files, so that a faster file never has a lower speed.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from scalepoint.errors import DocumentError, StoreError
from scalepoint.report.charts import (
    LabelPlacer,
    Picture,
    SvgElement,
    circle,
    line_shape,
    polyline,
    round_ticks,
    text_shape,
)
from scalepoint.report.headline import low_share
from scalepoint.report.html import render_page
from scalepoint.report.model import MAX_REPORT_BYTES, Report
from scalepoint.report.terminal import MIN_WIDE_COLUMNS, plain_table
from scalepoint.support.formatting import (
    format_decibels,
    format_plural,
    format_ratio,
    format_share,
    format_size,
    format_time,
    format_value,
    render_as_text,
    shorten,
    to_one_line,
)
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_json

SWEEP_FILE, PAGE_FILE = "sweep.json", "sweep.html"
SWEEP_SCHEMA = 1
# Sizes and margins of a plot, in SVG units.
WIDTH, NARROW_WIDTH, HEIGHT = 1000.0, 340.0, 320.0
LEFT_MARGIN, BOTTOM, TOP = 60.0, 40.0, 18.0
MAX_DRAWN_DB = 150.0  # an exact output is drawn with this SQNR


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep. A number is None if it was not measured.

    Attributes:
        name: Name of the run and of its folder.
        settings: The values of the grid for this run.
        status: "done" or "failed".
        message: The error of a failed run.
        score: The user's metric of the file.
        float_score: The user's metric of the float model.
        size: Size of the file in bytes.
        speed: Speed relative to the float file of the same run; `Sweep.speed_of` makes runs comparable.
        latency: Seconds per call of the file.
        last_db: SQNR of the last layer's output against the float model, in dB.
        low: Share of the multiply-accumulates in low precision.
        verdict: The verdict of the report.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: str = "done"
    message: str = ""
    score: float | None = None
    float_score: float | None = None
    size: float | None = None
    speed: float | None = None
    latency: float | None = None
    last_db: float | None = None
    low: float | None = None
    verdict: str = ""

    @property
    def float_latency(self) -> float | None:
        """Seconds per call of the float file that the run was compared with."""
        return None if self.speed is None or self.latency is None else self.speed * self.latency

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def quality(self) -> float | None:
        """The user's metric; without a metric the SQNR of the last layer. None if it is NaN or missing."""
        value = self.last_db if self.score is None else self.score
        return None if value is None or math.isnan(value) else value

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], report: Report, size: int | None = None) -> "SweepRow":
        """Make the row of a run from its report. `size` is used if the report has no size."""
        score = report.accuracy[0] if report.accuracy else None
        verification, latency = report.verification, report.latency
        if verification is not None and verification.size:
            size = verification.size
        return cls(
            name,
            to_jsonable(settings),
            score=None if score is None else score.value,
            float_score=None if score is None else score.float_value,
            size=None if size is None else float(size),
            speed=None if latency is None else latency.ratio,
            latency=None if latency is None else latency.seconds[1],
            last_db=report.layers[-1].sqnr_db if report.layers else None,
            low=low_share(report.coverage.share_of_macs()),
            verdict=report.verdict(),
        )


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep, in the order of the grid.

    Attributes:
        rows: The runs.
        inputs: Name -> fingerprint of what all runs share: model, data and options.
    """

    rows: tuple[SweepRow, ...]
    inputs: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether any run has a metric."""
        return any(row.score is not None for row in self.rows)

    def front(self, cost: str = "size") -> tuple[SweepRow, ...]:
        """Return the runs on the Pareto front of quality and cost, the cheapest first.

        Args:
            cost: "size" or "speed".
        """
        cost_of = self._cost_function(cost)
        measured = [row for row in self.rows if row.is_done and row.quality is not None and cost_of(row) is not None]
        best = [row for row in measured if not _is_beaten(row, measured, cost_of)]
        return tuple(sorted(best, key=lambda row: cost_of(row) or 0.0))

    def speed_of(self, row: SweepRow) -> float | None:
        """Return the speed relative to the fastest float file of all runs, or `row.speed` without latencies."""
        float_latencies = [other.float_latency for other in self.rows if other.float_latency]
        return min(float_latencies) / row.latency if float_latencies and row.latency else row.speed

    def _cost_function(self, cost: str) -> Callable[[SweepRow], float | None]:
        """Return a function that is smaller for a better row."""
        if cost == "size":
            return lambda row: row.size
        return lambda row: None if (speed := self.speed_of(row)) is None else -speed

    def summary(self) -> str:
        """Return one line: runs, failed runs, and the runs on the front of quality and size."""
        failed = sum(not row.is_done for row in self.rows)
        best = ", ".join(row.name for row in self.front())
        runs = f"{format_plural(len(self.rows), 'run')}{f', {failed} failed' if failed else ''}"
        return f"{runs}; on the front of quality and size: {best or 'none was measured'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the runs and the fronts as values that JSON can store."""
        fronts = {cost: [row.name for row in self.front(cost)] for cost in ("size", "speed")}
        return {"schema": SWEEP_SCHEMA, "inputs": dict(self.inputs), "rows": to_jsonable(self.rows), "front": fronts}

    def to_json(self) -> str:
        """Return the runs and the fronts as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_file(cls, path: str | Path) -> "Sweep":
        """Read a file that `to_json` wrote."""
        try:
            data = read_json(Path(path), MAX_REPORT_BYTES)
            if not isinstance(data, dict) or data.get("schema") != SWEEP_SCHEMA:
                raise StoreError(f"{path} is not a sweep of schema {SWEEP_SCHEMA}")
            rows = TypeAdapter(tuple[SweepRow, ...]).validate_python(data.get("rows"))
            return cls(rows, TypeAdapter(dict[str, str | None]).validate_python(data.get("inputs", {})))
        except (OSError, DocumentError, ValidationError) as error:
            raise StoreError(f"{path} is not a sweep: {str(error).splitlines()[0]}") from error

    def __str__(self) -> str:
        return render_as_text(SweepTable(self))


def _is_beaten(row: SweepRow, rows: Sequence[SweepRow], cost_of: Callable[[SweepRow], float | None]) -> bool:
    """Whether some run is at least as good in both quality and cost, and better in one of them."""
    point = (-(row.quality or 0.0), cost_of(row) or 0.0)
    for other in rows:
        other_point = (-(other.quality or 0.0), cost_of(other) or 0.0)
        if other_point != point and other_point[0] <= point[0] and other_point[1] <= point[1]:
            return True
    return False


def row_cells(sweep: Sweep, row: SweepRow) -> tuple[str, str, str, str, str, str]:
    """Return score, SQNR of the last layer, size, speed, latency and coverage as text."""
    speed = sweep.speed_of(row)
    return (
        "" if row.score is None else format_value(row.score),
        format_decibels(row.last_db),
        "" if row.size is None else format_size(row.size),
        "" if speed is None else format_ratio(speed),
        "" if row.latency is None else format_time(row.latency),
        format_share(row.low),
    )


def list_fronts(sweep: Sweep) -> dict[str, str]:
    """Return name of a run -> the fronts that it is on."""
    fronts = {cost: {row.name for row in sweep.front(cost)} for cost in ("size", "speed")}
    return {row.name: ", ".join(cost for cost, names in fronts.items() if row.name in names) for row in sweep.rows}


@dataclass(frozen=True)
class SweepTable:
    """A sweep that rich can print at any width."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fronts = list_fronts(self.sweep)
        rows = [(shorten(row.name, 48), *row_cells(self.sweep, row), fronts[row.name]) for row in self.sweep.rows]
        heads = ("run", "score", "last dB", "size", "speed", "latency", "in low", "on the front of")
        if options.max_width < MIN_WIDE_COLUMNS:
            quality = 1 if self.sweep.is_scored else 2
            narrow_rows = [(row[0], row[quality], row[3], row[4], "*" if row[7] else "") for row in rows]
            yield plain_table(("run", heads[quality], "size", "speed", "front"), narrow_rows, numbers=range(1, 4))
        else:
            yield plain_table(heads, rows, numbers=range(1, 7))
        for row in self.sweep.rows:
            if not row.is_done:
                yield Text(f"failed: {to_one_line(row.name)}: {to_one_line(row.message)}", style="red")
        yield Text(to_one_line(self.sweep.summary()))


def sweep_page(sweep: Sweep) -> str:
    """Render a sweep as one self-contained HTML page.

    Args:
        sweep: The sweep.
    """
    quality = "score" if sweep.is_scored else "SQNR of the last layer in dB"
    labels = {
        "size": f"size in MB; upwards: {quality}",
        "speed": f"times the speed of the fastest float file; upwards: {quality}",
    }
    plots = [
        (cost, f"Quality against {cost}", label, _draw_plots(sweep, cost, label)) for cost, label in labels.items()
    ]
    failed = [row for row in sweep.rows if not row.is_done]
    return render_page(
        "sweep.html.j2", "sweep", sweep.to_dict(), sweep=sweep, plots=plots, failed=failed, cells=row_cells,
        fronts=list_fronts(sweep),
    )  # fmt: skip


@dataclass(frozen=True)
class _PlotArea:
    """A plot area with its ranges of cost and quality."""

    width: float
    costs: tuple[float, float]
    qualities: tuple[float, float]

    def x(self, cost: float) -> float:
        start, end = self.costs
        return round(LEFT_MARGIN + 10 + (self.width - LEFT_MARGIN - 30) * (cost - start) / (end - start), 1)

    def y(self, quality: float) -> float:
        low, high = self.qualities
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - quality) / (high - low), 1)


def _draw_plots(sweep: Sweep, cost: str, label: str) -> list[Picture]:
    """Draw the same plot for wide and for narrow screens; the style sheet shows one of them."""
    measured = [
        row for row in sweep.rows if row.is_done and row.quality is not None and _cost_of(sweep, row, cost) is not None
    ]
    if not measured:
        return []
    costs = [_cost_of(sweep, row, cost) or 0.0 for row in measured]
    qualities = [_drawn_quality(row) for row in measured]
    ranges = _widen(min(costs), max(costs)), _widen(min(qualities), max(qualities))
    return [
        _draw_plot(sweep, measured, cost, label, _PlotArea(width, *ranges), css)
        for width, css in ((WIDTH, "depth wide"), (NARROW_WIDTH, "narrow"))
    ]


def _draw_plot(
    sweep: Sweep, measured: Sequence[SweepRow], cost: str, label: str, frame: _PlotArea, css: str
) -> Picture:
    def at(row: SweepRow) -> tuple[float, float]:
        return frame.x(_cost_of(sweep, row, cost) or 0.0), frame.y(_drawn_quality(row))

    front = sweep.front(cost)
    labels = LabelPlacer(right=frame.width - 4)
    shapes = [*_draw_grid(frame, label), polyline([at(row) for row in front], "trace front-line")]
    for row in sorted(measured, key=lambda row: row not in front):
        x, y = at(row)
        radius, dot = (6, "dot") if row in front else (4, "dot-weight")
        shapes.append(
            circle(x, y, radius, dot, f"{shorten(row.name)}: {', '.join(filter(None, row_cells(sweep, row)))}")
        )
        if row in front:
            shapes.append(labels.near(shorten(row.name, 28), x, y, "front-name"))
    return Picture(frame.width, HEIGHT, f"{len(measured)} runs: {label}", css, shapes)


def _draw_grid(frame: _PlotArea, label: str) -> list[SvgElement]:
    shapes = []
    for quality in round_ticks(*frame.qualities):
        y = frame.y(quality)
        shapes += [
            line_shape(LEFT_MARGIN, y, frame.width - 4, y),
            text_shape(f"{quality:.5g}", LEFT_MARGIN - 6, y + 4, anchor="end"),
        ]
    for cost in round_ticks(*frame.costs, 8 if frame.width == WIDTH else 3):
        shapes.append(text_shape(f"{cost:.4g}", frame.x(cost), HEIGHT - BOTTOM + 16, anchor="middle"))
    shapes.append(text_shape(label, frame.width / 2, HEIGHT - 6, anchor="middle"))
    return shapes


def _cost_of(sweep: Sweep, row: SweepRow, cost: str) -> float | None:
    if cost == "speed":
        return sweep.speed_of(row)
    return None if row.size is None else row.size / 1e6


def _drawn_quality(row: SweepRow) -> float:
    return min(row.quality or 0.0, MAX_DRAWN_DB)


def _widen(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad
