"""The output folder of deploy: links are refused, other people's files stay, what earlier runs left goes."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import scalepoint
from scalepoint.errors import StoreError, UsageError
from scalepoint.pipeline import stages
from scalepoint.support.files import TemporaryFolder
from tests.warm import warm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
DATA = [torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)]
LIST = ".scalepoint-files.json"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def deployed(output, **more):
    return scalepoint.deploy(net(), DATA[0], DATA, output=output, **{"smoke": True, "progress": False, **more})


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A folder that a smoke run has filled."""
    folder = tmp_path_factory.mktemp("made") / "out"
    return deployed(folder, max_batches=7, max_trials=5), folder


@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}], ids=str)
@pytest.mark.parametrize(
    "name", [".scalepoint", "quantized", "failing", "model.onnx", "report.html", LIST, ".scalepoint/.lock",
             ".scalepoint/trial-0", "quantized/scalepoint.json"]
)  # fmt: skip
def test_a_link_is_refused_before_any_work(tmp_path, name, options):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (elsewhere / ".tmp-mine").write_text("mine")
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="symbolic link"):
        deployed(tmp_path / "out", **options)
    assert set(contents(elsewhere)) == {"mine", ".tmp-mine"}
    assert link.is_symlink()


def test_an_output_that_is_a_link_to_a_folder_is_written_to(tmp_path, finished_run):
    shutil.copytree(finished_run[1], tmp_path / "disk")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    deployed(tmp_path / "out", force=True)
    assert (tmp_path / "out").is_symlink()
    assert set(contents(tmp_path / "disk")) == set(contents(finished_run[1]))


def test_foreign_files_are_not_deleted(tmp_path):
    out = tmp_path / "out"
    mine = ("notes.txt", ".tmp-mine", ".tmp-12-mine", "float.onnx", "kept.yaml", ".scalepoint/mine", "quantized/mine")
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    deployed(out, force=True)
    assert {(out / name).read_text() for name in mine} == {"mine"}
    listed = json.loads((out / LIST).read_text())["files"]
    assert not set(mine) & set(listed)
    assert {"model.onnx", "report.html", "config.yaml", "quantized/scalepoint.json"} <= set(listed)


@pytest.mark.parametrize("name", ["model.onnx", "report.html", "config.yaml"])
def test_a_file_of_the_user_with_the_name_of_ours_is_refused(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} was not written by scalepoint"):
        deployed(tmp_path, force=True)
    assert contents(tmp_path) == {name: b"mine"}


def test_unchanged_files_of_an_earlier_run_are_deleted(tmp_path, finished_run):
    out = Path(shutil.copytree(finished_run[1], tmp_path / "out"))
    file_list = json.loads((out / LIST).read_text())
    (out / "failing").mkdir()
    for name in ("failing/run.py", "failing/model.onnx", "kept.yaml"):
        (out / name).write_text("of an earlier run")
        file_list["files"][name] = {"size": 17, "sha256": scalepoint.support.files.compute_digest(out / name)}
    (out / "kept.yaml").write_text("edited since")
    (out / LIST).write_text(json.dumps(file_list))
    deployed(out, force=True)
    assert not (out / "failing").exists()
    assert (out / "kept.yaml").read_text() == "edited since"
    assert set(contents(out)) - {"kept.yaml"} == set(contents(finished_run[1]))


def test_the_report_of_a_smoke_run_has_the_options_and_names_no_missing_file(finished_run):
    done, folder = finished_run
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["max_batches"], config["max_trials"]) == (7, 5)
    assert done.float_path is None
    assert all(trial.float_file is None or trial.float_file.exists() for trial in done.trials[:1])
    assert not (folder / "float.onnx").exists()


