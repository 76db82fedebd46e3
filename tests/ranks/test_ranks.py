"""Ranks share the data and get the results of one process. An error of one rank is raised on all ranks."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from scalepoint import distributed
from scalepoint.distributed.heartbeats import heartbeat_timeout
from scalepoint.errors import UsageError
from tests.errors import raises
from tests.ranks.checkpoints import write_source
from tests.ranks.group import result_of, run_group, start_group
from tests.ranks.jobs import METHODS

Results = list[Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return run_group("tests.ranks.jobs:first", 2, tmp_path_factory.mktemp("two"), "tcp")


@pytest.fixture(scope="module")
def calibration(results: Results) -> Results:
    return [result["calibrating"] for result in results]


@pytest.fixture(scope="module")
def functions(results: Results) -> Results:
    return [result["meeting"] for result in results]


@pytest.fixture(scope="module")
def deployed(results: Results) -> Results:
    return [result["deploying"] for result in results]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_source(folder / "llama")
    return run_group("tests.ranks.checkpoints:deploying", 2, folder, "tcp")


@pytest.mark.parametrize("key", METHODS)
def test_two_ranks_give_the_parameters_of_one_to_the_last_bit(calibration: Results, key: str) -> None:
    for result in calibration:
        one, many = result["methods"][key]
        assert many == one
        assert len(one) >= 3


@pytest.mark.parametrize(
    "case", ["smooth", "migrated", "one batch", "limit", "generator", "stream", "sampler", "function",
             "function's limit", "skipped", "after"],
)  # fmt: skip
def test_two_ranks_share_every_kind_of_data(calibration: Results, case: str) -> None:
    for result in calibration:
        one, many = result[case]
        assert many == one


@pytest.mark.parametrize(
    ("case", "kind", "message_pattern"),
    [
        ("empty", "CalibrationError", "the data is empty: 0 batches"),
        ("shuffled", "UsageError", "this loader shuffles.*DistributedSampler"),
        ("split", "UsageError", "migrations.*need the same data on every rank"),
        ("nan", "NonFiniteError", "batch 2 of the data: "),
        ("raises", "CalibrationError", "to have 3 channels, but got 4"),
    ],
)
def test_an_error_of_one_rank_is_the_same_error_on_all(
    calibration: Results, case: str, kind: str, message_pattern: str
) -> None:
    first, second = (result[case] for result in calibration)
    assert first == second
    assert first[0] == kind
    assert re.search(message_pattern, first[1])


def test_skipped_batches_are_reported_once_by_rank_0(calibration: Results) -> None:
    first, second = (result["warnings"] for result in calibration)
    assert [line for line in first if "2 batches contain NaN or infinity and were skipped: 2, 3" in line]
    assert len(second) < len(first)


def test_tensors_of_every_shape_reach_all_ranks(functions: Results) -> None:
    expected = [
        {"a": ["torch.float32", [[], []]], "only 0": ["torch.int16", 0]},
        {"a": ["torch.float32", [[1.0], [1.0]]], "only 1": ["torch.int16", 1]},
    ]
    assert [result["gathered"] for result in functions] == [expected, expected]


def test_sums_are_the_same_bits_on_all_ranks(functions: Results) -> None:
    assert functions[0]["sum"] == functions[1]["sum"]
    assert float.fromhex(functions[0]["sum"][0]) == pytest.approx(0.3)


def test_the_result_of_run_on_main_reaches_all_ranks(functions: Results) -> None:
    assert [result["on main"] for result in functions] == [{"rank": 0, "size": 1}] * 2


@pytest.mark.parametrize(
    ("case", "kind", "message_pattern"),
    [
        ("shapes", "RankError", "the ranks have tensors of different shapes"),
        ("other calls", "RankError", "rank 0: comparing, rank 1: calibrating"),
        ("left", "KeyError", "no such thing"),
        ("first of two", "ValueError", "at 3"),
    ],
)
def test_an_error_between_ranks_is_raised_on_all(
    functions: Results, case: str, kind: str, message_pattern: str
) -> None:
    for result in functions:
        assert result[case][0] == kind
        assert message_pattern in result[case][1]


def test_an_error_of_an_unknown_class_becomes_a_rank_error_with_its_name(functions: Results) -> None:
    assert functions[0]["of its own kind"] == ["RankError", "StrangeError: (1, 2) [SP-R001]"]
    assert functions[1]["of its own kind"][0] == "StrangeError"


def test_ranks_continue_after_an_error(functions: Results) -> None:
    assert [result["afterwards"] for result in functions] == [["done", [0, 1]]] * 2


def test_two_ranks_write_the_same_bytes_as_one_process(deployed: Results) -> None:
    for result in deployed:
        assert result["bytes"]
        assert {"config.yaml", "float.onnx", "model.onnx", "quantized", "report.html"} <= set(result["files"])
        hidden = [name for name in result["files"] if name.startswith(".")]
        assert hidden == [".scalepoint-files.json"]  # no cache and no temporary files


def test_every_rank_returns_the_result_of_rank_0(deployed: Results) -> None:
    first, second = (result["done"] for result in deployed)
    assert first == second
    assert first[0] == "model.onnx"


@pytest.mark.parametrize(
    ("case", "kind", "message_pattern"),
    [
        ("again", "UsageError", "is not empty: choose another output"),
        ("strict", "CoverageError", "operations stay float"),
        ("other model", "UsageError", "rank 1 has a different model from rank 0"),
    ],
)
def test_an_error_of_one_process_is_raised_on_all_ranks(
    deployed: Results, case: str, kind: str, message_pattern: str
) -> None:
    first, second = (result[case] for result in deployed)
    assert first == second
    assert first[0] == kind
    assert message_pattern in first[1]


@pytest.mark.parametrize("case", ["compare", "one batch", "proxy", "alone", "metric"])
def test_errors_of_layers_equal_those_of_one_process_up_to_rounding(results: Results, case: str) -> None:
    for result in results:
        for one, many in zip(*(_flat(values) for values in result["analysing"][case]), strict=True):
            assert many == (pytest.approx(one, rel=1e-9) if isinstance(one, float) else one)


def test_histograms_for_plots_count_the_values_of_all_ranks(results: Results) -> None:
    for result in results:
        one, many = result["analysing"]["histograms"]
        assert many == one
        assert {histogram["role"] for histogram in one} == {"weight", "input"}


@pytest.mark.parametrize("case", ["closed form", "gradients", "one batch", "shared outputs"])
def test_ranks_tune_as_well_as_one_process_and_all_choose_the_same_codes(results: Results, case: str) -> None:
    first, second = (result["tuning"][case] for result in results)
    assert first[1] == second[1]
    (_, sqnr, *counts), (_, shared_sqnr, *shared_counts) = first
    assert shared_sqnr == pytest.approx(sqnr, abs=0.05)  # dB
    assert shared_counts == counts
    if case == "closed form":  # there is enough data
        assert shared_sqnr > results[0]["tuning"]["nearest"] + 0.2


@pytest.mark.parametrize("case", ["resumed", "resumed by all"])
def test_tuning_of_two_ranks_is_resumed_by_one_process_and_by_two(results: Results, case: str) -> None:
    for result in results:
        many, again = result["tuning"][case]
        assert again == many


def test_a_nan_in_the_part_of_one_rank_ends_tuning_on_all(results: Results) -> None:
    first, second = (result["tuning"]["nan"] for result in results)
    assert first == second
    assert first[0] == "NonFiniteError"


@pytest.mark.slow
def test_a_failure_of_rank_0_ends_all_and_keeps_finished_blocks(checkpoints: Results) -> None:
    for result in checkpoints:
        assert result["failed"] == ["RuntimeError", "no more"]
        assert result["left"] == [".out.work", "llama"]


@pytest.mark.slow
def test_resumed_ranks_all_return_the_result_of_rank_0(checkpoints: Results) -> None:
    first, second = (result["resumed"] for result in checkpoints)
    assert first == second
    assert len(first[3]) == 14
    assert {rows for _, _, rows in first[3]} == {13 * 32}  # rows of all ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "message_pattern"),
    [
        ("short", "CalibrationError", "less than one sequence of 1000000"),
        ("other", "UsageError", "rank 1 has a different checkpoint from rank 0"),
    ],
)
def test_invalid_inputs_are_an_error_on_all_ranks(
    checkpoints: Results, case: str, kind: str, message_pattern: str
) -> None:
    for result in checkpoints:
        assert result[case][0] == kind
        assert re.search(message_pattern, result[case][1])


@pytest.mark.slow
def test_temporary_files_are_deleted(checkpoints: Results) -> None:
    for result in checkpoints:
        assert result["all"] == ["llama", "out"]


@pytest.mark.slow
def test_budgets_trials_and_sweeps_end_as_in_one_process(tmp_path: Path) -> None:
    for result in run_group("tests.ranks.jobs:searching", 2, tmp_path):
        for case in ("budget", "drop", "sweep"):
            one, many = result[case]
            assert many == one
        assert set(result["budget"][0][1].values()) == {"int4", "int8"}
        assert len(result["drop"][0][0]) == 2
        assert [status for _, status, _ in result["sweep"][0]] == ["done", "failed", "done"]
        assert "is not empty: continue with resume=True" in result["again"][1]
        assert result["resumed"] == result["sweep"][0]
        assert result["split"][0] == "UsageError"
        assert result["files"] == [".scalepoint-files.json", "config1", "config3", "sweep.html", "sweep.json"]


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "dies"), [("file", 1), ("tcp", 0)])
def test_the_other_ranks_name_a_killed_rank_within_the_timeout(tmp_path: Path, store: str, dies: int) -> None:
    group = start_group("tests.ranks.jobs:dying", 2, tmp_path, store, DIES=str(dies), SCALEPOINT_RANK_TIMEOUT="3")
    group[dies].wait(timeout=120)
    died = time.monotonic()
    other = 1 - dies
    while not (tmp_path / f"result-{other}.json").exists() and time.monotonic() < died + 60:
        time.sleep(0.05)
    group[other].kill()
    group[other].wait()
    assert group[dies].returncode == -9
    kind, message = result_of(tmp_path, other)
    assert kind == "RankError"
    expected = "rank 1 of 2 sent no heartbeat" if dies else "its process (rank 0 or torchrun) has exited"
    assert expected in message


def test_an_interrupt_of_rank_0_inside_a_phase_is_an_error_on_the_others(tmp_path: Path) -> None:
    _, (kind, message) = run_group("tests.ranks.jobs:interrupted", 2, tmp_path, SCALEPOINT_RANK_TIMEOUT="20")
    assert kind == "RankError"
    assert "KeyboardInterrupt" in message


def test_without_a_group_there_is_one_rank() -> None:
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    with distributed.participating(), distributed.phase("alone") as step:
        step.value = 3
    assert step.values == [3]


def test_interleaved_shards_are_in_the_order_of_the_data() -> None:
    items = [0, 1, None, 3, 4]
    assert distributed.interleave([items[rank::3] for rank in range(3)]) == items
    assert distributed.interleave([[], []]) == []


def test_rows_of_batches_are_numbered_over_all_ranks() -> None:
    assert distributed.batch_offsets([[2, 3], [4]]) == ([0, 6], 9)  # rank 0 has the first and the third batch
    assert distributed.batch_offsets([[], [5]]) == ([], 5)


def test_a_timeout_that_is_not_a_number_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("SCALEPOINT_RANK_TIMEOUT", "soon")
    with raises(UsageError, "SCALEPOINT_RANK_TIMEOUT='soon'", "seconds"):
        heartbeat_timeout()
