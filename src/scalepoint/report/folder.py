"""report.json and report.html in a folder; each is the old one or the new one, never half of it."""

from pathlib import Path

from scalepoint.errors import StoreError
from scalepoint.report.html import to_html
from scalepoint.report.model import Report
from scalepoint.support.files import replace_text

JSON_FILE, HTML_FILE = "report.json", "report.html"


def write(report: Report, folder: str | Path) -> Path:
    """Write both files; returns the path of the page."""
    folder = Path(folder)
    data, page = report.to_json(), to_html(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write into {folder}: {error.strerror}") from error
    replace_text(folder / JSON_FILE, data)
    replace_text(folder / HTML_FILE, page)
    return folder / HTML_FILE
