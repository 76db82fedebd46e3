"""Two runs beside each other as one HTML page."""

from collections.abc import Callable, Sequence

from scalepoint.report import charts
from scalepoint.report.beside import layer_texts, written
from scalepoint.report.difference import Difference, Number, Setting, Side
from scalepoint.report.markup import Child, Html, data_block, join, name, tag
from scalepoint.report.shell import document
from scalepoint.report.story import table as html_table
from scalepoint.words import one_line, plural, short

LONGEST = 1000
MOST_ROWS = 2000
BARS = {"better": "after", "worse": "slow"}


def difference_page(found: Difference) -> str:
    """One self-contained page."""
    parts = (
        ("layers", "Layers that differ", _layers_section(found)),
        ("settings", "Settings that differ", _settings_section(found, found.settings)),
        ("circumstances", "Circumstances that differ", _settings_section(found, found.circumstances)),
    )
    shown = [tag("section", tag("h2", title), drawn, id=identifier) for identifier, title, drawn in parts if drawn]
    items = [tag("li", short(each, LONGEST)) for each in found.warnings]
    warned = tag("div", tag("ul", *items), class_="warnings", role="note") if items else None
    main = tag("main", warned, tag("div", *map(_tile(found), found.numbers), class_="tiles"), *shown)
    title = f"{short(found.first.name)} and {short(found.second.name)}"
    return document(title, join((_header(found), main)), data_block(found.to_dict(), "report-data"))


def _header(found: Difference) -> Html:
    return tag(
        "header",
        tag("p", "scalepoint compare", class_="brand"),
        tag("h1", name(found.first.name), " → ", name(found.second.name)),
        *map(_side, (found.first, found.second)),
        tag("p", one_line(found.summary()), class_="verdict plain"),
    )


def _side(side: Side) -> Html:
    facts = (
        tag("strong", name(side.name)),
        tag("span", name(side.title), " for ", name(side.target)),
        tag("time", side.created),
        tag("span", one_line(side.verdict)),
    )
    return tag("p", *facts, class_="facts")


def _tile(found: Difference) -> Callable[[Number], Html]:
    def drawn(each: Number) -> Html:
        first, second, change = each.texts()
        known = [
            (short(side.name, 18), value, text)
            for side, value, text in ((found.first, each.first, first), (found.second, each.second, second))
            if value is not None
        ]
        classes = ("before", BARS.get(each.mood, "after"))[-len(known) :] if known else ()
        big = tag(
            "p",
            tag("span", change or "-", class_="number"),
            tag("span", each.mood if each.mood != "same" else "", class_="unit"),
            class_="big",
        )
        mood = "tile warn" if each.mood == "worse" else "tile"
        return tag("section", tag("h2", name(each.name, 40)), big, charts.bars(known, classes), class_=mood)

    return drawn


def _layers_section(found: Difference) -> Html:
    changed = found.changed_layers
    if not changed:
        return tag("p", f"None of {plural(len(found.layers), 'layer')}.", class_="muted")
    rows: list[Sequence[Child]] = []
    for each in changed[:MOST_ROWS]:
        _, runs, first, second, change = layer_texts(each)
        rows.append((name(each.name), runs, first, second, change))
    note = (
        f"{len(changed)} of {len(found.layers)}, those that run in something else first; SQNR in dB of the output "
        "against the float model."
    )
    columns = ("Layer", "Runs in", short(found.first.name, 24), short(found.second.name, 24), "Change")
    return join((tag("p", note, class_="muted"), _frame(html_table(columns, rows, (2, 3, 4)), "Layers that differ")))


def _settings_section(found: Difference, settings: Sequence[Setting]) -> Html:
    if not settings:
        return Html()
    rows = [
        (name(each.key), *(short(written(value), LONGEST) for value in (each.first, each.second))) for each in settings
    ]
    columns = ("", short(found.first.name, 40), short(found.second.name, 40))
    return _frame(html_table(columns, rows, ()), "Settings")


def _frame(table: Html, label: str) -> Html:
    return tag("div", table, class_="card scroll", tabindex="0", role="region", aria_label=label)
