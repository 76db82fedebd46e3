"""The page in real headless Chromium, opened from disk."""

from pathlib import Path

import pytest

from scalepoint.report import Sweep, sweep_page, write
from tests.pipeline import test_sweep
from tests.report import example_reports
from tests.report.browser import Browser, find

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: apt-get install chromium")

ROWS = "[...document.querySelectorAll('#layer-table tbody tr')].filter((row) => !row.hidden)"
NAMES = f"{ROWS}.map((row) => row.cells[0].textContent)"
TYPE = """(() => {{ const box = document.getElementById('filter'); box.value = {text!r};
    box.dispatchEvent(new Event('input')); return new Promise((done) => setTimeout(done, 120)); }})()"""


@pytest.fixture(scope="module")
def browser():
    started = Browser(find())
    yield started
    started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made_up = {
        "ordinary": example_reports.ordinary(),
        "bare": example_reports.bare(),
        "evil": example_reports.evil(),
        "large": example_reports.large(),
    }
    paths = {name: write(report, folder / name) for name, report in made_up.items()}
    paths["swept"] = folder / "swept.html"
    paths["swept"].write_text(sweep_page(Sweep(test_sweep.ROWS)))
    return paths


def click(browser: Browser, title: str) -> None:
    browser.run(
        f"[...document.querySelectorAll('#layer-table th button')].find((b) => b.textContent === {title!r}).click()"
    )


def choose(browser: Browser, identifier: str, value: str) -> None:
    browser.run(
        f"(() => {{ const box = document.getElementById({identifier!r}); box.value = {value!r}; "
        "box.dispatchEvent(new Event('change')); })()"
    )


@pytest.mark.parametrize("name", ["ordinary", "bare", "evil", "large", "swept"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (380, False)], ids=["wide", "dark", "phone"])
def test_the_page_opens_without_errors_and_fits_the_window(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    assert browser.run("document.documentElement.classList.contains('js')")  # the script ran to its start
    assert browser.run("!document.getElementById('save-data').hidden")  # and to its end
    assert browser.run("document.documentElement.scrollWidth") <= width
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 22, 28)" if dark else "rgb(246, 247, 249)")
    assert browser.complaints == []


def test_words_in_tables_are_not_broken_on_a_phone(browser, pages):
    browser.open(pages["swept"], width=400)
    widths = "[...document.querySelectorAll('.scroll td:first-child')].map(each => each.clientWidth)"
    assert min(browser.run(widths)) >= 100
    assert browser.run("document.documentElement.scrollWidth") == 400


