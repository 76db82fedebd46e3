"""What every page of ours is wrapped in: one style sheet, one script, and a policy that lets nothing else run."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from scalepoint.report.markup import Html, tag
from scalepoint.words import short


def document(title: str, body: Html, data: Html) -> str:
    """One self-contained page: names of layers are other people's text, so only what is here may run."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{short(title)} · scalepoint"),
        Html(f"<style>{style}</style>"),
    )
    whole = tag("body", body, _footer(), data, Html(f"<script>{script}</script>"))
    return f'<!doctype html>\n<html lang="en">{head}{whole}</html>\n'


@cache
def _asset(file: str) -> str:
    text = files("scalepoint.report").joinpath(file).read_text(encoding="utf-8")
    if "</" in text:  # it would end the element that holds it
        raise ValueError(f"{file} must not contain '</'")
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _footer() -> Html:
    button = tag("button", "Save the data (JSON)", type="button", id="save-data", hidden=True)
    return tag("footer", tag("p", "One file, no network: this page can be sent and kept as it is."), button)
