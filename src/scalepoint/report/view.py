"""ReportView: the values that the templates of a report page use, such as rows, bars and groups.

Report -> ReportView -> html.py renders templates/report.html.j2 with both
"""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from scalepoint.operation_coverage import CoverageRow
from scalepoint.report import charts, headline
from scalepoint.report.model import Report
from scalepoint.report.placement_graph import Placement, draw_placement
from scalepoint.results import LayerError
from scalepoint.support import formatting
from scalepoint.verification.layer_times import LayerTime, describe_slower_layers, find_slower_layers, sum_seconds

MAX_SHOWN = {"rows": 200, "layers": 400, "names": 12, "histograms": 24}  # the JSON in the page has all of them
COLOURS = {  # class in page.css -> its precisions; the same in every report
    "p-int8": "8-bit integers",
    "p-weight8": "weights in 8 bits, activations float",
    "p-weight4": "weights in 4 bits",
    "p-float8": "8-bit floats",
    "p-weight3": "weights in 3 bits or fewer",
    "p-other": "another low precision",
    "p-float": "float",
    "p-none": "an input",
}
LAZY_LAYOUT_ROWS = 300  # of longer tables the browser lays out only the rows in view
MAX_TIME_ROWS = 10
READER_STAYS_FLOAT = " reads it and stays float"  # the end of reasons such as "block.norm reads it and stays float"
MAX_KERNELS = 30
LAYER_COLUMNS = (  # title, type of the values, sort order of the first click
    ("Layer", "text", "up"),
    ("Op", "text", "up"),
    ("Precision", "text", "up"),
    ("Why", "text", "up"),
    ("MACs", "number", "down"),
    ("Weights", "number", "down"),
    ("SQNR dB", "number", "up"),
    ("Clipped", "number", "down"),
    ("Range used", "number", "up"),
)
SECTIONS = (  # id (also the name of its template), title, whether a report has it
    ("language", "As a language model", lambda report: report.language is not None),
    ("error", "Error by depth", lambda report: report.layers),
    ("time", "Time by layer", lambda report: report.verification and report.verification.times),
    ("left-float", "Stays float", lambda report: True),
    ("histograms", "Ranges", lambda report: report.histograms),
    (
        "accuracy",
        "Files that were tried",
        lambda report: len(report.trials) > 1 and not headline.has_only_placements(report),
    ),
    ("allocation", "Precision by layer", lambda report: report.allocation is not None),
    ("tuning", "Tuning", lambda report: report.tuning and (report.tuning.layers or report.tuning.left)),
    ("placement", "Placement", lambda report: report.graph),
    ("verification", "In the runtime", lambda report: True),
    ("layers", "Layers", lambda report: True),
    (
        "circumstances",
        "Circumstances",
        lambda report: report.timings or report.environment or report.migrated or report.config,
    ),
    ("reproduce", "How to reproduce", lambda report: report.reproduction is not None),
)


@dataclass(frozen=True)
class NumberCell:
    """A number of the layer table. `key` is its sort key for the script, `bar` a width in percent."""

    key: str | None
    text: str
    word: str = ""
    bar: float | None = None
    css: str = ""
    title: str | None = None


@dataclass(frozen=True)
class LayerRow:
    """A row of the layer table."""

    name: str
    kind: str
    precision: str
    reason: str
    css: str
    is_operation: bool
    numbers: Sequence[NumberCell]


@dataclass(frozen=True)
class FloatGroup:
    """Operations that stay float for the same reason."""

    reason: str
    note: str
    rows: Sequence[CoverageRow]


@dataclass(frozen=True)
class TimeRow:
    """A row of the time table, with a cell for the float file and one for the quantized file."""

    name: str
    kernels: str
    cells: Sequence["TimeCell"]
    speed: str
    share: str
    is_rest: bool


class TimeCell(NamedTuple):
    """A time as number and bar. `width` is in percent, `css` the class of the bar."""

    seconds: float | None
    width: float
    css: str


