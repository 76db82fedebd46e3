"""Quantization-aware training over two ranks (DDP, FSDP2) equals training in one process with the full batch."""

from typing import Any

import pytest

from tests.ranks.group import run_group

METHODS = ("DDP", "FSDP2")
KINDS = ("observed", "learned")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[Any]:
    return run_group("tests.ranks.training:training", 2, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_those_of_one_process_with_the_full_batch(results: list[Any], kind: str, method: str) -> None:
    for result in results:
        one, many = result[f"{kind} by one"][0], result[f"{kind} by {method}"][0]
        assert many == pytest.approx(one, rel=1e-4)
        assert one[-1] != pytest.approx(one[0], rel=1e-2)  # the loss changes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_equal_on_all_ranks_and_in_one_process(results: list[Any], kind: str, method: str) -> None:
    first, second = (result[f"{kind} by {method}"][1] for result in results)
    assert first == second
    for name, one in results[0][f"{kind} by one"][1].items():
        assert first[name] == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_is_saved_completely_and_loads_bit_for_bit(results: list[Any], kind: str) -> None:
    for result in results:
        assert result[f"{kind} saved"] == [True, True]


def test_a_nan_in_the_part_of_one_rank_is_an_error_on_both(results: list[Any]) -> None:
    first, second = (result["nan"] for result in results)
    assert (first[0], second[0]) == ("NonFiniteError", "NonFiniteError")
    assert "some on another rank, none here" in first[1]
    assert "1 NaN" in second[1]


def test_calibration_after_training_shares_batches_again(results: list[Any]) -> None:
    first, second = (result["calibrated again"] for result in results)
    assert first == second
