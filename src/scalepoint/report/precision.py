"""What was chosen for the weights, on the page: a precision for every layer with its front, and codes by the data."""

from collections.abc import Sequence

from scalepoint.report import charts
from scalepoint.report.chosen import Allocated, AllocatedLayer, ChosenCodes
from scalepoint.report.markup import Child, Html, join, name, tag
from scalepoint.report.model import Report
from scalepoint.report.terminal import allocation_of, level_of, tuning_of
from scalepoint.words import count, plural, share_of, short

LONGEST = 400  # rows, letters of a reason
UNITS = {
    "size": "size of the file, as a share of the float file",
    "bits": "bits of a weight, on average",
    "speed": "times the speed of the float model, by MACs",
    "cost": "share of the float model's size + share of its time",
}


def allocation(report: Report) -> Html:
    """The front with what was taken of it, and a row a layer."""
    found = report.allocation
    if found is None:
        return Html()
    intro = (
        "Every layer was solved at every choice on the same data. dB are the signal to noise at the model's output if "
        "only this layer were quantized so; the front adds the noises up. Both are estimates: the metric judges."
    )
    if found.unit in ("speed", "cost"):
        intro += " Time is MACs times the bits of the wider operand: no clock was read for it."
    legend = [
        tag("li", tag("i", class_="key dot-key"), "best for its cost"),
        tag("li", tag("i", class_="key worst-key"), "chosen"),
        tag("li", tag("i", class_="key weight-key"), "all layers alike"),
    ]
    picture = tag(
        "div",
        charts.front(found, f"{UNITS.get(found.unit, found.unit)}"),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label="front",
    )
    chart = tag("div", picture, tag("ul", *legend, class_="legend"), class_="card")
    return join(
        (tag("p", f"{allocation_of(report)}."), tag("p", intro, class_="muted"), chart, _layers(found), _refused(found))
    )


def _layers(found: Allocated) -> Html:
    choices = list(dict.fromkeys(choice for each in found.layers for choice in each.errors))
    rows: list[Sequence[Child]] = [
        (
            name(each.name),
            short(each.kind, 40),
            count(each.weights),
            tag("strong", short(each.chosen, 60)),
            *(_level(each, choice) for choice in choices),
        )
        for each in found.layers[:LONGEST]
    ]
    heads = ("Layer", "Op", "Weights", "Chosen", *(f"dB at {short(choice, 40)}" for choice in choices))
    return _framed(heads, rows, (2, *range(4, 4 + len(choices))), len(found.layers), "Precision by layer")


def _level(each: AllocatedLayer, choice: str) -> Child:
    """dB at a choice; that of the chosen one stands out."""
    if choice not in each.errors:
        return "-"
    text = level_of(each.errors[choice])
    return tag("strong", text) if choice == each.chosen else text


def _refused(found: Allocated) -> Html | None:
    """Each reason once, with the layers that it holds for."""
    reasons: dict[str, list[str]] = {}
    for each in found.layers:
        for choice, why in each.refused.items():
            reasons.setdefault(f"{choice}: {why}", []).append(each.name)
    items = [
        tag("li", short(why, LONGEST), tag("span", f" ({plural(len(names), 'layer')})", class_="muted"))
        for why, names in list(reasons.items())[:20]
    ]
    return tag("div", tag("h3", "Not offered"), tag("ul", *items), class_="card spaced") if items else None


def tuning(report: Report) -> Html:
    """The error of every layer before and after, what moved, and what was left with its reason."""
    found = report.tuning
    if found is None or not (found.layers or found.left):
        return Html()
    intro = (
        "Codes, scales and biases were chosen so that each layer gives what it gives in the float model. dB are the "
        "signal to noise of a layer's own output on rows that were held out: with the nearest codes, and as chosen. A "
        "layer that would have become worse keeps the nearest."
    )
    parts: list[Child] = [tag("p", f"{tuning_of(report)}."), tag("p", intro, class_="muted")]
    if found.layers:
        legend = [
            tag("li", tag("i", class_="key weight-key"), "nearest codes"),
            tag("li", tag("i", class_="key dot-key"), "as chosen"),
        ]
        picture = tag(
            "div", charts.gains(found.layers), class_="scroll", tabindex="0", role="region", aria_label="gains"
        )
        parts.append(tag("div", picture, tag("ul", *legend, class_="legend"), class_="card"))
        heads = ("Layer", "Op", "dB before", "After", "Gain", "Codes moved", "By", "Notes")
        rows = [_tuned(each) for each in found.layers[:LONGEST]]
        parts.append(_framed(heads, rows, (2, 3, 4, 5), len(found.layers), "Tuned layers"))
    if found.left:
        items = [
            tag("li", name(each), tag("span", f": {short(why, LONGEST)}", class_="muted"))
            for each, why in list(found.left.items())[:LONGEST]
        ]
        parts.append(tag("div", tag("h3", "Left as they were"), tag("ul", *items), class_="card spaced"))
    return join(parts)


def _tuned(each: ChosenCodes) -> tuple[Child, ...]:
    gain = f"{each.gain_db:+.1f}" if each.step else "0"
    kept = each.step or "kept the nearest"
    levels = (level_of(each.before), level_of(each.after))
    return (
        name(each.name),
        short(each.kind, 40),
        *levels,
        gain,
        share_of(each.moved),
        short(kept, 40),
        short(each.notes, 200),
    )


def _framed(
    heads: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Sequence[int], total: int, label: str
) -> Html:
    kinds = ["number" if index in numbers else None for index in range(len(heads))]
    head = [tag("th", title, scope="col", class_=kind) for title, kind in zip(heads, kinds, strict=True)]
    body = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="plain")
    more = total - len(rows)
    note = tag("p", f"and {more} more in the data of this page", class_="muted") if more > 0 else None
    frame = tag("div", table, class_="card scroll spaced tall", tabindex="0", role="region", aria_label=label)
    return join((frame, note))
