"""Files and folders that the pages for contributors name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "src" / "scalepoint", ROOT / "src" / "scalepoint" / "runtimes" / "onnxruntime")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|yml|toml|html|txt)|/)(?![\w/])")
OUTPUTS = {"reproduce.py", "report.html", "log.txt", "out/"}  # written by deploy and by the benches
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_a_page_exists(page: str) -> None:
    text = re.sub(r"\]\(\S+?\)", "]", (ROOT / page).read_text())  # links are tested with the site
    paths = set(PATH.findall(text)) - OUTPUTS
    assert len(paths) >= 5
    missing = [path for path in paths if not any((folder / path).exists() for folder in FOLDERS)]
    assert not missing


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src" / "scalepoint").glob("*/__init__.py")]
    assert [name for name in packages if not re.search(rf"`{name}[`/]", text)] == []
