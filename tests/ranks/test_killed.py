"""A rank is killed in a phase of deploy.

The other ranks exit in time, no file is incomplete, and resume completes with any number of ranks. Also tests the
command under torchrun.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalepoint.support.files import TEMPORARY_PREFIX
from tests.ranks.group import ROOT, result_of, run_group, start_group

NETS = """
import os, signal
from tests.ranks.jobs import batches, net

def model():
    return net(), batches(1)[0]

def data():
    return batches(5)

def fatal():
    for index, batch in enumerate(batches(5)):
        if index == 3 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
"""
PHASES = ("calibrate", "tune", "export", "verify", "build_report")
DEFAULT = [("calibrate", 1)]


@pytest.mark.parametrize(
    ("step", "dies"),
    [
        pytest.param(step, dies, marks=() if (step, dies) in DEFAULT else pytest.mark.slow)
        for step in PHASES
        for dies in (0, 1)
        if dies == 0 or step in ("calibrate", "tune")  # the other steps run on rank 0 only
    ],
)
def test_resume_with_another_number_of_ranks_completes_the_run_of_a_killed_rank(
    tmp_path: Path, step: str, dies: int
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    group = start_group(
        "tests.ranks.jobs:killed", 2, first, STEP=step, DIES=str(dies), RESUME="no", SCALEPOINT_RANK_TIMEOUT="3"
    )
    assert group[dies].wait(timeout=120) == -9
    group[1 - dies].wait(timeout=60)  # the timeout of 3 s, and the time to exit
    kind, message = result_of(first, 1 - dies)
    assert kind == "RankError"
    assert f"rank {dies} of 2 sent no heartbeat" in message
    if step != "build_report":  # the file is complete before this step
        assert not (first / "out" / "model.onnx").exists()
    assert not [path for path in first.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]
    for leftover in (*first.glob("result-*"), first / "store"):
        leftover.unlink(missing_ok=True)
    resumed = run_group("tests.ranks.jobs:killed", 1, first, STEP="", DIES="0", RESUME="yes", ACCURACY=step)
    assert resumed == [["done", "model.onnx"]]
    assert not (first / "out" / ".scalepoint").exists()


def _torchrun(folder: Path, *arguments: str, ranks: int = 2, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "nets.py").write_text(NETS)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), str(folder)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SCALEPOINT_RANK_TIMEOUT": "30"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += ["--max-restarts", str(restarts), "-m", "scalepoint", "deploy", "nets:model", "--trust", *arguments]
    return subprocess.run(command, check=False, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_under_torchrun_only_rank_0_prints(tmp_path: Path) -> None:
    process = _torchrun(tmp_path, "--data", "nets:data", "-o", "out", "--json", "--allow-departure")
    assert process.returncode == 0, process.stderr[-3000:]
    document = json.loads(process.stdout)  # a single document
    assert document["exit_code"] == 0
    assert process.stderr.count("calibrating: 3 batches in") == 1  # rank 0 has 3 of 5
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert (tmp_path / "out" / "config.yaml").is_file()


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes_the_run(tmp_path: Path) -> None:
    process = _torchrun(tmp_path, "--data", "nets:fatal", "-o", "out", "--allow-departure", restarts=1)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "out" / "model.onnx").is_file()


@pytest.mark.slow
def test_a_usage_error_is_printed_once_under_torchrun(tmp_path: Path) -> None:
    process = _torchrun(tmp_path, "--data", "nets:data", "-o", "out", "--target", "nowhere")
    assert process.returncode != 0
    assert process.stderr.count("no target 'nowhere'") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_four_ranks_write_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    for result in run_group("tests.ranks.jobs:deploying", 4, tmp_path):
        assert result["bytes"]
