"""The documentation as a whole: generated pages, the strict build, links, and all public names."""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import run
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from scalepoint.quantize import CalibrationMethod
from scalepoint.spec import QParamsCalculatorBase, RangeCalculatorBase
from scalepoint.targets import list_targets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES_OUTSIDE_THE_SITE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


@cache
def generator() -> ModuleType:
    spec = spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    pages = generator().pages()
    stale = [str(path) for path, text in pages.items() if (DOCS / path).read_text(encoding="utf-8") != text]
    assert not stale, f"run: python docs/generate.py ({stale})"
    marked = {path.relative_to(DOCS) for path in DOCS.rglob("*.md") if generator().GENERATED in path.read_text()}
    assert marked == set(pages), "a page is no longer generated"


def test_the_table_of_the_readme_is_up_to_date() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8") == generator().readme(), "run: python docs/generate.py"


def test_the_summary_of_the_measurements_is_up_to_date() -> None:
    page = generator().measured_page()
    assert (DOCS / "measured.md").read_text(encoding="utf-8") == page, "run: python docs/generate.py"


def test_the_index_for_readers_of_markdown_is_up_to_date() -> None:
    assert (DOCS / "llms.txt").read_text(encoding="utf-8") == generator().llms_index(), "run: python docs/generate.py"


def test_every_missed_row_is_in_the_summary() -> None:
    details = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "measured").glob("*.md"))
    rows = [line for line in details.splitlines() if line.startswith("|") and "**missed**" in line]
    assert generator().missed().count("\n") - 2 == len(rows)


def test_the_tables_of_the_recipes_are_up_to_date() -> None:
    page = generator().recipes()
    assert (DOCS / "guides" / "recipes.md").read_text(encoding="utf-8") == page, "run: python docs/generate.py"
    tables = re.findall(r"<!-- begin [^>]*: [^>]*-->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert len(tables) >= 5
    assert all(len(table.splitlines()) > 3 for table in tables)


MEASURED = """<!-- begin accuracy-runtime -->
| model | how | accuracy | drop | limit | speed | size |
|---|---|---|---|---|---|---|
| Net | float32 | 90.00 | 0.00 |  |  |  |
| Net | scalepoint | 89.50 | 0.50 | 0.50 | 1.5x | 0.3x |
| Net | quantize_static, MinMax | 80.00 | 10.00 |  | 1.4x | 0.3x |
| Net | quantize_static, Entropy | 88.00 | 2.00 |  | 1.3x | 0.3x |
<!-- end accuracy-runtime -->
<!-- begin placement -->
| network | speed, batch 1 | speed, batch 8 | dB | size |
|---|---|---|---|---|
| Net | 1.5 / 1.4 / 1.6 **missed** | 2.0 / 2.0 / 1.9 | 30 / 29 / 20 | 0.3 / 0.4 |
<!-- end placement -->"""


def test_the_tables_of_the_readme_show_the_best_file_of_the_other_tool() -> None:
    assert generator().task_rows(MEASURED) == [
        ("Net", "90.00", "scalepoint", "89.50", "1.5x", "0.3x"),
        ("Net", "90.00", "quantize_static, Entropy", "88.00", "1.3x", "0.3x"),
    ]
    cells = ("1.5 / 1.6 (behind)", "2.0 / 1.9", "30 / 20", "0.3 / 0.4")
    assert generator().compared_rows(MEASURED) == [("Net, random", *cells)]
    assert generator().task_rows("") == generator().compared_rows("") == []


def test_every_target_has_a_page() -> None:
    documented = [name for name in list_targets() if (DOCS / "targets" / f"{name}.md").is_file()]
    assert documented == list(generator().VERIFICATION)
    assert {"onnxruntime", "openvino", "tensorrt", "reference"} <= set(documented)


def test_every_calculator_is_explained() -> None:
    page = "".join(path.read_text() for path in (DOCS / "algorithms").glob("*.md"))
    page += (DOCS / "explained" / "tensor-layer.md").read_text()
    built_in = [
        key
        for base in (RangeCalculatorBase, QParamsCalculatorBase)
        for key in base.list_registry_keys()
        if base.get_class(key).__module__.startswith("scalepoint.")
    ]
    missing = [key for key in (*built_in, *CalibrationMethod) if f"`{key}`" not in page and f'"{key}"' not in page]
    assert not missing


class _Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None and tag != "use":
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    """Pages of a strict build by path."""
    folder = tmp_path_factory.mktemp("site").resolve()
    done = run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: _Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_the_site_builds_strictly_and_every_link_and_anchor_exists(site: dict[Path, _Page]) -> None:
    broken = []
    for path, page in site.items():
        if path.name == "404.html":  # its links are relative to the root of the web server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            linked = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            linked = linked / "index.html" if linked.is_dir() else linked
            has_anchor = not parts.fragment or (linked in site and unquote(parts.fragment) in site[linked].anchors)
            if not linked.is_file() or not (has_anchor or parts.fragment in ("", "__skip")):
                broken.append(f"{path.name}: {link}")
    assert not broken
    assert len(site) > 40


def test_the_site_needs_no_network(site: dict[Path, _Page]) -> None:
    external = {link for page in site.values() for link in page.links if urlsplit(link).scheme in ("http", "https")}
    assert not external


def test_every_public_name_is_in_the_reference(site: dict[Path, _Page]) -> None:
    anchors = {anchor for path, page in site.items() if path.parent.name == "api" for anchor in page.anchors}
    missing = []
    for module in generator().MODULES:
        names = getattr(import_module(f"scalepoint.{module}"), "__all__", ())
        missing += [f"{module}.{name}" for name in names if generator().anchor(module, name) not in anchors]
    assert not missing


@pytest.mark.parametrize("name", PAGES_OUTSIDE_THE_SITE)
def test_links_of_the_pages_outside_the_site_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme]
    assert [link for link in links if not (ROOT / urlsplit(link).path).exists()] == []
