"""deploy_checkpoint over two ranks: equal or equally good weights, and resume after a killed rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalepoint.support.files import TEMPORARY_PREFIX
from tests.ranks.checkpoints import write_source
from tests.ranks.group import ROOT, result_of, run_group, start_group

DRIVER = """
import os, sys
from scalepoint.cli.app import run
from scalepoint.tuning.checkpoint import Checkpoint
from tests.ranks.checkpoints import kill_at_call

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    kill_at_call(Checkpoint, "store_piece")
sys.exit(run(sys.argv[1:]))
"""

CONFIG = "{model: llama, target: compressed-tensors, data: llama/calibration.txt, length: 32, output: out}"


@pytest.mark.slow
def test_checkpoints_of_two_ranks_equal_those_of_one_process_or_are_as_good(tmp_path: Path) -> None:
    write_source(tmp_path / "llama")
    for result in run_group("tests.ranks.checkpoints:comparing", 2, tmp_path, "tcp"):
        for case in ("rounded", "observed", "few"):
            one, many, is_same = result[case]
            assert many == one
            assert is_same
        one, many, _ = result["tuned"]
        assert many[1] == pytest.approx(one[1], rel=1e-3)
        assert [name for name, _, _ in many[3]] == [name for name, _, _ in one[3]]
        assert result["resumed"] == many
        assert result["same bytes"]
        assert result["resumed by one"][1] == pytest.approx(many[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "dies"),
    [("store_piece", 0), ("store_piece", 1), ("score_checkpoint", 0), ("score_checkpoint", 1), ("TunedCodes", 0)],
)
def test_one_process_resumes_the_run_of_a_killed_rank(tmp_path: Path, step: str, dies: int) -> None:
    write_source(tmp_path / "llama")
    job, limit = "tests.ranks.checkpoints:killed", {"SCALEPOINT_RANK_TIMEOUT": "3"}
    ranks = start_group(job, 2, tmp_path, STEP=step, DIES=str(dies), **limit)
    assert ranks[dies].wait(timeout=300) == -9
    ranks[1 - dies].wait(timeout=60)  # the timeout of 3 s, and the time to exit
    kind, message = result_of(tmp_path, 1 - dies)
    assert kind == "RankError"
    assert f"rank {dies} of 2 sent no heartbeat" in message
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]
    for leftover in (*tmp_path.glob("result-*"), tmp_path / "store"):
        leftover.unlink(missing_ok=True)
    ((outcome, _),) = run_group(job, 1, tmp_path, STEP="", DIES="0")
    assert outcome == "done"
    assert (tmp_path / "out").is_dir()
    assert not (tmp_path / ".out.work").exists()


@pytest.mark.slow
def test_a_restart_by_torchrun_keeps_finished_blocks(tmp_path: Path) -> None:
    write_source(tmp_path / "llama")
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "config.yaml").write_text(CONFIG)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SCALEPOINT_RANK_TIMEOUT": "30"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts"]
    command += ["1", "driver.py", "deploy", "-c", "config.yaml"]
    process = subprocess.run(command, check=False, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "out" / "report.json").is_file()
    assert not (tmp_path / ".out.work").exists()
    assert process.stdout.count("written: out") == 1  # by rank 0 only
    assert "starting from the beginning" not in process.stderr
