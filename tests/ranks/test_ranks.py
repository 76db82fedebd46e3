"""Ranks share the data and end as one process would; an error of one is the error of all; a dead one is named."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from scalepoint import distributed
from scalepoint.distributed.channel import heartbeat_timeout
from scalepoint.errors import UsageError
from tests.errors import raises
from tests.ranks.checkpoints import write_source
from tests.ranks.group import result_of, run_group, start_group
from tests.ranks.jobs import METHODS

Results = list[Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Results:
    return run_group("tests.ranks.jobs:first", 2, tmp_path_factory.mktemp("two"), "tcp")


@pytest.fixture(scope="module")
def two(done: Results) -> Results:
    return [each["calibrating"] for each in done]


@pytest.fixture(scope="module")
def met(done: Results) -> Results:
    return [each["meeting"] for each in done]


@pytest.fixture(scope="module")
def deployed(done: Results) -> Results:
    return [each["deploying"] for each in done]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_source(folder / "llama")
    return run_group("tests.ranks.checkpoints:deploying", 2, folder, "tcp")


@pytest.mark.parametrize("key", METHODS)
def test_two_ranks_give_the_parameters_of_one_to_the_last_bit(two: Results, key: str) -> None:
    for result in two:
        one, many = result["methods"][key]
        assert many == one
        assert len(one) >= 3


@pytest.mark.parametrize(
    "case", ["smooth", "migrated", "one batch", "limit", "generator", "stream", "sampler", "function",
             "function's limit", "skipped", "after"],
)  # fmt: skip
def test_two_ranks_share_every_kind_of_data_as_one_would_read_it(two: Results, case: str) -> None:
    for result in two:
        one, many = result[case]
        assert many == one


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("empty", "CalibrationError", "the data is empty: 0 batches"),
        ("shuffled", "UsageError", "this loader shuffles.*DistributedSampler"),
        ("split", "UsageError", "migrations.*need the same data on every rank"),
        ("nan", "NonFiniteError", "batch 2 of the data: "),
        ("raises", "CalibrationError", "to have 3 channels, but got 4"),
    ],
)
def test_an_error_of_one_rank_is_the_same_error_on_all(two: Results, case: str, kind: str, says: str) -> None:
    first, second = (result[case] for result in two)
    assert first == second
    assert first[0] == kind
    assert re.search(says, first[1])


def test_batches_that_were_left_out_are_told_once_by_the_first_rank(two: Results) -> None:
    first, second = (result["heard"] for result in two)
    assert [each for each in first if "2 batches contain NaN or infinity and were skipped: 2, 3" in each]
    assert len(second) < len(first)


def test_tensors_of_every_shape_reach_all_ranks(met: Results) -> None:
    expected = [
        {"a": ["torch.float32", [[], []]], "only 0": ["torch.int16", 0]},
        {"a": ["torch.float32", [[1.0], [1.0]]], "only 1": ["torch.int16", 1]},
    ]
    assert [result["gathered"] for result in met] == [expected, expected]


def test_sums_are_the_same_bits_on_all_ranks(met: Results) -> None:
    assert met[0]["sum"] == met[1]["sum"]
    assert float.fromhex(met[0]["sum"][0]) == pytest.approx(0.3)


def test_what_rank_0_finds_out_alone_is_told_to_all(met: Results) -> None:
    assert [result["told"] for result in met] == [{"rank": 0, "size": 1}] * 2


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("shapes", "RankError", "the ranks have tensors of different shapes"),
        ("other calls", "RankError", "rank 0: comparing, rank 1: calibrating"),
        ("left", "KeyError", "no such thing"),
        ("first of two", "ValueError", "at 3"),
    ],
)
def test_what_goes_wrong_between_ranks_ends_all_of_them(met: Results, case: str, kind: str, says: str) -> None:
    for result in met:
        assert result[case][0] == kind
        assert says in result[case][1]


def test_an_error_that_cannot_be_made_again_is_told_by_its_name(met: Results) -> None:
    assert met[0]["of its own kind"] == ["RankError", "StrangeError: (1, 2) [SP-R001]"]
    assert met[1]["of its own kind"][0] == "StrangeError"


def test_ranks_work_on_after_an_error(met: Results) -> None:
    assert [result["afterwards"] for result in met] == [["done", [0, 1]]] * 2


def test_two_ranks_write_the_file_of_one_byte_for_byte(deployed: Results) -> None:
    for result in deployed:
        assert result["bytes"]
        assert {"config.yaml", "float.onnx", "model.onnx", "quantized", "report.html"} <= set(result["files"])
        hidden = [name for name in result["files"] if name.startswith(".")]
        assert hidden == [".scalepoint-files.json"]  # no journal, nothing temporary


def test_every_rank_returns_what_the_first_found(deployed: Results) -> None:
    first, second = (result["done"] for result in deployed)
    assert first == second
    assert first[0] == "model.onnx"


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("again", "UsageError", "is not empty: choose another output"),
        ("strict", "CoverageError", "operations stay float"),
        ("other model", "UsageError", "rank 1 has a different model from rank 0"),
    ],
)
def test_what_one_process_refuses_all_ranks_refuse(deployed: Results, case: str, kind: str, says: str) -> None:
    first, second = (result[case] for result in deployed)
    assert first == second
    assert first[0] == kind
    assert says in first[1]


@pytest.mark.parametrize("case", ["compare", "one batch", "proxy", "alone", "metric"])
def test_errors_of_layers_are_those_of_one_process_up_to_rounding(done: Results, case: str) -> None:
    for result in done:
        for one, many in zip(*(_flat(each) for each in result["analysing"][case]), strict=True):
            assert many == (pytest.approx(one, rel=1e-9) if isinstance(one, float) else one)


def test_histograms_for_plots_count_the_values_of_all_ranks(done: Results) -> None:
    for result in done:
        one, many = result["analysing"]["histograms"]
        assert many == one
        assert {each["role"] for each in one} == {"weight", "input"}


@pytest.mark.parametrize("case", ["closed form", "gradients", "one batch", "shared outputs"])
def test_ranks_tune_as_well_as_one_process_and_all_choose_the_same_codes(done: Results, case: str) -> None:
    first, second = (result["tuning"][case] for result in done)
    assert first[1] == second[1]
    (_, level, *seen), (_, shared_level, *shared_seen) = first
    assert shared_level == pytest.approx(level, abs=0.05)  # dB
    assert shared_seen == seen
    if case == "closed form":  # on data enough
        assert shared_level > done[0]["tuning"]["nearest"] + 0.2


@pytest.mark.parametrize("case", ["resumed", "resumed by all"])
def test_what_two_ranks_tuned_one_process_and_two_go_on_from(done: Results, case: str) -> None:
    for result in done:
        many, again = result["tuning"][case]
        assert again == many


def test_a_nan_in_the_part_of_one_rank_ends_tuning_on_all(done: Results) -> None:
    first, second = (result["tuning"]["nan"] for result in done)
    assert first == second
    assert first[0] == "NonFiniteError"


@pytest.mark.slow
def test_a_failure_of_the_first_rank_ends_all_and_keeps_the_blocks_that_are_done(checkpoints: Results) -> None:
    for result in checkpoints:
        assert result["failed"] == ["RuntimeError", "no more"]
        assert result["left"] == [".out.work", "llama"]


@pytest.mark.slow
def test_they_go_on_and_all_return_what_the_first_found(checkpoints: Results) -> None:
    first, second = (result["resumed"] for result in checkpoints)
    assert first == second
    assert len(first[3]) == 14
    assert {rows for _, _, rows in first[3]} == {13 * 32}  # those of all ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("short", "CalibrationError", "less than one sequence of 1000000"),
        ("other", "UsageError", "rank 1 has a different checkpoint from rank 0"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(checkpoints: Results, case: str, kind: str, says: str) -> None:
    for result in checkpoints:
        assert result[case][0] == kind
        assert re.search(says, result[case][1])


@pytest.mark.slow
def test_nothing_is_left_of_the_work(checkpoints: Results) -> None:
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
        assert result["files"] == [".lock", "onnxruntime", "reference", "sweep.html", "sweep.json"]


def _flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, list) else [value]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "dies"), [("file", 1), ("tcp", 0)])
def test_a_killed_rank_ends_the_others_in_time_and_is_named(tmp_path: Path, store: str, dies: int) -> None:
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
    named = "rank 1 of 2 sent no heartbeat" if dies else "its process (rank 0 or torchrun) has exited"
    assert named in message


def test_a_first_rank_that_is_interrupted_in_a_meeting_tells_the_others(tmp_path: Path) -> None:
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


def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("SCALEPOINT_RANK_TIMEOUT", "soon")
    with raises(UsageError, "SCALEPOINT_RANK_TIMEOUT='soon'", "seconds"):
        heartbeat_timeout()
