"""Renders the HTML pages from `templates/` with Jinja2.

    Report -> ReportView (rows, bars, groups; view.py) -> templates/report.html.j2 -> one self-contained page

A page needs no network, and is readable without its script, which sorts, filters and shows one block at a time.
Names of layers are untrusted text: Jinja2 escapes every value (autoescape), control characters are shown as escapes
(`finalize`), and the content security policy allows only the page's own style sheet and script.
"""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from scalepoint.errors import StoreError
from scalepoint.report import charts, headline
from scalepoint.report.model import Report
from scalepoint.report.view import MAX_SHOWN, ReportView, to_json_text
from scalepoint.support import formatting
from scalepoint.support.files import replace_text

if TYPE_CHECKING:
    from jinja2 import Environment

JSON_FILE, HTML_FILE = "report.json", "report.html"
TEMPLATES = Path(__file__).with_name("templates")


def to_html(report: Report) -> str:
    """Render a report as one self-contained HTML page.

    Args:
        report: The report.
    """
    return render_page("report.html.j2", report.title, report.to_dict(), report=report, view=ReportView(report))


def write(report: Report, folder: str | Path) -> Path:
    """Write report.json and report.html.

    Args:
        report: The report.
        folder: The folder to write into.

    Returns:
        The path of the page.
    """
    folder = Path(folder)
    data, page = report.to_json(), to_html(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    replace_text(folder / JSON_FILE, data)
    replace_text(folder / HTML_FILE, page)
    return folder / HTML_FILE


def notebook_snippet(report: Report) -> str:
    """Render a report for a notebook: HTML without scripts or style sheets.

    Args:
        report: The report.
    """
    rows = headline.result_rows(report)
    return jinja_environment().get_template("notebook.html.j2").render(report=report, rows=rows)


def render_page(template: str, title: str, data: Mapping[str, Any], **values: Any) -> str:
    """Render a template that extends page.html.j2.

    Args:
        template: Name of the template.
        title: Title of the page.
        data: The data of the page as plain values; stored in the page as JSON.
        values: Variables of the template.
    """
    style, script = _read_asset("page.css"), _read_asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_policy_hash(style)}'; script-src '{_policy_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = {"title": title, "data": data, "style": style, "script": script, "policy": policy}
    return jinja_environment().get_template(template).render(**page, **values)


@cache
def jinja_environment() -> "Environment":
    """Return the Jinja2 environment of all pages."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415  # loaded when a page is written

    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_to_visible_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.policies["json.dumps_kwargs"] = {"ensure_ascii": True, "allow_nan": False, "separators": (",", ":")}
    env.filters |= {
        "breakable": _wrap_at_dots,
        "count": formatting.format_count,
        "json_text": to_json_text,
        "number": charts.format_number,
        "one_line": formatting.to_one_line,
        "plural": formatting.format_plural,
        "precision": formatting.describe_precision,
        "ratio": formatting.format_ratio,
        "runtime": formatting.describe_runtime,
        "share": formatting.format_share,
        "short": formatting.shorten,
        "size": formatting.format_size,
        "time": formatting.format_time,
        "value": formatting.format_value,
    }
    env.globals |= {"charts": charts, "text": headline, "limits": MAX_SHOWN, "scale": formatting.SCALE}
    env.globals["ui"] = env.get_template("macros.html.j2").module
    return env


def _to_visible_text(value: Any) -> Any:
    """Show control characters as escapes, and None as empty text. Markup was already processed."""
    if value is None:
        return ""
    if isinstance(value, float):
        return charts.format_number(value)
    return value if isinstance(value, Markup) else formatting.escape_unprintable(value)


def _wrap_at_dots(path: object) -> Markup:
    return escape(formatting.escape_unprintable(path)).replace(".", Markup(".<wbr>"))


@cache
def _read_asset(file: str) -> Markup:
    text = (TEMPLATES / file).read_text(encoding="utf-8")
    if "</" in text:  # would close the <style> or <script> element around it
        raise ValueError(f"{file} must not contain '</'")
    return Markup(text)  # noqa: S704  # our own file


def _policy_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