def test_the_slowest_layers_are_shown_next_to_their_float_time(browser, pages):
    browser.open(pages["ordinary"])
    rows = browser.run(
        "[...document.querySelectorAll('#time-table tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert len(rows) == 11  # ten, and the others together
    assert rows[-1][0] == "2 others"
    assert rows[1][:5] == ["layer2.0.downsample", "QLinearConv + Transpose", "400 us", "900 us", "0.44x"]
    bars = browser.run("document.querySelectorAll('#time-table rect.slow').length")
    assert bars == 1  # the one that loses is marked
    assert "layer2.0.downsample (QLinearConv 900 us, Conv 400 us in float)" in browser.run(
        "document.getElementById('time').textContent"
    )


def test_the_policy_allows_the_style_sheet_only(browser, pages):
    browser.open(pages["bare"])
    assert browser.run("getComputedStyle(document.querySelector('.tiles')).display") == "grid"
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.run("window.made = document.createElement('script'); made.textContent = 'window.owned = 1'")
    browser.run("document.body.append(made)")
    browser.run("new Promise((done) => setTimeout(done, 200))")
    assert browser.run("window.owned") is None
    assert browser.run("document.title") == "model · scalepoint"
    assert len(browser.complaints) >= 2  # the policy speaks up: so its silence elsewhere means something


def test_names_are_not_executed(browser, pages):
    browser.open(pages["evil"])
    browser.run("new Promise((done) => setTimeout(done, 300))")
    assert browser.run("document.title") == "<script>alert(1)</script> · scalepoint"
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.images.length") == 0
    assert "<script>alert(1)</script>" in browser.run(NAMES)
    browser.run(TYPE.format(text="<script>alert"))
    assert browser.run(NAMES).count("<script>alert(1)</script>") == 2
    assert browser.complaints == []


def test_a_click_sorts_and_a_second_one_reverses_the_order(browser, pages):
    browser.open(pages["ordinary"])
    first = browser.run(NAMES)
    values = f"{ROWS}.map((row) => Number(row.cells[6].dataset.v))"
    click(browser, "SQNR dB")
    up = browser.run(values)
    assert up == sorted(up)
    assert browser.run("document.querySelector('th[aria-sort]').textContent") == "SQNR dB"
    click(browser, "SQNR dB")
    assert browser.run(values) == sorted(up, reverse=True)
    click(browser, "MACs")
    assert browser.run("document.querySelectorAll('th[aria-sort]').length") == 1
    click(browser, "Layer")
    assert browser.run(NAMES) == sorted(first)
    assert browser.complaints == []


def test_the_keyboard_sorts(browser, pages):
    browser.open(pages["ordinary"])
    browser.run("document.getElementById('precision').focus()")
    for _ in range(20):
        browser.press("Tab")
        if browser.run("document.activeElement.textContent") == "Weights":
            break
    browser.press("Enter")
    assert browser.run("document.querySelector('th[aria-sort]').textContent") == "Weights"
    assert browser.run(NAMES)[0] == "layer4.0.conv1"


def test_filters_are_combined(browser, pages):
    browser.open(pages["ordinary"])
    browser.run(TYPE.format(text="LAYER4 conv"))
    assert all(name.startswith("layer4") for name in browser.run(NAMES))
    assert browser.run("document.getElementById('shown').textContent") == "5 of 22 layers"
    choose(browser, "precision", "float")
    assert browser.run(NAMES) == ["layer4.1.conv2"]
    browser.run(TYPE.format(text="no such layer"))
    assert browser.run(NAMES) == []
    browser.run(TYPE.format(text=""))
    choose(browser, "precision", "")
    assert browser.run("document.getElementById('shown').textContent") == "22 layers"


def test_one_block_is_shown_and_boxes_open_others(browser, pages):
    browser.open(pages["ordinary"])
    visible_blocks = (
        "[...document.querySelectorAll('details.block')].filter((each) => !each.hidden).map((each) => each.id)"
    )
    assert browser.run(visible_blocks) == ["block-0"]
    choose(browser, "block", "block-2")
    assert browser.run(visible_blocks) == ["block-2"]
    browser.run("location.hash = 'block-5'; new Promise((done) => setTimeout(done, 100))")
    assert browser.run(visible_blocks) == ["block-5"]
    assert browser.run("document.getElementById('block').value") == "block-5"
    assert browser.run("document.querySelector('#block-5 svg').getBoundingClientRect().height") > 100


def test_two_thousand_layers_stay_smooth(browser, pages):
    """Rows out of sight are not laid out, and sorting makes none: that is what keeps it smooth."""
    browser.open(pages["large"])
    assert browser.run("document.querySelectorAll('#layer-table tbody tr').length") == 2000
    assert browser.run("document.getElementsByTagName('*').length") < 60_000
    last = "document.querySelector('#layer-table tbody tr:last-child')"
    assert browser.run(f"getComputedStyle({last}).contentVisibility") == "auto"
    assert browser.run(f"{last}.cells[0].checkVisibility({{contentVisibilityAuto: true}})") is False
    browser.run("window.kept = new Set(document.querySelectorAll('#layer-table tbody tr'))")
    click(browser, "SQNR dB")
    assert browser.run(f"{ROWS}.every((row) => kept.has(row))")
    choose(browser, "precision", "float")
    assert browser.run(f"{ROWS}.length") == 223
    assert browser.complaints == []


def test_a_click_copies_how_to_reproduce(browser, pages):
    browser.open(pages["ordinary"])
    browser.run("window.button = document.querySelectorAll('button.copy')[2]")
    assert browser.run("!button.hidden")
    browser.run("button.click(); new Promise((done) => setTimeout(done, 200))")
    assert browser.run("button.textContent") in ("Copied", "Selected")
    assert browser.run("getSelection().toString().trim()").startswith("import scalepoint")
    assert browser.complaints == []


def test_without_scripts_everything_is_readable(browser, pages):
    browser.open(pages["ordinary"], script=False)
    assert not browser.run("document.documentElement.classList.contains('js')")
    assert len(browser.run(NAMES)) == 22
    assert browser.run("document.querySelectorAll('details.block:not([hidden])').length") == 13
    assert browser.run("getComputedStyle(document.getElementById('filter').parentElement).display") == "none"


def test_the_page_can_be_printed(browser, pages):
    browser.open(pages["ordinary"], dark=True)
    assert browser.pdf().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    frame = "document.querySelector('.table-frame')"
    assert browser.run(f"{frame}.scrollHeight <= {frame}.clientHeight + 1")  # no row is cut off
