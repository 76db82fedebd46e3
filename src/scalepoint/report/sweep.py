"""Many runs in one table: what each was, what came of it, and which of them none other beats.

rows  ->  front: no other row is as good in both, and better in one

Every run has measured its speed against a float file of its own: of another target, or another export. Here the speed
of all runs is that against the fastest of these float files, so that a faster file never has a lower speed.
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
from scalepoint.report.html import render_page
from scalepoint.report.model import MAX_REPORT_BYTES, Report
from scalepoint.report.terminal import MIN_WIDE_COLUMNS, low_share, plain_table
from scalepoint.support.formatting import (
    decibel,
    one_line,
    plural,
    printed,
    ratio,
    share_of,
    short,
    size_of,
    time_of,
    value_of,
)
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_json

SWEEP_FILE = "sweep.json"
SWEEP_SCHEMA = 1
WIDTH, NARROW_WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1000.0, 340.0, 320.0, 60.0, 40.0, 18.0  # of a plot
MAX_DRAWN_DB = 150.0  # an exact output is drawn here


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep; what was not measured is None. `settings` is what this run has of its own."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: str = "done"  # or failed
    message: str = ""
    score: float | None = None
    float_score: float | None = None
    size: float | None = None
    speed: float | None = None  # times that of the float file of the same run; Sweep.speed_of compares runs
    latency: float | None = None
    last_db: float | None = None  # SQNR of the last layer's output against the float model
    low: float | None = None  # share of the MACs in low precision
    verdict: str = ""

    @property
    def float_latency(self) -> float | None:
        """Seconds of the float file that the run was compared with."""
        return None if self.speed is None or self.latency is None else self.speed * self.latency

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def quality(self) -> float | None:
        """The user's metric where there is one, else the error at the end."""
        value = self.last_db if self.score is None else self.score
        return None if value is None or math.isnan(value) else value

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], report: Report, size: int | None = None) -> "SweepRow":
        """What a run's report says of it."""
        found, score = report.verification, report.accuracy[0] if report.accuracy else None
        latency = None if found is None else found.latency
        return cls(
            name,
            to_jsonable(settings),
            score=None if score is None else score.value,
            float_score=None if score is None else score.float_value,
            size=float(found.size) if found is not None and found.size else None if size is None else float(size),
            speed=None if latency is None else latency.ratio,
            latency=None if latency is None else latency.seconds[1],
            last_db=report.layers[-1].sqnr_db if report.layers else None,
            low=low_share(report.coverage.share_of_macs()),
            verdict=report.verdict(),
        )


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep, in the order of the grid."""

    rows: tuple[SweepRow, ...]

    @property
    def is_scored(self) -> bool:
        """Whether there is a metric of the user's."""
        return any(row.score is not None for row in self.rows)

    def front(self, cost: str = "size") -> tuple[SweepRow, ...]:
        """The runs that no other beats in quality and in `cost`, "size" or "speed"; those that cost least first."""
        price = self._price(cost)
        known = [row for row in self.rows if row.is_done and row.quality is not None and price(row) is not None]
        best = [row for row in known if not _is_beaten(row, known, price)]
        return tuple(sorted(best, key=lambda row: price(row) or 0.0))

    def speed_of(self, row: SweepRow) -> float | None:
        """Times the speed of the fastest float file of all runs; without times, that of the run's own float file."""
        floats = [each.float_latency for each in self.rows if each.float_latency]
        return min(floats) / row.latency if floats and row.latency else row.speed

    def _price(self, cost: str) -> Callable[[SweepRow], float | None]:
        """What is better when it is less."""
        if cost == "size":
            return lambda row: row.size
        return lambda row: None if (speed := self.speed_of(row)) is None else -speed

    def summary(self) -> str:
        failed = sum(not row.is_done for row in self.rows)
        best = ", ".join(row.name for row in self.front())
        told = f"{plural(len(self.rows), 'run')}{f', {failed} failed' if failed else ''}"
        return f"{told}; on the front of quality and size: {best or 'none was measured'}"

    def to_dict(self) -> dict[str, Any]:
        fronts = {cost: [row.name for row in self.front(cost)] for cost in ("size", "speed")}
        return {"schema": SWEEP_SCHEMA, "rows": to_jsonable(self.rows), "front": fronts}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_file(cls, path: str | Path) -> "Sweep":
        """What `to_json` wrote."""
        try:
            data = read_json(Path(path), MAX_REPORT_BYTES)
            if not isinstance(data, dict) or data.get("schema") != SWEEP_SCHEMA:
                raise StoreError(f"{path} is no sweep of schema {SWEEP_SCHEMA}")
            return cls(TypeAdapter(tuple[SweepRow, ...]).validate_python(data.get("rows")))
        except (OSError, DocumentError, ValidationError) as error:
            raise StoreError(f"{path} is no sweep: {str(error).splitlines()[0]}") from error

    def __str__(self) -> str:
        return printed(SweepTable(self))


