"""The report as text for a terminal: the result in about twenty lines, and with verbose=True tables of layers.

A narrow terminal (40 columns) gets tables with fewer columns; nothing is cut off on the right.
"""

import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from scalepoint.report.headline import FLOAT, describe_cost, notes, result_rows, verdict
from scalepoint.results import PrecisionAllocation
from scalepoint.support.formatting import (
    describe_quality,
    format_decibels,
    format_noise_level,
    format_ratio,
    format_share,
    format_time,
    shorten,
    to_one_line,
)
from scalepoint.verification.layer_times import sum_seconds

if TYPE_CHECKING:
    from scalepoint.report.model import Report

MIN_WIDE_COLUMNS = 72  # a narrower terminal gets tables with fewer columns
MAX_FRONT_ROWS = 8
MIN_TIME_SHARE = 0.05  # of the time of the file; faster layers are not listed


class WrappedText:
    """A text whose lines end at spaces. A name that is longer than a line is broken at dots."""

    def __init__(self, text: str, style: str = "") -> None:
        self.text, self.style = to_one_line(text), style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest_piece = max((cell_len(piece) for piece in _split_at_breaks(self.text)), default=1)
        return Measurement(min(longest_piece, options.max_width), min(cell_len(self.text), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        lines = [""]
        for word in re.findall(r"\S+\s*", self.text):
            is_short = cell_len(word.rstrip()) <= width
            for piece in [word] if is_short else _split_at_breaks(word):
                if lines[-1] and cell_len(lines[-1]) + cell_len(piece.rstrip()) > width:
                    lines.append("")
                lines[-1] += piece
        for line in lines:
            yield Text(line.rstrip(), style=self.style, overflow="fold")


def _split_at_breaks(text: str) -> list[str]:
    return re.findall(r"[^\s./_]*(?:[./_]+|\s+|$)", text)[:-1]


@dataclass(frozen=True)
class ReportTable:
    """A report that rich can print at any width.

    Attributes:
        report: The report.
        rows: Largest number of layers and reasons in a table.
        verbose: Also print the tables.
    """

    report: "Report"
    rows: int = 10
    verbose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, narrow = self.report, options.max_width < MIN_WIDE_COLUMNS
        yield WrappedText(f"{shorten(report.title)} for {shorten(report.target)}", style="bold")
        yield WrappedText(verdict(report))
        yield Text()
        yield _label_rows(result_rows(report))
        yield from (WrappedText(note, style="yellow") for note in notes(report))
        if self.verbose:
            yield from self._tables(narrow)
        steps = report.next_steps()
        yield _label_rows([("" if index else "Next:", step) for index, step in enumerate(steps)], style="")

    def _tables(self, narrow: bool) -> Iterable[Text | Table]:
        report = self.report
        if report.allocation is not None:
            yield from _with_title("Precision by layer", _precision_table(report.allocation, narrow, self.rows))
            yield from _with_title("Error against cost", _front_table(report.allocation))
        yield from _with_title("Stays float", _float_table(report, narrow, self.rows))
        yield from _with_title("Worst layers", _error_table(report, narrow, self.rows))
        yield from _with_title("Slowest layers", _time_table(report, narrow, self.rows))
        if report.verification is not None:
            yield from _with_title("In the runtime", _pair_table(report.verification.rows()))
        yield Text()


def _label_rows(rows: Sequence[tuple[str, str]], style: str = "dim") -> Table:
    """Return lines with a label in front; texts of several lines are indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style=style)
    grid.add_column()
    for label, text in rows:
        grid.add_row(WrappedText(label, style), WrappedText(text))
    return grid


def render_text(report: "Report") -> str:
    """Render a report as wide as the terminal, without colours and without spaces at the end of a line."""
    file = StringIO()
    Console(file=file, width=shutil.get_terminal_size((100, 24)).columns, no_color=True).print(ReportTable(report))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _with_title(title: str, table: Table | None) -> Iterable[Text | Table]:
    return () if table is None else (Text(), Text(title, style="bold"), table)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """Return a table without borders. Cells are plain text: a name that looks like rich markup is not interpreted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for index, column in enumerate(columns):
        is_number = index in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if index in numbers else WrappedText(cell) for index, cell in enumerate(row)))
    return table


