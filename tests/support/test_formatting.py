"""Formatting of numbers and of untrusted text, which must not control a terminal."""

import ast
import math
from pathlib import Path

import pytest

from scalepoint.patterns.plan import TransformationPlan
from scalepoint.support.formatting import escape_unprintable, format_ratio, format_two_times, shorten, to_one_line

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))


@pytest.mark.parametrize(
    ("text", "escaped"),
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
def test_only_control_characters_are_escaped(text, escaped):
    assert escape_unprintable(text) == escaped
    assert to_one_line(text) == escaped.replace("\n", "\\n").replace("\t", "\\t")


def test_a_shortened_name_keeps_both_ends_and_is_one_line():
    assert shorten("ab\n" * 100, 12) == "ab\\...\\nab\\n"
    assert len(shorten("\x1b" * 10_000, 96)) == 96


def test_markup_in_names_is_not_interpreted():
    class Match:
        name, roles, apply, reason = "[bold]layer[/]\x1b[31m", ("conv",), True, "[red]"
        pattern = type("Pattern", (), {"name": "P"})

    cells = [column._cells[0].plain for column in TransformationPlan(None, [Match()]).table().columns]
    assert cells == ["[bold]layer[/]\\x1b[31m", "P", "conv", "yes", "[red]"]


def called_names(path: Path) -> set[str]:
    names = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "") for name in names}


def test_text_is_escaped_in_one_module_only():
    assert [path.name for path in SOURCES if "isprintable" in called_names(path)] == ["formatting.py"]


def test_dataclasses_are_converted_by_to_jsonable_only():
    assert [path.name for path in SOURCES if "asdict" in called_names(path)] == []


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
def test_two_times_have_enough_digits_to_differ(first, second, expected):
    assert format_two_times(first, second) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.946, "3.94x"), (0.9999, "0.99x"), (math.nan, "not a number"), (math.inf, "infx"), (1e308, "1e+308x")],
)
def test_any_ratio_can_be_formatted(value: float, text: str) -> None:
    assert format_ratio(value) == text
