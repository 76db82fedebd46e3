"""The sections that tell how the file came to be: what was raised for accuracy, and how to make it again."""

from collections.abc import Sequence

from scalepoint.report.markup import Child, Html, join, name, tag
from scalepoint.report.model import Attempt, Report
from scalepoint.report.terminal import bound_of, pace_of, search_of
from scalepoint.words import ratio, share_of, short, value_of

LONGEST = 200  # rows
ACCURACY = (
    "Steps come in the order of gain per cost. Gain is the noise to signal that is expected to go from the output; "
    "cost is what is added to the size and to the time, as shares of the float model's. Files go up until one holds, "
    "then down again; the cheapest that holds is kept."
)
SPEED = (
    "Layers that the runtime's profiler found slower than in the float file go to float; the first file that is fast "
    "enough is kept, or the fastest."
)


def accuracy(report: Report) -> Html:
    """Every file that was tried, and what the kept one has more than the first."""
    if len(report.attempts) < 2:
        return Html()
    start = report.accuracy[0].float_value if report.accuracy else None
    tried = [_attempt(index, each, start) for index, each in enumerate(report.attempts)]
    raised = [
        (
            name(each.layer) if each.layer else "all layers",
            each.to,
            ("" if pace_of(report) else "by the metric") if each.gain is None else value_of(each.gain),
            "none" if not each.cost else share_of(each.cost),
        )
        for each in report.raised()
    ]
    bound, pace = bound_of(report), pace_of(report)
    words = f"The metric is {bound}: {search_of(report)}." if bound else f"{search_of(report)}."
    words = f"The file has {pace}: {search_of(report)}." if pace else words
    intro = SPEED if pace else ACCURACY
    tables = [table(("File", "From", "Score", "Change", "Speed", "Raised"), tried, (2, 3, 4, 5))]
    if raised:
        tables.append(table(("Layer", "Raised to", "Gain", "Cost"), raised[:LONGEST], (2, 3)))
    more = len(raised) - LONGEST
    note = tag("p", f"and {more} more in the data of this page", class_="muted") if more > 0 else None
    cards = [
        tag("div", each, class_="card scroll", tabindex="0", role="region", aria_label=label)
        for each, label in zip(tables, ("Files that were tried", "What was raised"), strict=False)
    ]
    return join((tag("p", words), tag("p", intro, class_="muted"), tag("div", *cards, class_="search"), note))


def _attempt(index: int, each: Attempt, start: float | None) -> tuple[Child, ...]:
    known = start is not None and each.score is not None
    return (
        tag("span", f"{index} ", tag("span", "kept", class_="badge good") if each.is_kept else None),
        "" if each.start is None else str(each.start),
        "" if each.score is None else value_of(each.score),
        f"{(each.score or 0.0) - (start or 0.0):+.3g}" if known else "",
        "" if each.speed is None else ratio(each.speed),
        str(len(each.raised)),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Sequence[int]) -> Html:
    kinds = ["number" if index in numbers else None for index in range(len(columns))]
    heads = [tag("th", title, scope="col", class_=kind) for title, kind in zip(columns, kinds, strict=True)]
    body = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="plain")


def reproduce(report: Report) -> Html:
    """Texts to copy, and the marks that tell whether it is the same."""
    found = report.reproduction
    if found is None:
        return Html()
    intro = (
        "The same packages, then the same call: it makes the kept file again, without a search. Other marks mean that "
        "something else went in."
    )
    texts = (("Packages", found.install), ("On the command line", found.command), ("In Python", found.call))
    cards = [_copyable(title, text) for title, text in texts if text]
    pairs = [
        tag("tr", tag("th", short(key, 60), scope="row"), tag("td", tag("code", short(value, 100))))
        for key, value in found.marks.items()
    ]
    if pairs:
        table = tag("table", tag("tbody", *pairs), class_="pairs")
        cards.append(tag("div", tag("h3", "Marks"), table, class_="card"))
    return join((tag("p", intro, class_="muted"), tag("div", *cards, class_="again")))


def _copyable(title: str, text: str) -> Html:
    button = tag("button", "Copy", type="button", class_="copy", hidden=True, aria_label=f"Copy: {title}")
    return tag(
        "div", tag("div", tag("h3", title), button, class_="copy-row"), tag("pre", text, tabindex="0"), class_="card"
    )
