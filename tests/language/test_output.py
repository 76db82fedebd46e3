"""The output of deploy_checkpoint: files of others stay, inputs are never written to, own old files are deleted."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scalepoint import deploy_checkpoint
from scalepoint.cli.app import run
from scalepoint.errors import StoreError, UsageError
from scalepoint.quantize import QuantConfig
from scalepoint.tuning.checkpoint import Checkpoint

FOLDERS = ("compressed-tensors", "gptq", "awq", "ort-genai")
FOUR = QuantConfig(weight={"n_bits": 4, "block_size": 32}, activation="float")


def deployed(source, output, target="compressed-tensors", **more):
    """Nearest codes without data: what is tested is the folder."""
    defaults = {"config": FOUR, "accuracy": "fast", "verify": False, "progress": False}
    return deploy_checkpoint(source, output, target=target, **{**defaults, **more})


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(llama, tmp_path):
    """The checkpoint in a folder that contains more than it."""
    shutil.copytree(llama[0], tmp_path / "models" / "llama")
    (tmp_path / "models" / "notes.txt").write_text("mine")
    return tmp_path / "models" / "llama"


@pytest.mark.parametrize("target", [*FOLDERS, "gguf"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("output", "says"), [("..", "contains the checkpoint"), ("", "the checkpoint itself"), ("out", "lies inside")]
)
def test_an_output_around_or_in_the_checkpoint_is_refused(source, target, force, output, says):
    before = contents(source.parent)
    with pytest.raises(UsageError, match=says):
        deployed(source, source / output, target, force=force)
    assert contents(source.parent) == before


def test_a_link_to_the_checkpoint_is_the_checkpoint(source, tmp_path):
    (tmp_path / "link").symlink_to(source.parent)
    with pytest.raises(UsageError, match="contains the checkpoint"):
        deployed(source, tmp_path / "link", force=True)


@pytest.mark.parametrize("name", ["data", "judge"])
def test_an_output_that_contains_the_text_is_refused(source, tmp_path, name):
    (tmp_path / "texts").mkdir()
    shutil.copy(source / "calibration.txt", tmp_path / "texts")
    texts = {"data": source / "calibration.txt", name: tmp_path / "texts" / "calibration.txt"}
    with pytest.raises(UsageError, match=r"contains the .*calibration\.txt"):
        deployed(source, tmp_path / "texts", force=True, **texts)
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["calibration.txt"]


@pytest.mark.parametrize(
    "target", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in (*FOLDERS, "gguf") if name != "gptq")]
)
def test_foreign_files_are_refused_and_not_deleted_with_force(llama, tmp_path, target):
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    mine = {"mine.txt": b"precious", "deep/model.safetensors": b"other weights", ".tmp-7-mine": b"of another program"}
    for name, data in mine.items():
        (out / name).write_bytes(data)
    with pytest.raises(UsageError, match=r"not empty.*force=True"):
        deployed(llama[0], out, target)
    assert contents(out) == mine
    done = deployed(llama[0], out, target, force=True)
    files = contents(out)
    assert {name: files[name] for name in mine} == mine
    assert (out / "report.html").is_file()
    assert done.path.exists()
    assert set(files) - set(mine) == {*json.loads((out / ".scalepoint-files.json").read_text())["files"],
                                      ".scalepoint-files.json"}  # fmt: skip


def test_another_checkpoint_in_the_output_is_refused(llama, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json was not written by scalepoint"):
        deployed(llama[0], tmp_path, force=True)


def test_foreign_files_do_not_count_as_written_files(llama, tmp_path):
    fresh = deployed(llama[0], tmp_path / "fresh").report.language
    (tmp_path / "out").mkdir()
    save_file({"lora": torch.zeros(500_000)}, tmp_path / "out" / "adapter.safetensors")
    result = deployed(llama[0], tmp_path / "out", force=True).report.language
    assert (result.size, result.bits) == (fresh.size, fresh.bits)


@pytest.mark.slow
def test_unchanged_files_of_an_earlier_run_are_deleted(llama, tmp_path):
    out = tmp_path / "out"
    deployed(llama[0], out, "ort-genai")
    before = set(contents(out))
    (out / "genai_config.json").write_text("{}")  # somebody edits it
    deployed(llama[0], out, "compressed-tensors", force=True)
    now = set(contents(out))
    assert {"model.onnx", "model.onnx.data", "genai_config.json"} <= before
    assert not {"model.onnx", "model.onnx.data"} & now
    assert (out / "genai_config.json").read_text() == "{}"
    deployed(llama[0], tmp_path / "fresh", "compressed-tensors")
    assert now - {"genai_config.json"} == set(contents(tmp_path / "fresh"))


@pytest.mark.parametrize(
    "name", ["report.html", ".scalepoint-files.json", pytest.param("model.safetensors", marks=pytest.mark.slow)]
)
def test_a_link_in_the_output_is_refused(llama, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "elsewhere").write_text("mine")
    (out / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        deployed(llama[0], out, force=True)
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_work_folder_that_is_a_link_is_refused(llama, tmp_path):
    (tmp_path / "elsewhere" / "tuning").mkdir(parents=True)
    (tmp_path / "elsewhere" / "tuning" / "mine").write_text("mine")
    (tmp_path / ".out.work").symlink_to(tmp_path / "elsewhere")
    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(UsageError, match="symbolic link"):
            deployed(llama[0], tmp_path / "out", **options)
    assert (tmp_path / "elsewhere" / "tuning" / "mine").read_text() == "mine"


@pytest.mark.slow
def test_an_existing_gguf_file_is_refused_without_force(llama, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"model\.gguf already exists.*force=True"):
        deployed(llama[0], path, "gguf")
    path.unlink()
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UsageError, match=r"report\.html already exists"):
        deployed(llama[0], path, "gguf")
    (tmp_path / "report.html").unlink()
    deployed(llama[0], path, "gguf")
    deployed(llama[0], tmp_path / "second.gguf", "gguf")  # the report next to it is of ours
    assert path.is_file()


@pytest.mark.slow
def test_the_command_line_refuses_and_forces(source, tmp_path, capsys):
    arguments = ["deploy", str(source), "--target", "gptq", "--accuracy", "fast", "--quiet"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert run([*arguments, "-o", str(tmp_path / "out")]) == 2
    assert "--force" in capsys.readouterr().err
    assert run([*arguments, "-o", str(source.parent), "--force"]) == 2
    assert "contains the checkpoint" in " ".join(capsys.readouterr().err.split())
    run([*arguments, "-o", str(tmp_path / "out"), "--force"])
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_hf_folder_is_an_input_of_the_command_line(source, tmp_path, capsys):
    np.savez(tmp_path / "tokens.npz", input_ids=np.ones((2, 8), np.int64))
    before = contents(source.parent)
    for output in (source.parent, source, source / "out"):
        arguments = ["deploy", f"hf:{source}", "--data", str(tmp_path / "tokens.npz"), "-o", str(output), "--force"]
        assert run(arguments) == 2
        assert "checkpoint" in capsys.readouterr().err
    assert contents(source.parent) == before


@pytest.mark.slow
def test_foreign_files_in_the_work_folder_are_not_deleted(llama, tmp_path):
    (tmp_path / ".out.work").mkdir()
    (tmp_path / ".out.work" / "mine").write_text("mine")
    deployed(llama[0], tmp_path / "out")
    assert contents(tmp_path / ".out.work") == {"mine": b"mine"}


class Stopped(BaseException):
    """As Ctrl-C."""


def stopping(monkeypatch, error, after):
    keep, stored = Checkpoint.store_piece, []

    def stopped(self, *args):
        if len(stored) == after:
            raise error
        stored.append(args)
        keep(self, *args)

    monkeypatch.setattr(Checkpoint, "store_piece", stopped)


@pytest.mark.parametrize("blocks", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_before_the_first_finished_block_leaves_no_files(llama, tmp_path, monkeypatch, blocks):
    stopping(monkeypatch, Stopped(), blocks)
    with pytest.raises(Stopped):
        deployed(llama[0], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ([".out.work"] if blocks else [])


@pytest.mark.slow
def test_an_unfinished_run_is_refused_unless_resumed_or_forced(llama, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stopping(patch, Stopped(), 1)
        with pytest.raises(Stopped):
            deployed(llama[0], tmp_path / "out")
    with pytest.raises(UsageError, match=r"unfinished run.*resume=True.*force=True"):
        deployed(llama[0], tmp_path / "out")
    deployed(llama[0], tmp_path / "out", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="not empty"):
        deployed(llama[0], tmp_path / "out", resume=True)  # there is nothing to go on from


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_fails_with_nan_cannot_be_resumed(llama, tmp_path):
    """Going on would end the same way."""
    shutil.copytree(llama[0], tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    options = {"data": llama[0] / "calibration.txt", "length": 32, "samples": 4, "accuracy": "balanced"}
    with pytest.raises(StoreError, match="contains NaN"):
        deployed(tmp_path / "in", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_error_for_a_full_disk_says_how_much_is_needed_and_how_to_resume(llama, tmp_path, monkeypatch):
    stopping(monkeypatch, OSError(28, os.strerror(28)), 1)
    with pytest.raises(StoreError, match=r"No space left.*needs .*[\d,]+ bytes.*resume=True"):
        deployed(llama[0], tmp_path / "out")
