"""Quantization-aware training over two ranks is that of one process with the whole batch: DDP and FSDP2."""

from typing import Any

import pytest

from tests.ranks.group import run_group

WAYS = ("DDP", "FSDP2")
KINDS = ("observed", "learned")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> list[Any]:
    return run_group("tests.ranks.training:training", 2, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process_with_the_whole_batch(done: list[Any], kind: str, way: str) -> None:
    for result in done:
        one, many = result[f"{kind} by one"][0], result[f"{kind} by {way}"][0]
        assert many == pytest.approx(one, rel=1e-4)
        assert one[-1] != pytest.approx(one[0], rel=1e-2)  # it does learn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_the_same_on_all_ranks_and_those_of_one_process(done: list[Any], kind: str, way: str) -> None:
    first, second = (result[f"{kind} by {way}"][1] for result in done)
    assert first == second
    for name, one in done[0][f"{kind} by one"][1].items():
        assert first[name] == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_is_saved_whole_and_loads_into_a_plain_one_bit_for_bit(done: list[Any], kind: str) -> None:
    for result in done:
        assert result[f"{kind} saved"] == [True, True]


def test_a_nan_in_the_part_of_one_rank_is_an_error_on_both(done: list[Any]) -> None:
    first, second = (result["nan"] for result in done)
    assert (first[0], second[0]) == ("NonFiniteError", "NonFiniteError")
    assert "some on another rank, none here" in first[1]
    assert "1 NaN" in second[1]


def test_calibration_after_training_shares_batches_again(done: list[Any]) -> None:
    first, second = (result["calibrated again"] for result in done)
    assert first == second
