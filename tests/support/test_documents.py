"""Texts from outside: limits, duplicates, truncation."""

import pytest

from scalepoint.errors import DocumentError
from scalepoint.spec import QuantizationSpec
from scalepoint.support.documents import MAX_BYTES, DocumentPositions, dump_yaml, parse_json, parse_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

DOUBLING = "float_range:\n- &a0 [1, 1]\n" + "".join(f"- &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 32))


def test_plain_values_come_through():
    value = {"name": "é", "list": [1, 2.5, None, True], "nested": {"a": {"b": "c"}}}
    assert parse_yaml(dump_yaml(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases"),
        ("[" * 100, "nested deeper"),
        ("a: 1\nb: 2\na: 3", "duplicate key 'a' at line 3"),
        ("a: [1, 2", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("x" * (MAX_BYTES + 1), "at most"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        (DOUBLING, "after expanding aliases"),
        ("a: &a [*a]", "contains itself"),
        ("a: 2001-99-99", "not valid YAML"),
        (f"a: {'9' * 5000}", "not valid YAML"),
    ],
    ids=[
        "bomb",
        "depth",
        "duplicate",
        "truncated",
        "tag",
        "size",
        "two documents",
        "doubling",
        "cycle",
        "date",
        "digits",
    ],
)
def test_a_yaml_that_is_broken_or_dangerous_is_refused(text, message):
    with pytest.raises(DocumentError, match=message):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text",
    ["{", "", "{'a': 1}", "[" * 100_000, '{"a": 1, "a": 2}', "9" * 5000, None],
    ids=["open", "empty", "quotes", "depth", "duplicate", "digits", "no text"],
)
def test_a_json_that_is_broken_is_refused(text):
    with pytest.raises(DocumentError, match=r"not valid JSON|duplicate key|must be a text|5000 digits"):
        parse_json(text)


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_spec_truncated_at_any_byte_is_an_error_or_a_spec(form):
    text = QuantizationSpec().to_json() if form == "json" else QuantizationSpec().to_yaml()
    read = QuantizationSpec.from_json if form == "json" else QuantizationSpec.from_yaml
    outcomes = set()
    for end in range(len(text) - 1):
        try:
            outcomes.add(type(read(text[:end])).__name__)
        except ValueError:
            outcomes.add("error")
    assert "error" in outcomes
    assert outcomes <= {"error", "QuantizationSpec"}


@pytest.mark.parametrize(
    ("text", "path", "of_key", "position"),
    [
        ("a: 1\nb:\n  - c: 2\n", ("b", 0, "c"), False, (3, 8)),
        ("a: 1\nb:\n  - c: 2\n", ("b", 0, "c"), True, (3, 5)),
        ("a: 1\nb:\n  - c: 2\n", ("b", 0, "d"), True, (3, 5)),  # not there: what is around it
        ('{\n\t"a": {\n\t\t"b": 1}}', ("a", "b"), False, (3, 8)),
        ("a: 1", (), False, (1, 1)),
        ("a: [", ("a",), False, None),
        ("", ("a",), False, None),
    ],
)
def test_a_key_or_value_is_found_in_its_text(text, path, of_key, position):
    assert DocumentPositions(text).of(path, of_key=of_key) == position


def test_yaml_has_a_key_on_each_line_and_innermost_lists_on_one() -> None:
    value = {"mean": [0.5, 0.25], "quantization": {"weight": {"n_bits": 8}, "leave": []}}
    assert dump_yaml(value) == "mean: [0.5, 0.25]\nquantization:\n  weight: {n_bits: 8}\n  leave: []\n"
