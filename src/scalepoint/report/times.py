"""The slowest layers on the page: float and quantized beside each other, with the kernels that ran."""

from scalepoint.report.markup import Html, join, name, tag
from scalepoint.report.model import Report
from scalepoint.verification.times import LayerTime, because, totals
from scalepoint.words import ratio, share_of, short, time_of

SLOWEST = 10
COLUMNS = ("layer", "kernels", "float", "quantized", "speed", "of the time")


def time_table(report: Report) -> Html:
    """Ten rows; then what all others take together."""
    found = report.verification
    if found is None or not found.times:
        return Html()
    rows = found.times
    before, after = totals(rows)
    most = max((max(row.seconds or 0.0, row.float_seconds or 0.0) for row in rows[:SLOWEST]), default=0.0) or 1.0
    body = [_row(row, most, after) for row in rows[:SLOWEST]]
    rest = rows[SLOWEST:]
    if rest:
        others = LayerTime(f"{len(rest)} others", totals(rest)[1], totals(rest)[0])
        body.append(_row(others, max(most, *totals(rest)), after, is_rest=True))
    heads = [
        tag("th", title, scope="col", class_="number" if place > 1 else None) for place, title in enumerate(COLUMNS)
    ]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), id="time-table", class_="plain")
    frame = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Time by layer")
    told = (
        f"By the profiler of {found.runtime}, medians: {time_of(before)} in the float file, {time_of(after)} in the "
        "quantized one, all kernels together."
    )
    why = because(rows)
    is_slower = found.latency is not None and found.latency.is_slower
    lost = tag("p", f"{'Slower because of' if is_slower else 'Loses time in'} {why}.", class_="small") if why else None
    return join((tag("p", told, class_="muted"), lost, tag("div", frame, class_="card")))


def _row(row: LayerTime, most: float, total: float, *, is_rest: bool = False) -> Html:
    seconds, before = row.seconds, row.float_seconds
    is_slow = not is_rest and seconds is not None and before is not None and seconds > before
    cells = (
        tag("td", row.name if is_rest else name(row.name)),
        tag("td", short(" + ".join(row.kernels[:3]), 80), class_="muted"),
        _cell(before, most, "before"),
        _cell(seconds, most, "slow" if is_slow else "after"),
        tag("td", ratio(before / seconds) if before and seconds else "", class_="number"),
        tag("td", share_of(seconds / total) if seconds and total else "", class_="number"),
    )
    return tag("tr", *cells, class_="muted" if is_rest else None)


def _cell(seconds: float | None, most: float, class_: str) -> Html:
    if seconds is None:
        return tag("td", "", class_="number")
    bar = tag("rect", x=0, y=0, width=round(100 * min(seconds / most, 1.0), 1), height=4, class_=class_)
    drawn = tag("svg", bar, viewBox="0 0 100 4", preserveAspectRatio="none", class_="cell-bar", aria_hidden="true")
    return tag("td", tag("span", time_of(seconds)), drawn, class_="number")
