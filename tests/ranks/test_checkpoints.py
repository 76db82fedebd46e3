"""deploy_checkpoint over two ranks: the weights that one process writes, or as good; a run that failed goes on."""

import re
from pathlib import Path
from typing import Any

import pytest

from scalepoint.files import TEMPORARY
from tests.language.conftest import WORDS, text, write_llama, write_tokenizer
from tests.ranks.group import result_of, run_group, start_group

Results = list[Any]


def write_source(source: Path) -> None:
    source.mkdir()
    tokens = write_tokenizer(source).encode(text(400))
    write_llama(source, tokens, words=WORDS, steps=5)


def group(job: str, folder: Path) -> Results:
    write_source(folder / "llama")
    return run_group(f"tests.ranks.checkpoints:{job}", 2, folder, "tcp")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Results:
    return group("deploying", tmp_path_factory.mktemp("checkpoints"))


def test_a_failure_of_the_first_rank_ends_all_and_keeps_the_blocks_that_are_done(done: Results) -> None:
    for result in done:
        assert result["failed"] == ["RuntimeError", "no more"]
        assert result["left"] == [".out.work", "llama"]


def test_they_go_on_and_all_return_what_the_first_found(done: Results) -> None:
    first, second = (result["resumed"] for result in done)
    assert first == second
    assert len(first[3]) == 14
    assert {rows for _, _, rows in first[3]} == {13 * 32}  # those of all ranks


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("short", "CalibrationError", "less than one sequence of 1000000"),
        ("other", "UsageError", "rank 1 has another checkpoint than rank 0"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(done: Results, case: str, kind: str, says: str) -> None:
    for result in done:
        assert result[case][0] == kind
        assert re.search(says, result[case][1])


def test_nothing_is_left_of_the_work(done: Results) -> None:
    for result in done:
        assert result["all"] == ["llama", "out"]


@pytest.mark.slow
def test_checkpoints_over_ranks_are_those_of_one_process_or_as_good(tmp_path: Path) -> None:
    for result in group("further", tmp_path):
        for case in ("rounded", "observed", "few"):
            one, many, is_same = result[case]
            assert many == one
            assert is_same
        for case in ("tuned", "best"):
            one, many, _ = result[case]
            assert many[1] == pytest.approx(one[1], rel=1e-3)
            assert [name for name, _, _ in many[3]] == [name for name, _, _ in one[3]]
        assert result["proven"][1] > 1
        many = result["tuned"][1]
        assert result["resumed"] == many
        assert result["same bytes"]
        assert result["resumed by one"][1] == pytest.approx(many[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "dies"), [("keep", 0), ("keep", 1), ("scored", 0), ("scored", 1), ("Codes", 0)])
def test_a_killed_rank_ends_the_other_and_one_process_goes_on(tmp_path: Path, step: str, dies: int) -> None:
    write_source(tmp_path / "llama")
    job, limit = "tests.ranks.checkpoints:killed", {"SCALEPOINT_RANK_TIMEOUT": "3"}
    ranks = start_group(job, 2, tmp_path, STEP=step, DIES=str(dies), **limit)
    assert ranks[dies].wait(timeout=300) == -9
    ranks[1 - dies].wait(timeout=60)  # the stated 3 s, and what the process takes to end
    kind, message = result_of(tmp_path, 1 - dies)
    assert kind == "RankError"
    assert f"rank {dies} of 2 gave no sign of life" in message
    assert not (tmp_path / "out").exists()
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith(TEMPORARY)]
    for left in (*tmp_path.glob("result-*"), tmp_path / "store"):
        left.unlink(missing_ok=True)
    ((how, _),) = run_group(job, 1, tmp_path, STEP="", DIES="0")
    assert how == "done"
    assert (tmp_path / "out").is_dir()
    assert not (tmp_path / ".out.work").exists()
