"""Text from models and files as it is shown: nothing in it steers a terminal, and there is one way to do so."""

import ast
import math
from pathlib import Path

import pytest

from scalepoint.patterns.plan import TransformationPlan
from scalepoint.support.formatting import escape_unprintable, format_ratio, format_two_times, shorten, to_one_line

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layer1.0.conv", "layer1.0.conv"),
        ("straße 層 é", "straße 層 é"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u202eb", "a\\u202eb"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("lone \ud800", "lone \\ud800"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("\U000e0041tag", "\\U000e0041tag"),
        ("two\nlines\tand tab", "two\nlines\tand tab"),
        (ValueError("a\rb"), "a\\rb"),
    ],
    ids=ascii,
)
def test_what_steers_a_terminal_is_an_escape_and_the_rest_stays(text, shown):
    assert escape_unprintable(text) == shown
    assert to_one_line(text) == shown.replace("\n", "\\n").replace("\t", "\\t")


def test_a_short_name_keeps_both_ends_and_is_one_line():
    assert shorten("ab\n" * 100, 12) == "ab\\...\\nab\\n"
    assert len(shorten("\x1b" * 10_000, 96)) == 96


def test_a_table_of_names_shows_markup_as_it_is():
    class Match:
        name, roles, apply, reason = "[bold]layer[/]\x1b[31m", ("conv",), True, "[red]"
        pattern = type("Pattern", (), {"name": "P"})

    cells = [column._cells[0].plain for column in TransformationPlan(None, [Match()]).table().columns]
    assert cells == ["[bold]layer[/]\\x1b[31m", "P", "conv", "yes", "[red]"]


def calls_of(path: Path) -> set[str]:
    names = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "") for name in names}


def test_text_is_made_visible_in_one_place():
    assert [path.name for path in SOURCES if "isprintable" in calls_of(path)] == ["formatting.py"]


def test_dataclasses_become_documents_by_plain_alone():
    assert [path.name for path in SOURCES if "asdict" in calls_of(path)] == []


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.2e-6, 1.4e-6, ("1.2 us", "1.4 us")),
        (18e-6, 25e-6, ("18 us", "25 us")),
        (1.001e-6, 1.002e-6, ("1.001 us", "1.002 us")),
        (0.5, 0.5001, ("500.0 ms", "500.1 ms")),
        (3e-6, 3e-6, ("3 us", "3 us")),
    ],
)
def test_two_times_have_the_digits_that_tell_them_apart(first, second, expected):
    assert format_two_times(first, second) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.946, "3.94x"), (0.9999, "0.99x"), (math.nan, "not a number"), (math.inf, "infx"), (1e308, "1e+308x")],
)
def test_a_ratio_is_shown_whatever_it_is(value: float, text: str) -> None:
    assert format_ratio(value) == text