def test_files_have_the_modes_that_the_umask_gives(tmp_path):
    before = os.umask(0o022)
    try:
        deployed(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    wrong = {
        name: oct(mode) for name, mode in modes.items() if mode != (0o755 if (tmp_path / name).is_dir() else 0o644)
    }
    assert not wrong


def test_the_error_for_a_full_disk_says_how_much_is_needed_and_how_to_resume(tmp_path, monkeypatch):
    """The report cannot be written: everything before it is kept."""
    write_bytes = Path.write_bytes

    def full(path, data):
        if "report.json" in str(path):
            raise OSError(28, os.strerror(28))
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StoreError, match=r"No space left.*needs [\d,]+ bytes.*resume=True"):
            deployed(tmp_path / "out")
    monkeypatch.setattr(stages, "calibrate", None)  # it would fail if it ran again
    deployed(tmp_path / "out", resume=True)


@pytest.mark.parametrize(("name", "says"), [("a" * 300, "too long"), ("a\0b", "NUL")])
def test_an_invalid_folder_name_is_refused_before_any_work(tmp_path, name, says):
    for refused in (
        lambda: deployed(tmp_path / name),
        lambda: deployed(tmp_path / name, resume=True),
        lambda: scalepoint.sweep(net(), DATA[0], DATA, grid={"threads": [1]}, output=tmp_path / name),
        lambda: scalepoint.export(net(), tmp_path / name, DATA[0]),
        lambda: scalepoint.save(net(), tmp_path / name),
        lambda: scalepoint.tune(net(), DATA, folder=tmp_path / name),
    ):
        with pytest.raises(UsageError, match=says):
            refused()
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_weakref_callback_ends_the_run_at_the_next_stage(tmp_path):
    """Python prints an exception that is raised there and continues: the run must stop after the float model."""
    scores = []

    class Dies:
        pass

    def interrupted(_):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

    def evaluate(run):
        scores.append(run)
        if len(scores) == 1:
            dies = Dies()
            reference = weakref.ref(dies, interrupted)
            del dies
            assert reference() is None
        return 1.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            deployed(tmp_path / "out", evaluate=evaluate)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(scores) == 1
    deployed(tmp_path / "out", evaluate=evaluate, resume=True)


KILLED = """
import os, signal, sys
from tests.pipeline.test_output import deployed
import scalepoint.support.files as files
flush = files._flush

def killed(path):
    if sys.argv[2] in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    flush(path)

files._flush = killed
deployed(sys.argv[1])
"""


@pytest.mark.parametrize("subfolder", ["report.html", pytest.param("trial-0/.tmp-", marks=pytest.mark.slow)])
def test_incomplete_files_of_a_killed_run_are_deleted_when_it_is_resumed(tmp_path, subfolder):
    out = tmp_path / "out"
    done = subprocess.run([*warm(), "-c", KILLED, str(out), subfolder], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(out.rglob(".tmp-*"))
    deployed(out, resume=True)
    assert not list(out.rglob(".tmp-*"))
    assert not (out / ".scalepoint").exists()


def test_only_temporary_folders_of_killed_processes_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nfrom scalepoint.support.files import TemporaryFolder\nTemporaryFolder()\nos.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    (remaining,) = tmp_path.iterdir()
    os.utime(remaining / ".lock", (0, 0))  # long ago
    (tmp_path / "scalepoint-mine").mkdir()
    (tmp_path / "scalepoint-mine" / "a").write_text("of another program")
    with TemporaryFolder() as used:
        deployed(tmp_path / "out")
        assert used.is_dir()
    assert not remaining.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scalepoint-mine"]


def test_a_missing_temporary_folder_is_an_error(tmp_path, monkeypatch, finished_run):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match=r"missing.*TMPDIR"):
        scalepoint.verify(finished_run[0].path, finished_run[0].model, DATA[0])


def test_onnx_runtime_sends_no_telemetry_and_writes_no_files(tmp_path, monkeypatch, finished_run):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("CI", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    assert scalepoint.verify(finished_run[0].path, finished_run[0].model, DATA[0]).holds
    assert not list(tmp_path.rglob(".ses"))
