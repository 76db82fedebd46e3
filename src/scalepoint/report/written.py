"""What became of a language model, as a section of the page."""

from scalepoint.report.language import sizes
from scalepoint.report.markup import Html, join, tag
from scalepoint.report.model import Report
from scalepoint.words import decibel, short

LONGEST = 2000


def section(report: Report) -> Html:
    """Sizes, speed, and what both models write."""
    found = report.language
    if found is None:
        return Html()
    rows = [
        ("bits a weight", f"{found.bits:.2f}"),
        ("size", sizes(found)),
        ("judged on", f"{found.tokens} tokens" if found.tokens else "nothing"),
        ("logits against float", _db(found.logits_db)),
        (f"{short(found.runtime) or 'the runtime'} against the simulation", _db(found.agreement_db)),
        ("reads, tokens a second", _number(found.prefill)),
        ("writes, tokens a second", _number(found.decode)),
        (f"the float model in {short(found.float_runtime)} reads", _number(found.float_prefill)),
        (f"the float model in {short(found.float_runtime)} writes", _number(found.float_decode)),
    ]
    table = tag("table", *(tag("tr", tag("th", what, scope="row"), tag("td", value)) for what, value in rows if value))
    texts = (("prompt", found.prompt), ("quantized", found.written), ("float", found.float_written))
    told = [join((tag("h3", what), tag("pre", short(text, LONGEST)))) for what, text in texts if text]
    return join((tag("div", table, class_="card"), *told))


def _db(value: float | None) -> str:
    return "" if value is None else f"{decibel(value)} dB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
