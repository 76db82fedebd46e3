"""The reader against the onnx package's own tests: right or refused by name, never wrong."""

from collections import Counter

import pytest

from tests.onnx_reader.node_cases import collect_cases, run_case

REFUSED_OPERATORS = ("NonMaxSuppression", "ImageDecoder", "TfIdfVectorizer", "DeformConv")


@pytest.fixture(scope="module")
def outcomes():
    return [run_case(case) for case in collect_cases()]


def test_no_node_test_is_wrong_and_no_exception_is_foreign(outcomes):
    assert [outcome for outcome in outcomes if outcome.kind in ("wrong", "foreign")] == []


def test_at_least_1550_node_tests_are_right(outcomes):
    assert Counter(outcome.kind for outcome in outcomes)["right"] >= 1550


def test_a_refusal_names_the_operator_and_the_node(outcomes):
    messages = [outcome.message for outcome in outcomes if outcome.operator in REFUSED_OPERATORS]
    assert len(messages) > 20
    for outcome in outcomes:
        if outcome.operator in REFUSED_OPERATORS:
            assert outcome.operator in outcome.message
            assert "node" in outcome.message or "STRING" in outcome.message