@dataclass(frozen=True)
class TimeTable:
    """The slowest layers, then all others in one row."""

    rows: Sequence[TimeRow]
    float_total: float
    total: float
    why: str


class ReportView:
    """The values that the templates of a report use: rows, bars and groups, computed on first use."""

    layer_columns = LAYER_COLUMNS

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def sections(self) -> list[tuple[str, str]]:
        return [(identifier, title) for identifier, title, is_shown in SECTIONS if is_shown(self.report)]

    @property
    def verdict_class(self) -> str:
        """CSS class of the verdict."""
        verification = self.report.verification
        if verification is None:
            return "plain"
        if verification.holds:
            return "good" if headline.is_good(self.report) else "warn"
        return "bad" if verification.is_refuted else "warn"

    @cached_property
    def colour_classes(self) -> dict[str, str]:
        """Precision -> CSS class of its colour."""
        precisions = dict.fromkeys(self.report.coverage.share_of_parameters())
        precisions |= dict.fromkeys(node.precision for node in self.report.graph)
        precisions |= dict.fromkeys(row.precision for row in self.report.coverage.operations)
        return {precision: choose_colour_class(precision) for precision in precisions}

    # tiles

    @property
    def accuracy_bars(self) -> list[charts.ChartBar]:
        score = self.report.accuracy[0]
        is_simulated = score.where == "simulation"
        values = [
            ("float", score.float_value, "before"),
            ("simulated", score.value if is_simulated else score.simulated_value, "after"),
            ("runtime", None if is_simulated else score.value, "after"),
        ]
        measured = [(label, value, css) for label, value, css in values if value is not None]
        return charts.make_bars((label, value, formatting.format_value(value), css) for label, value, css in measured)

    @property
    def is_output_poor(self) -> bool:
        """Whether the outputs are poor, or broken."""
        return self.report.output_db is not None and formatting.is_poor(self.report.output_db)

    @property
    def output_number(self) -> str:
        """Signal-to-noise ratio of the outputs, or a word for no error and for broken outputs."""
        text = formatting.format_decibels(self.report.output_db)
        return text if formatting.describe_quality(self.report.output_db) in ("", "broken") else f"{text} dB"

    @property
    def output_explanation(self) -> str:
        """The text next to `output_number`."""
        level = self.report.output_db
        word = formatting.describe_quality(level)
        if level is None or word in ("", "broken"):
            return word or "as the float model"
        return f"{word}; error {formatting.format_error_share(level)} against the float model"

    @property
    def size_change(self) -> tuple[str, str]:
        verification = self.report.verification
        if verification is None:
            return "", ""
        return formatting.describe_size_change(verification.float_size or 0, verification.size)

    @property
    def size_bars(self) -> list[charts.ChartBar]:
        verification = self.report.verification
        sizes = (0, 0) if verification is None else (verification.float_size or 0, verification.size)
        rows = zip(("float", "quantized"), sizes, ("before", "after"), strict=True)
        return charts.make_bars((label, float(size), formatting.format_size(size), css) for label, size, css in rows)

    @property
    def latency_bars(self) -> list[charts.ChartBar]:
        latency = self.report.latency
        if latency is None:
            return []
        classes = ("before", "slow" if latency.is_slower else "after")
        rows = zip(("float", "quantized"), latency.seconds, classes, strict=True)
        return charts.make_bars((label, seconds, formatting.format_time(seconds), css) for label, seconds, css in rows)

    @cached_property
    def _shares(self) -> tuple[dict[str, float] | None, dict[str, float]]:
        return self.report.coverage.share_of_macs(), self.report.coverage.share_of_parameters()

    @property
    def low_share(self) -> float | None:
        macs, parameters = self._shares
        return headline.low_share(parameters if macs is None else macs)

    @property
    def low_share_unit(self) -> str:
        is_known = self._shares[0] is not None
        return "of the MACs in low precision" if is_known else "of the weights in low precision; MACs not known"

    def _by_colour(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return class of a colour -> share, the largest first."""
        colours: dict[str, float] = defaultdict(float)
        for precision, share in shares.items():
            colours[self.colour_classes[precision]] += share
        return dict(sorted(colours.items(), key=lambda pair: -pair[1]))

    @property
    def share_bars(self) -> list[tuple[str, list[charts.BarShare]]]:
        labelled = zip(("MACs", "weights"), self._shares, strict=True)
        bars = []
        for label, parts in labelled:
            if parts is not None:
                segments = [(COLOURS[css], share, css) for css, share in self._by_colour(parts).items()]
                bars.append((label, charts.make_shares(segments)))
        return bars

    @property
    def share_legend(self) -> list[tuple[str, str]]:
        macs, parameters = self._shares
        colours = self._by_colour(macs or {}) | self._by_colour(parameters)  # every colour of the two bars
        shares = self._by_colour(parameters if macs is None else macs)
        return [(css, f"{COLOURS[css]} {formatting.format_share(shares.get(css, 0.0)) or '0%'}") for css in colours]

    # layers

    @cached_property
    def layer_rows(self) -> list[LayerRow]:
        pairs = self._layer_pairs()
        finite = [abs(error.sqnr_db) for _, error in pairs if error and math.isfinite(error.sqnr_db)]
        largest = max(finite, default=1.0) or 1.0
        return [self._layer_row(row, error, largest) for row, error in pairs]

    def _layer_pairs(self) -> list[tuple[CoverageRow | None, LayerError | None]]:
        """Return operations with their errors, then errors of layers without an operation. Names may repeat."""
        errors_by_name: dict[str, deque[LayerError]] = defaultdict(deque)
        for error in self.report.layers:
            errors_by_name[error.name].append(error)
        pairs: list[tuple[CoverageRow | None, LayerError | None]] = []
        for row in self.report.coverage.operations:
            errors = errors_by_name[row.name]
            pairs.append((row, errors.popleft() if errors else None))
        return pairs + [(None, error) for unpaired in errors_by_name.values() for error in unpaired]

    def _layer_row(self, row: CoverageRow | None, error: LayerError | None, largest: float) -> LayerRow:
        precision = row.precision if row else ""
        macs, parameters = (row.macs, row.parameters) if row else (None, None)
        clipped, used = (error.saturation, error.used_range) if error else (None, None)
        return LayerRow(
            name=next((item.name for item in (row, error) if item is not None), ""),
            kind=row.kind if row else "",
            precision=precision,
            reason=row.explanation if row else "",
            css=self.colour_classes.get(precision, "p-none"),
            is_operation=row is not None,
            numbers=(
                NumberCell(_sort_key(macs), formatting.format_count(macs) if row else ""),
                NumberCell(_sort_key(parameters), formatting.format_count(parameters) if row else ""),
                _error_cell(error, largest),
                NumberCell(_sort_key(clipped), formatting.format_share(clipped)),
                NumberCell(_sort_key(used), formatting.format_share(used)),
            ),
        )

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(row.precision for row in self.layer_rows if row.is_operation))

    @property
    def layer_table_classes(self) -> str:
        has_ranges = any((layer.saturation, layer.used_range) != (None, None) for layer in self.report.layers)
        is_long = len(self.layer_rows) > LAZY_LAYOUT_ROWS
        return " ".join(filter(None, ("" if has_ranges else "no-ranges", "lazy-layout" if is_long else "")))

    @cached_property
    def float_names(self) -> frozenset[str]:
        return frozenset(row.name for row in self.report.coverage.operations if row.precision == headline.FLOAT)

    @cached_property
    def float_groups(self) -> list[FloatGroup]:
        """Operations that stay float, by reason; the reason with the most MACs first."""
        groups: dict[tuple[str, bool], list[CoverageRow]] = defaultdict(list)
        for row in self.report.coverage.operations:
            if row.precision == headline.FLOAT:
                groups[_shared_reason(row), row.is_asked].append(row)
        total = sum(row.macs or 0 for row in self.report.coverage.operations)
        groups_with_macs = []
        for (reason, is_asked), rows in groups.items():
            macs = sum(row.macs or 0 for row in rows)
            is_known = total and all(row.macs is not None for row in rows)
            share = f", {formatting.format_share(macs / total)} of the MACs" if is_known else ""
            saved = sum(max(0.0, row.saves or 0.0) for row in rows)
            saves = f", float saves {formatting.format_time(saved)}" if saved >= 1e-6 else ""
            requested = ", as requested" if is_asked else ""
            note = f"{formatting.format_plural(len(rows), 'operation')}{share}{saves}{requested}"
            groups_with_macs.append((macs, FloatGroup(reason, note, rows)))
        return [group for _, group in sorted(groups_with_macs, key=lambda pair: -pair[0])]

    # other sections

    @property
    def language_rows(self) -> list[tuple[str, str]]:
        result = self.report.language
        if result is None:
            return []
        decibels = [
            None if value is None else f"{formatting.format_decibels(value)} dB"
            for value in (result.logits_db, result.agreement_db)
        ]
        rates = (result.prefill, result.decode, result.float_prefill, result.float_decode)
        speeds = [None if value is None else f"{value:.1f}" for value in rates]
        rows = (
            ("bits per weight", f"{result.bits:.2f}"),
            ("size", headline.describe_language_sizes(result)),
            ("perplexity measured on", f"{result.tokens} tokens" if result.tokens else "nothing"),
            ("logits against float", decibels[0]),
            (f"{formatting.shorten(result.runtime) or 'the runtime'} against the simulation", decibels[1]),
            ("prefill, tokens per second", speeds[0]),
            ("decode, tokens per second", speeds[1]),
            (f"prefill of the float model in {formatting.shorten(result.float_runtime)}", speeds[2]),
            (f"decode of the float model in {formatting.shorten(result.float_runtime)}", speeds[3]),
        )
        return [(title, value) for title, value in rows if value]

    @property
    def choices(self) -> list[str]:
        """All precisions that were considered for some layer."""
        layers = self.report.allocation.layers if self.report.allocation else ()
        return list(dict.fromkeys(choice for layer in layers for choice in layer.errors))

    @property
    def refused_choices(self) -> list[tuple[str, int]]:
        """Each reason why a precision was not considered, with the number of layers."""
        layers = self.report.allocation.layers if self.report.allocation else ()
        reasons: dict[str, int] = defaultdict(int)
        for layer in layers:
            for choice, reason in layer.refused.items():
                reasons[f"{choice}: {reason}"] += 1
        return list(reasons.items())

    @property
    def left_untuned(self) -> list[tuple[str, str]]:
        return list(self.report.tuning.left.items())[: MAX_SHOWN["layers"]] if self.report.tuning else []

    @cached_property
    def times(self) -> TimeTable:
        rows = self.report.verification.times if self.report.verification else ()
        float_total, total = sum_seconds(rows)
        slowest, rest = rows[:MAX_TIME_ROWS], rows[MAX_TIME_ROWS:]
        largest = max((max(row.seconds or 0.0, row.float_seconds or 0.0) for row in slowest), default=0.0) or 1.0
        slower = find_slower_layers(rows)
        table_rows = [_time_row(row, largest, total, is_slow=row in slower) for row in slowest]
        if rest:
            float_rest, rest_total = sum_seconds(rest)
            rest_time = LayerTime(f"{len(rest)} others", seconds=rest_total, float_seconds=float_rest)
            table_rows.append(_time_row(rest_time, max(largest, float_rest, rest_total), total, is_rest=True))
        return TimeTable(table_rows, float_total, total, describe_slower_layers(rows))

    @cached_property
    def placement(self) -> Placement:
        return draw_placement(self.report.graph, self.colour_classes, COLOURS)

    @property
    def kernel_bars(self) -> list[charts.ChartBar]:
        executed = self.report.verification.executed if self.report.verification else {}
        counts = sorted(executed.items(), key=lambda item: (-item[1], item[0]))[:MAX_KERNELS]
        return charts.make_bars(
            (formatting.shorten(name, 60), float(count), str(count), "after") for name, count in counts
        )

    @property
    def stage_bars(self) -> list[charts.ChartBar]:
        return charts.make_bars(
            (formatting.shorten(stage, 40), seconds, formatting.format_time(seconds), "before")
            for stage, seconds in self.report.timings.items()
        )

    @property
    def environment_rows(self) -> list[tuple[str, str]]:
        return [(key, to_json_text(value)) for key, value in self.report.environment.items()]

    @property
    def migration_rows(self) -> list[tuple[str, str]]:
        migrated = self.report.migrated
        steps = (*migrated.done, *migrated.refused) if migrated else ()
        return [(f"{step.migration}: {formatting.shorten(step.name, 60)}", step.note) for step in steps]


def _shared_reason(row: CoverageRow) -> str:
    """Return the reason without the name of a layer in it, so that layers with one cause are in one card."""
    if row.reason.endswith(READER_STAYS_FLOAT):
        return f"a layer that {READER_STAYS_FLOAT.strip()}"
    return row.reason or "no reason recorded"


def choose_colour_class(precision: str) -> str:
    """Return the CSS class of a precision, a text such as "w int8 per_channel, x uint8".

    The class depends on the precision alone, so that reports can be compared.
    """
    if not precision:
        return "p-none"
    if precision == headline.FLOAT:
        return "p-float"
    first, *other_precisions = precision.split(", ")
    bits = re.search(r"\d+", first)
    if bits is None:
        return "p-other"
    if "fp" in first or "float" in first or "mx" in first:  # "w fp8_e4m3", "w fp4 per_block"
        return {"8": "p-float8", "08": "p-float8", "4": "p-weight4"}.get(bits[0], "p-other")
    if bits[0] == "8":
        is_weight_only = first.startswith(("w ", "stored ")) and not other_precisions
        return "p-weight8" if is_weight_only else "p-int8"  # "w int8 per_channel"; "w int8, x uint8" and "int8"
    return {"4": "p-weight4", "3": "p-weight3", "2": "p-weight3", "1": "p-weight3"}.get(bits[0], "p-other")  # "w int4"


def _sort_key(value: float | None) -> str | None:
    """Return a number as text for the script; NaN sorts first."""
    if value is None:
        return None
    return "-1e999" if math.isnan(value) else f"{value:.9g}".replace("inf", "1e999")


def _error_cell(error: LayerError | None, largest: float) -> NumberCell:
    """Return the error of a layer in dB, as a word and as a bar."""
    if error is None:
        return NumberCell(None, "")
    sqnr = error.sqnr_db
    notes = [] if error.cosine is None else [f"cosine {error.cosine:.5f}"]
    notes += (
        [] if error.weight_sqnr_db is None else [f"weights only {formatting.format_decibels(error.weight_sqnr_db)} dB"]
    )
    return NumberCell(
        key=_sort_key(sqnr),
        text=formatting.format_decibels(sqnr),
        word=formatting.describe_quality(sqnr) if math.isfinite(sqnr) else "",
        bar=None if math.isnan(sqnr) else round(100 * min(max(sqnr, 0.0), largest) / largest, 1),
        css="bad-bar" if sqnr < formatting.POOR_DB else "after",
        title=", ".join(notes) or None,
    )


def _time_row(row: LayerTime, largest: float, total: float, *, is_slow: bool = False, is_rest: bool = False) -> TimeRow:
    seconds, before = row.seconds, row.float_seconds
    widths = [None if value is None else round(100 * min(value / largest, 1.0), 1) for value in (before, seconds)]
    return TimeRow(
        name=row.name,
        kernels=" + ".join(row.kernels[:3]),
        cells=(
            TimeCell(before, widths[0] or 0.0, "before"),
            TimeCell(seconds, widths[1] or 0.0, "slow" if is_slow else "after"),
        ),
        speed=formatting.format_ratio(before / seconds) if before and seconds else "",
        share=formatting.format_share(seconds / total) if seconds and total else "",
        is_rest=is_rest,
    )


def to_json_text(value: Any, indent: int | None = None) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=indent, ensure_ascii=False, default=str)
