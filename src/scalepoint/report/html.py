"""The report as one HTML page: no network, no framework, nothing to install; readable without its script.

Everything is drawn here, in Python. The script only sorts, filters and shows one block at a time.
"""

from scalepoint.report import charts, precision, sections, story, times, written
from scalepoint.report.markup import Html, data_block, join, name, tag
from scalepoint.report.model import Report
from scalepoint.report.shell import document
from scalepoint.report.tiles import palette, tiles
from scalepoint.words import SCALE, one_line, plural, short

LONGEST = 1000  # of a warning
PARTS = (
    ("accuracy", "Files that were tried"),
    ("language", "As a language model"),
    ("allocation", "Precision by layer"),
    ("tuning", "Chosen by the data"),
    ("layers", "Layers"),
    ("left-float", "Stays float"),
    ("error", "Error by depth"),
    ("histograms", "Ranges"),
    ("time", "Time by layer"),
    ("placement", "Placement"),
    ("verification", "In the runtime"),
    ("circumstances", "Circumstances"),
    ("reproduce", "How to reproduce"),
)


def to_html(report: Report) -> str:
    """One self-contained page."""
    data = data_block(report.to_dict(), "report-data")
    return document(report.title, join((_header(report), _main(report))), data)


def _header(report: Report) -> Html:
    found = report.verification
    is_slow = found is not None and found.latency is not None and found.latency.ratio < 1
    is_fine = found is not None and found.holds and not is_slow
    mood = "plain" if found is None else "good" if is_fine else "bad" if found.is_refuted else "warn"
    facts = [tag("span", "for ", tag("strong", name(report.target))), tag("time", report.created)]
    version = report.environment.get("scalepoint")
    facts += [tag("span", f"scalepoint {one_line(str(version))}")] if version else []
    return tag(
        "header",
        tag("p", "scalepoint report", class_="brand"),
        tag("h1", name(report.title)),
        tag("p", *facts, class_="facts"),
        tag("p", report.verdict(), class_=f"verdict {mood}"),
        _next(report),
    )


def _next(report: Report) -> Html | None:
    items = [tag("li", short(each, LONGEST)) for each in report.next_steps()]
    return tag("div", tag("strong", "Next"), tag("ul", *items), class_="next") if items else None


def _main(report: Report) -> Html:
    classes = palette(report)
    drawn = {
        "accuracy": story.accuracy(report),
        "language": written.section(report),
        "allocation": precision.allocation(report),
        "tuning": precision.tuning(report),
        "layers": sections.layer_table(report, classes),
        "left-float": sections.left_float(report),
        "error": _depth(report),
        "histograms": _histograms(report),
        "time": times.time_table(report),
        "placement": sections.placement(report, classes),
        "verification": sections.verification(report),
        "circumstances": sections.circumstances(report),
        "reproduce": story.reproduce(report),
    }
    shown = [(identifier, title) for identifier, title in PARTS if drawn[identifier]]
    links = tag("nav", *(tag("a", title, href=f"#{identifier}") for identifier, title in shown), aria_label="Sections")
    parts = [tag("section", tag("h2", title), drawn[identifier], id=identifier) for identifier, title in shown]
    return tag("main", _warnings(report), tiles(report, classes), links, *parts)


def _warnings(report: Report) -> Html | None:
    if not report.warnings:
        return None
    items = [tag("li", short(each, LONGEST)) for each in report.warnings]
    return tag("div", tag("strong", plural(len(items), "warning")), tag("ul", *items), class_="warnings", role="note")


def _depth(report: Report) -> Html:
    if not report.layers:
        return Html()
    floats = frozenset(row.name for row in report.coverage.operations if row.precision == "float")
    legend = [
        tag("li", tag("i", class_="key dot-key"), "output of a layer"),
        tag("li", tag("i", class_="key worst-key"), "the three worst"),
        tag("li", tag("i", class_="key float-key"), "a layer that stays float"),
        tag("li", tag("i", class_="key weight-key"), "the weights alone"),
    ]
    intro = f"SQNR in dB against the float model, in the order of execution: {SCALE}. 6 dB are one bit."
    picture = tag(
        "div", charts.depth(report.layers, floats), class_="scroll", tabindex="0", role="region", aria_label="plot"
    )
    return join(
        (tag("p", intro, class_="muted"), tag("div", picture, tag("ul", *legend, class_="legend"), class_="card"))
    )


def _histograms(report: Report) -> Html:
    if not report.histograms:
        return Html()
    intro = (
        "Values of the worst layers, counted on a logarithmic scale. The shaded range is what the codes reach; "
        "what is outside is clipped, and an empty range is precision lost."
    )
    shown = report.histograms[: sections.MOST_HISTOGRAMS]
    more = len(report.histograms) - len(shown)
    note = tag("p", f"and {more} more in the data of this page", class_="muted") if more else None
    return join((tag("p", intro, class_="muted"), tag("div", *map(charts.histogram, shown), class_="histograms"), note))