def _float_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    float_rows = [row for row in report.coverage.operations if row.precision == FLOAT]
    if not float_rows:
        return None
    rows = [(shorten(row.name), row.kind, to_one_line(row.explanation)) for row in float_rows[:limit]]
    rows += [(f"and {len(float_rows) - limit} more", "", "")] if len(float_rows) > limit else []
    if narrow:
        return plain_table(("operation", "why"), [(row[0], row[2]) for row in rows])
    return plain_table(("operation", "kind", "why"), rows)


def _error_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    if not report.layers:
        return None
    rows = [
        (
            shorten(layer.name),
            format_decibels(layer.sqnr_db),
            describe_quality(layer.sqnr_db),
            format_share(layer.saturation),
            format_share(layer.used_range),
            format_decibels(layer.weight_sqnr_db),
        )
        for layer in report.worst(limit)
    ]
    if narrow:
        return plain_table(("layer", "dB", "quality"), [row[:3] for row in rows], numbers=(1,))
    columns = ("layer", "SQNR dB", "quality", "clipped", "range used", "weight dB")
    return plain_table(columns, rows, numbers=(1, 3, 4, 5))


def _precision_table(allocation: PrecisionAllocation, narrow: bool, limit: int) -> Table:
    """Return the precision of at most `limit` layers; layers with the most frequent precision come last."""
    most_frequent = next(iter(allocation.counts), "")
    ordered = sorted(allocation.layers, key=lambda layer: layer.chosen == most_frequent)
    choices = list(dict.fromkeys(choice for layer in allocation.layers for choice in layer.errors))[:3]
    rows = [
        (
            shorten(layer.name),
            shorten(layer.chosen, 40),
            *(format_noise_level(layer.errors[choice]) if choice in layer.errors else "-" for choice in choices),
        )
        for layer in ordered[:limit]
    ]
    if len(ordered) > limit:
        rows.append((f"and {len(ordered) - limit} more", "", *("" for _ in choices)))
    if narrow:
        return plain_table(("layer", "chosen"), [row[:2] for row in rows])
    heads = ("layer", "chosen", *(f"dB at {shorten(choice, 24)}" for choice in choices))
    return plain_table(heads, rows, numbers=range(2, len(heads)))


def _front_table(allocation: PrecisionAllocation) -> Table:
    """Return some points of the front. The last one that costs no more than the chosen allocation is marked."""
    sign = -1 if allocation.unit == "speed" else 1  # a higher speed is a lower cost
    limit = sign * allocation.reached * (1 + 1e-9)
    within = [index for index, point in enumerate(allocation.front) if sign * point.cost <= limit]
    marked = within[-1] if within else 0
    step = max(1, math.ceil(len(allocation.front) / MAX_FRONT_ROWS))
    rows = []
    for index in sorted({*range(0, len(allocation.front), step), marked, len(allocation.front) - 1}):
        point = allocation.front[index]
        counts = ", ".join(f"{count} {shorten(choice, 30)}" for choice, count in point.counts.items())
        mark = "<- chosen near here" if index == marked else ""
        rows.append((describe_cost(allocation.unit, point.cost), format_noise_level(point.error), counts, mark))
    return plain_table(("cost", "dB", "layers", ""), rows, numbers=(1,))


def _time_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    verification = report.verification
    if verification is None or not verification.times:
        return None
    least = MIN_TIME_SHARE * sum_seconds(verification.times)[1]
    slow_rows = [row for row in verification.times if (row.seconds or 0.0) >= least]
    rows = [
        (
            shorten(row.name),
            "" if row.float_seconds is None else format_time(row.float_seconds),
            "" if row.seconds is None else format_time(row.seconds),
            format_ratio(row.float_seconds / row.seconds) if row.float_seconds and row.seconds else "",
            shorten(" + ".join(row.kernels[:2]), 60),
        )
        for row in slow_rows[:limit]
    ]
    if not rows:
        return None
    if narrow:
        return plain_table(("layer", "float", "quantized"), [row[:3] for row in rows], numbers=(1, 2))
    return plain_table(("layer", "float", "quantized", "speed", "kernels"), rows, numbers=(1, 2, 3))


def _pair_table(rows: Iterable[tuple[str, str]]) -> Table:
    return plain_table(("", ""), [(name, to_one_line(value)) for name, value in rows])
