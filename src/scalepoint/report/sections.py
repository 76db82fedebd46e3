"""The sections of the page that are tables: layers, what stays float, placement, verification, circumstances."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from scalepoint.covered import CoverageRow
from scalepoint.report import blocks, charts, terminal
from scalepoint.report.markup import Html, join, name, tag
from scalepoint.report.model import Report, ReportedLayer
from scalepoint.words import POOR_DB, count, decibel, one_line, plural, quality, share_of, short, time_of

MOST_HISTOGRAMS = 24
MOST_NAMES = 12
MANY = 300  # rows: from here on they are laid out only when they come into view
LONGEST = 400  # of a reason, a value or a line of the runtime; the data of the page has the whole
INDENT = "\u00a0\u00a0"
COLUMNS = (  # title, kind of its values, order of the first click
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


def layer_table(report: Report, classes: Mapping[str, str]) -> Html:
    """Every operation once; the script orders and hides rows, and makes none."""
    rows = _rows(report)
    if not rows:
        return tag("p", "No operation with weights or a matrix product.", class_="muted")
    precisions = dict.fromkeys(row.precision for row, _ in rows if row)
    options = [tag("option", "every precision", value="")]
    options += [tag("option", one_line(each), value=each) for each in precisions]
    controls = tag(
        "div",
        tag(
            "label",
            "Filter ",
            tag("input", type="search", id="filter", placeholder="name, op or reason", autocomplete="off"),
        ),
        tag("label", "Precision ", tag("select", *options, id="precision")),
        tag("output", plural(len(rows), "layer"), id="shown", for_="filter precision"),
        class_="controls",
    )
    heads = [
        tag(
            "th",
            tag("button", title, type="button"),
            scope="col",
            role="columnheader",
            class_=f"c{index} {kind}",
            data_kind=kind,
            data_first=first,
        )
        for index, (title, kind, first) in enumerate(COLUMNS)
    ]
    ranged = any(error and (error.saturated, error.used) != (None, None) for _, error in rows)
    worst = max((abs(error.sqnr_db) for _, error in rows if error and math.isfinite(error.sqnr_db)), default=1.0) or 1.0
    body = [_row(row, error, classes, worst) for row, error in rows]
    table = tag(
        "table",
        tag("thead", tag("tr", *heads, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",  # said, as the style sheet lays it out as a grid
        id="layer-table",
        class_=" ".join(([] if ranged else ["no-ranges"]) + (["many"] if len(rows) > MANY else [])) or None,
    )
    frame = tag("div", table, class_="scroll table-frame", tabindex="0", role="region", aria_label="Layers")
    return join((controls, frame))


def _rows(report: Report) -> list[tuple[CoverageRow | None, ReportedLayer | None]]:
    """Operations with their errors; then errors of layers that are not among the operations. Names may repeat."""
    errors: dict[str, list[ReportedLayer]] = defaultdict(list)
    for each in reversed(report.layers):
        errors[each.name].append(each)
    rows: list[tuple[CoverageRow | None, ReportedLayer | None]] = [
        (row, errors[row.name].pop() if errors.get(row.name) else None) for row in report.coverage.operations
    ]
    return rows + [(None, each) for left in errors.values() for each in reversed(left)]


def _row(row: CoverageRow | None, error: ReportedLayer | None, classes: Mapping[str, str], worst: float) -> Html:
    title = row.name if row else error.name if error else ""
    precision = row.precision if row else ""
    dot = tag("i", class_=f"key {classes.get(precision, 'p-none')}")
    sqnr = error.sqnr_db if error else None
    cells = (
        tag("td", name(title), class_="c0", role="cell"),
        tag("td", row.kind if row else "", class_="c1", role="cell"),
        tag("td", tag("span", dot, precision) if row else None, class_="c2", role="cell"),
        tag("td", short(row.reason, LONGEST) if row else "", class_="c3", role="cell"),
        _number(row.macs if row else None, count(row.macs) if row else "", 4),
        _number(row.parameters if row else None, count(row.parameters) if row else "", 5),
        _number(sqnr, decibel(sqnr), 6, _error_extra(sqnr, worst), _error_words(error)),
        _number(error.saturated if error else None, share_of(error.saturated) if error else "", 7),
        _number(error.used if error else None, share_of(error.used) if error else "", 8),
    )
    return tag("tr", *cells, role="row", data_precision=precision)


def _number(value: float | None, text: str, column: int, extra: Html | None = None, title: str | None = None) -> Html:
    key = None if value is None else "-1e999" if math.isnan(value) else f"{value:.9g}".replace("inf", "1e999")
    return tag(
        "td", tag("span", text) if extra else text, extra, class_=f"c{column} number", role="cell", data_v=key,
        data_label=COLUMNS[column][0], title=title,
    )  # fmt: skip


def _error_extra(sqnr: float | None, most: float) -> Html | None:
    """Whether that is good, as a word and as a bar."""
    if sqnr is None or math.isnan(sqnr):
        return None
    word = tag("small", quality(sqnr)) if math.isfinite(sqnr) else None
    return join((word, _error_bar(sqnr, most)))


def _error_bar(sqnr: float, most: float) -> Html:
    width = 100 * min(max(sqnr, 0.0), most) / most
    class_ = "bad-bar" if sqnr < POOR_DB else "after"
    bar = tag("rect", x=0, y=0, width=round(width, 1), height=4, class_=class_)
    return tag("svg", bar, viewBox="0 0 100 4", preserveAspectRatio="none", class_="cell-bar", aria_hidden="true")


def _error_words(error: ReportedLayer | None) -> str | None:
    if error is None:
        return None
    words = [] if error.cosine is None else [f"cosine {error.cosine:.5f}"]
    words += [] if error.weight_sqnr_db is None else [f"weights alone {decibel(error.weight_sqnr_db)} dB"]
    return ", ".join(words) or None


def left_float(report: Report) -> Html:
    """By reason: what stays float and what it costs."""
    groups: dict[tuple[str, bool], list[CoverageRow]] = defaultdict(list)
    for row in report.coverage.operations:
        if row.precision == "float":
            groups[row.cause or "no reason given", row.is_asked].append(row)
    if not groups:
        return tag(
            "p", "Nothing: every operation with weights or a matrix product runs in low precision.", class_="muted"
        )
    total = sum(row.macs or 0 for row in report.coverage.operations)
    drawn = []
    for (reason, is_asked), rows in sorted(groups.items(), key=lambda each: -sum(row.macs or 0 for row in each[1])):
        known = total and all(row.macs is not None for row in rows)
        share = f", {share_of(sum(row.macs or 0 for row in rows) / total)} of the MACs" if known else ""
        names = [
            tag("li", name(row.name, 60), tag("span", f" {row.kind}", class_="muted")) for row in rows[:MOST_NAMES]
        ]
        more = [tag("li", f"and {len(rows) - MOST_NAMES} more", class_="muted")] if len(rows) > MOST_NAMES else []
        saved = sum(max(0.0, row.saves or 0.0) for row in rows)
        saves = f", float saves {time_of(saved)}" if saved >= 1e-6 else ""
        note = f"{plural(len(rows), 'operation')}{share}{saves}{', as asked' if is_asked else ''}"
        drawn.append(
            tag(
                "div",
                tag("h3", short(reason, LONGEST)),
                tag("p", note, class_="muted"),
                tag("ul", *names, *more, class_="names"),
                class_="card",
            )
        )
    return tag("div", *drawn, class_="reasons")


def placement(report: Report, classes: Mapping[str, str]) -> Html:
    """A picture for every block; the script shows the chosen one, without it all are there, folded."""
    if not report.graph:
        return Html()
    found = blocks.blocks_of(report.graph)
    identifiers = {block.path: f"block-{index}" for index, block in enumerate(found)}
    options = [
        tag(
            "option",
            f"{INDENT * len(block.path)}{one_line(block.title)[:80]} ({block.size})",
            value=identifiers[block.path],
        )
        for block in found
    ]
    used = dict.fromkeys(node.precision for node in report.graph if node.precision)
    keys = [tag("li", tag("i", class_=f"key {classes[each]}"), each) for each in used]
    if any(node.codes for node in report.graph):
        keys.append(tag("li", tag("i", class_="key line-key"), "a tensor that passes as codes"))
    chooser = tag("label", "Block ", tag("select", *options, id="block"))
    pictures = [
        tag(
            "details",
            tag("summary", name(block.title), f" ({plural(block.size, 'operation')})"),
            blocks.draw(block, report.graph, identifiers, classes),
            id=identifiers[block.path],
            class_="block",
            open=index == 0,
        )
        for index, block in enumerate(found)
    ]
    controls = tag("div", chooser, tag("ul", *keys, class_="legend"), class_="controls")
    return join((controls, tag("div", *pictures, class_="card")))


def verification(report: Report) -> Html:
    found = report.verification
    if found is None:
        items = [tag("li", short(each, LONGEST)) for each in report.findings or ()]
        told = terminal.checked_of(report) or "The file was not run in a runtime: scalepoint verify does it."
        return join((tag("p", told, class_="muted"), tag("ul", *items) if items else Html()))
    mood = "good" if found.holds else "bad" if found.is_refuted else "warn"
    words = "agrees" if found.holds else found.status.value if found.status.value != "ok" else "departs"
    lines = [
        tag(
            "p",
            tag("span", words, class_=f"badge {mood}"),
            " ",
            tag("code", short(found.path, LONGEST)),
            f" in {found.runtime}",
        )
    ]
    pairs = [tag("tr", tag("th", title, scope="row"), tag("td", short(text, LONGEST))) for title, text in found.rows()]
    lines += [tag("table", tag("tbody", *pairs), class_="pairs")] if pairs else []
    if found.executed:
        ordered = sorted(found.executed.items(), key=lambda each: (-each[1], each[0]))[:30]
        rows = [(short(title, 60), float(number), str(number)) for title, number in ordered]
        lines += [tag("h3", "Kernels that really ran"), charts.bars(rows, ["after"] * len(rows))]
    return tag("div", *lines, class_="card")


def circumstances(report: Report) -> Html:
    cards = []
    if report.timings:
        rows = [(short(stage, 40), seconds, time_of(seconds)) for stage, seconds in report.timings.items()]
        cards.append(tag("div", tag("h3", "Time by stage"), charts.bars(rows, ["before"] * len(rows)), class_="card"))
    if report.environment:
        pairs = [
            tag(
                "tr",
                tag("th", short(key, 60), scope="row"),
                tag("td", short(value if isinstance(value, str) else _written(value), LONGEST)),
            )
            for key, value in report.environment.items()
        ]
        cards.append(
            tag("div", tag("h3", "Environment"), tag("table", tag("tbody", *pairs), class_="pairs"), class_="card")
        )
    if report.migrated:
        rows_of = [
            tag(
                "tr",
                tag("th", f"{each.migration}: {short(each.name, 60)}", scope="row"),
                tag("td", short(each.note, LONGEST)),
            )
            for each in (*report.migrated.done, *report.migrated.refused)
        ]
        title = tag("h3", f"Migrations: {report.migrated.summary()}")
        cards.append(tag("div", title, tag("table", tag("tbody", *rows_of), class_="pairs"), class_="card"))
    if report.config:
        cards.append(
            tag("div", tag("h3", "Config"), tag("pre", _written(report.config, 2), tabindex="0"), class_="card")
        )
    return tag("div", *cards, class_="circumstances") if cards else Html()


def _written(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, default=str)
