"""What became of a language model, as a section of the page."""

from scalepoint.report.markup import Html, join, tag
from scalepoint.report.model import Report
from scalepoint.words import decibel, ratio, short, size_of

LONGEST = 2000


def section(report: Report) -> Html:
    """Sizes, speed, and what both models write."""
    found = report.language
    if found is None:
        return Html()
    rows = [
        ("bits a weight", f"{found.bits:.2f}"),
        ("size", f"{size_of(found.float_size)} -> {size_of(found.size)}, {ratio(found.smaller)} smaller"),
        ("judged on", f"{found.tokens} tokens" if found.tokens else "nothing"),
        ("logits against float", _db(found.logits_db)),
        (f"{short(found.runtime) or 'the runtime'} against the simulation", _db(found.agreement_db)),
        ("reads, tokens a second", _number(found.prefill)),
        ("writes, tokens a second", _number(found.decode)),
    ]
    table = tag("table", *(tag("tr", tag("th", what, scope="row"), tag("td", value)) for what, value in rows if value))
    texts = (("prompt", found.prompt), ("quantized", found.written), ("float", found.float_written))
    told = [join((tag("h3", what), tag("pre", short(text, LONGEST)))) for what, text in texts if text]
    return join((tag("div", table, class_="card"), *told))


def _db(value: float | None) -> str:
    return "" if value is None else f"{decibel(value)} dB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
