"""The four numbers on top of the page, each with a small chart and its circumstances."""

from scalepoint.report import charts
from scalepoint.report.markup import Child, Html, name, tag
from scalepoint.report.model import Report
from scalepoint.report.terminal import NOT_LOW, bound_of, low_share
from scalepoint.words import change_of_size, ratio, share_of, size_of, time_of, value_of

COLOURS = 6


def palette(report: Report) -> dict[str, str]:
    """Precision -> class of its colour; float has its own."""
    known = dict.fromkeys(report.coverage.share_of_parameters())
    known |= dict.fromkeys(node.precision for node in report.graph)
    low = [each for each in known if each not in (NOT_LOW, "")]
    classes = {each: f"p{min(index, COLOURS - 1)}" for index, each in enumerate(low)}
    return classes | {NOT_LOW: "p-float", "": "p-none"}


def tiles(report: Report, classes: dict[str, str]) -> Html:
    drawn = (_accuracy(report), _size(report), _latency(report), _coverage(report, classes))
    return tag("div", *drawn, class_="tiles")


def _tile(title: str, number: Child, unit: Child, *rest: Child, mood: str = "") -> Html:
    big = tag("p", tag("span", number, class_="number"), tag("span", unit, class_="unit"), class_="big")
    return tag("section", tag("h2", title), big, *rest, class_=f"tile {mood}".strip())


def _missing(title: str, why: str) -> Html:
    return tag("section", tag("h2", title), tag("p", why, class_="muted"), class_="tile missing")


def _accuracy(report: Report) -> Html:
    if not report.accuracy:
        return _missing("Accuracy", "Not measured: give deploy a metric of yours with evaluate=.")
    first, *others = report.accuracy
    measured = (
        ("float", first.float_value),
        ("simulated", first.quantized_value),
        ("runtime", first.runtime_value),
    )
    rows = [(label, value, value_of(value)) for label, value in measured if value is not None]
    classes = ("before", "after", "after")[: len(rows)]
    where = "in the runtime" if first.runtime_value is not None else "simulated"
    unit = tag("span", name(first.name, 40), f" {where}, {first.change_text}")
    lines = [
        tag("p", name(each.name, 40), f": {value_of(each.float_value)} → {value_of(each.final)}", class_="muted small")
        for each in others[:4]
    ]
    bound = bound_of(report)
    if bound:
        lines.append(tag("p", bound, class_="small"))
    mood = "warn" if bound.startswith("more") else ""
    return _tile("Accuracy", value_of(first.final), unit, charts.bars(rows, classes), *lines, mood=mood)


def _size(report: Report) -> Html:
    found = report.verification
    if found is None or not found.size:
        return _missing("Size", "Not measured: the file was not verified.")
    if not found.float_size:
        return _tile("Size", size_of(found.size), "no float file to compare with")
    rows = [
        ("float", float(found.float_size), size_of(found.float_size)),
        ("quantized", float(found.size), size_of(found.size)),
    ]
    times, word = change_of_size(found.float_size, found.size)
    mood = "warn" if word == "larger" else ""
    return _tile("Size", times, word, charts.bars(rows, ("before", "after")), mood=mood)


def _latency(report: Report) -> Html:
    found = report.verification.latency if report.verification else None
    if found is None:
        return _missing("Latency", "Not measured: verify with float_path= compares with the float file.")
    before, after = found.seconds
    rows = [("float", before, time_of(before)), ("quantized", after, time_of(after))]
    slow = found.is_slower
    drawn = charts.bars(rows, ("before", "slow" if slow else "after"))
    note = tag("p", f"Compared with {found.against}. {found.how}", class_="muted small")
    unit = f"{found.baseline}'s speed{': slower' if slow else ''}"
    return _tile("Latency", ratio(found.ratio), unit, drawn, note, mood="warn" if slow else "")


def _coverage(report: Report, classes: dict[str, str]) -> Html:
    macs, parameters = report.coverage.share_of_macs(), report.coverage.share_of_parameters()
    if not report.coverage.operations:
        return _missing("Coverage", "No operation with weights or a matrix product.")
    drawn = []
    for label, shares in (("MACs", macs), ("weights", parameters)):
        if shares is not None:
            parts = list(shares.items())
            drawn.append(charts.shares(parts, [classes[each] for each, _ in parts], label))
    names = list((macs or parameters).items())[:COLOURS]
    legend = [tag("li", tag("i", class_=f"key {classes[each]}"), f"{each} {share_of(share)}") for each, share in names]
    number = share_of(low_share(macs if macs is not None else parameters))
    unit = "of the MACs in low precision" if macs is not None else "of the weights in low precision; MACs not known"
    bars = tag("div", *drawn, class_="bars")
    return _tile("Coverage", number, unit, bars, tag("ul", *legend, class_="legend small"))
