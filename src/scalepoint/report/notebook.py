"""A report as a notebook shows it: verdict and four numbers, in the notebook's own colours; nothing runs."""

from scalepoint.report.markup import Html, join, name, tag
from scalepoint.report.model import Report
from scalepoint.report.terminal import against, low_share
from scalepoint.words import one_line, share_of


def snippet(report: Report) -> str:
    """HTML without script or style sheet."""
    rows = [tag("tr", *(tag("td", one_line(cell)) for cell in row)) for row in against(report)]
    heads = tag("tr", *(tag("th", title, scope="col") for title in ("", "float", "quantized", "change")))
    table = tag("table", tag("thead", heads), tag("tbody", *rows)) if rows else Html()
    low = low_share(report.coverage.share_of_macs())
    covered = tag("p", f"{share_of(low)} of the MACs in low precision") if low is not None else Html()
    steps = [tag("li", one_line(each)) for each in report.next_steps()]
    return join(
        (
            tag("p", tag("strong", name(report.title), " for ", name(report.target))),
            tag("p", report.verdict()),
            table,
            covered,
            tag("ul", *steps) if steps else None,
        )
    )