def _is_beaten(row: SweepRow, others: Sequence[SweepRow], price: Callable[[SweepRow], float | None]) -> bool:
    mine = (-(row.quality or 0.0), price(row) or 0.0)
    for other in others:
        theirs = (-(other.quality or 0.0), price(other) or 0.0)
        if theirs != mine and theirs[0] <= mine[0] and theirs[1] <= mine[1]:
            return True
    return False


def row_cells(sweep: Sweep, row: SweepRow) -> tuple[str, str, str, str, str, str]:
    """Score, error at the end, size, speed, latency, coverage, as people read them."""
    speed = sweep.speed_of(row)
    return (
        "" if row.score is None else value_of(row.score),
        decibel(row.last_db),
        "" if row.size is None else size_of(row.size),
        "" if speed is None else ratio(speed),
        "" if row.latency is None else time_of(row.latency),
        share_of(row.low),
    )


def list_fronts(sweep: Sweep) -> dict[str, str]:
    """Row -> the fronts that it is on."""
    fronts = {cost: {row.name for row in sweep.front(cost)} for cost in ("size", "speed")}
    return {row.name: ", ".join(cost for cost, names in fronts.items() if row.name in names) for row in sweep.rows}


@dataclass(frozen=True)
class SweepTable:
    """For rich: fits any width."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        on = list_fronts(self.sweep)
        rows = [(short(row.name, 48), *row_cells(self.sweep, row), on[row.name]) for row in self.sweep.rows]
        heads = ("run", "score", "last dB", "size", "speed", "latency", "in low", "on the front of")
        if options.max_width < MIN_WIDE_COLUMNS:
            quality = 1 if self.sweep.is_scored else 2
            few = [(row[0], row[quality], row[3], row[4], "*" if row[7] else "") for row in rows]
            yield plain_table(("run", heads[quality], "size", "speed", "front"), few, numbers=range(1, 4))
        else:
            yield plain_table(heads, rows, numbers=range(1, 7))
        for row in self.sweep.rows:
            if not row.is_done:
                yield Text(f"failed: {one_line(row.name)}: {one_line(row.message)}", style="red")
        yield Text(one_line(self.sweep.summary()))


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
        return round(LEFT + 10 + (self.width - LEFT - 30) * (cost - start) / (end - start), 1)

    def y(self, quality: float) -> float:
        low, high = self.qualities
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - quality) / (high - low), 1)


def _draw_plots(sweep: Sweep, cost: str, label: str) -> list[Picture]:
    """The same plot for wide and for narrow screens; the style sheet shows one of them."""
    known = [
        row for row in sweep.rows if row.is_done and row.quality is not None and _cost_of(sweep, row, cost) is not None
    ]
    if not known:
        return []
    costs, qualities = [_cost_of(sweep, row, cost) or 0.0 for row in known], [_drawn_quality(row) for row in known]
    ranges = _widen(min(costs), max(costs)), _widen(min(qualities), max(qualities))
    return [
        _draw_plot(sweep, known, cost, label, _PlotArea(width, *ranges), css)
        for width, css in ((WIDTH, "depth wide"), (NARROW_WIDTH, "narrow"))
    ]


def _draw_plot(sweep: Sweep, known: Sequence[SweepRow], cost: str, label: str, frame: _PlotArea, css: str) -> Picture:
    def at(row: SweepRow) -> tuple[float, float]:
        return frame.x(_cost_of(sweep, row, cost) or 0.0), frame.y(_drawn_quality(row))

    front = sweep.front(cost)
    labels = LabelPlacer(right=frame.width - 4)
    shapes = [*_draw_grid(frame, label), polyline([at(row) for row in front], "trace front-line")]
    for row in sorted(known, key=lambda row: row not in front):
        x, y = at(row)
        radius, dot = (6, "dot") if row in front else (4, "dot-weight")
        shapes.append(circle(x, y, radius, dot, f"{short(row.name)}: {', '.join(filter(None, row_cells(sweep, row)))}"))
        if row in front:
            shapes.append(labels.near(short(row.name, 28), x, y, "front-name"))
    return Picture(frame.width, HEIGHT, f"{len(known)} runs: {label}", css, shapes)


def _draw_grid(frame: _PlotArea, label: str) -> list[SvgElement]:
    shapes = []
    for quality in round_ticks(*frame.qualities):
        y = frame.y(quality)
        shapes += [line_shape(LEFT, y, frame.width - 4, y), text_shape(f"{quality:.5g}", LEFT - 6, y + 4, anchor="end")]
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
