"""The reader against the onnx package's own tests: right or refused by name, never wrong."""

from collections import Counter

import pytest

from tests.onnx_reader.node_cases import collect_cases, run_case


@pytest.fixture(scope="module")
def outcomes():
    return [run_case(case) for case in collect_cases()]


def test_no_node_test_is_wrong_and_no_exception_is_foreign(outcomes):
    assert [outcome for outcome in outcomes if outcome.kind in ("wrong", "foreign")] == []


def test_at_least_1590_node_tests_are_right(outcomes):
    assert Counter(outcome.kind for outcome in outcomes)["right"] >= 1590


def test_a_refusal_names_the_operator_that_is_not_supported(outcomes):
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    assert len(refused) > 280
    by_opset = [outcome.name for outcome in refused if "has opset 1;" in outcome.message]
    assert by_opset == ["test_not_2d", "test_not_3d", "test_not_4d"]  # the operators themselves are supported
    for outcome in refused:
        # the refused operator of a Loop may be in its body, and an expanded case has others than its name says
        if outcome.name not in by_opset and outcome.operator != "Loop" and "_expanded" not in outcome.name:
            assert outcome.operator in outcome.message, outcome
