"""Every kind of file, damaged: truncated, with flipped bits, replaced by pipes and links. Never an unexpected error."""

import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from torch import nn

import scalepoint
from scalepoint.checkpoints.source import Source
from scalepoint.checkpoints.text import _iterate_texts
from scalepoint.cli.data import DataOptions, load_data
from scalepoint.cli.library_models import load_weights
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.cli.metadata import with_metadata
from scalepoint.errors import ScalepointError, ScalepointWarning
from scalepoint.formats import find_format
from scalepoint.formats.gguf.tokenizer import add_tokenizer, read_vocabulary
from scalepoint.options import DeployConfig
from scalepoint.pipeline.workspace import list_finished_stages
from scalepoint.quantize import quantize
from scalepoint.report import Report, Sweep, SweepRow, compare_runs, write
from scalepoint.tuning.checkpoint import Checkpoint
from tests.report.example_reports import ordinary

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TRIALS = {"few": (40, 60), "all": (10**9, 10_000)}  # number of lengths and of flipped bits


class File(NamedTuple):
    """A file, and the function that reads it. All other files are undamaged."""

    path: Path
    read: Callable[[Path], Any]


def _model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(2, 4)
    return quantize(model, x, forward_loop=[x], freeze_weights=True, target="onnxruntime"), x


def _write_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _load_data(path: Path) -> list[Any]:
    return list(load_data(str(path), DataOptions(2)))


def _journal(path: Path) -> list[str]:
    return list_finished_stages(path.parent.parent)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, File]:
    here = tmp_path_factory.mktemp("read")
    quantized, x = _model()
    linear = nn.Linear(4, 4)
    scalepoint.save(quantized, here / "kept", with_graph=True)
    scalepoint.export(quantized, here / "model.onnx", x, metadata={"labels": ["a", "b"]})
    write(ordinary(), here / "run")
    DeployConfig(model="a:b", target="openvino").to_file(here / "run" / "config.yaml")
    shutil.copytree(here / "run", here / "other")
    sweep = Sweep((SweepRow("a", {"target": "onnxruntime"}, "failed", "no runtime"),))
    stages = {"format": 1, "stages": {"one": {"marks": {"a": "b"}, "result": {}, "files": {}}}}
    np.savez(here / "data.npz", x=np.ones((4, 3), dtype=np.float32))
    save_file({"x": torch.ones(4, 3)}, here / "data.safetensors")
    save_file(linear.state_dict(), here / "weights.safetensors")
    torch.save(linear.state_dict(), here / "weights.pt")
    (here / "llm").mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, here / "llm" / "part-1.safetensors")
    index = {"metadata": {}, "weight_map": {"a.weight": "part-1.safetensors"}}

    def load(_: Path) -> Any:
        return scalepoint.load(here / "kept")(x)

    def weights(path: Path) -> None:
        load_weights(nn.Linear(4, 4), path)

    def checkpoint(_: Path) -> Any:
        return Source.open(here / "llm").tensor("a.weight")

    def tokenizer(path: Path) -> Any:
        return read_vocabulary(path.parent, 8)

    def special(path: Path) -> Any:
        return add_tokenizer(GGUFWriter(None, "llama"), path.parent, {"vocab_size": 8})

    def tuned(path: Path) -> Any:
        return Checkpoint.start(path.parent, "a", resume=True).journal

    def ended(path: Path) -> Any:
        return Checkpoint.open_finished(path.parent).journal

    words = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}
    _write_file(here / "words" / "tokenizer.json", json.dumps(words))
    pages = json.dumps({"format": 2, "mark": "a", "pieces": {}})
    _write_file(here / "llm" / "config.json", '{"model_type": "llama", "hidden_size": 2}')
    return {
        "manifest": File(here / "kept" / "scalepoint.json", load),
        "tensors": File(next((here / "kept").glob("*.safetensors")), load),
        "ONNX": File(here / "model.onnx", lambda path: find_format("onnx").about(path)),
        "ONNX, checked": File(here / "model.onnx", scalepoint.check),
        "report": File(here / "run" / "report.json", lambda path: compare_runs(path.parent, here / "other")),
        "config of a run": File(here / "run" / "config.yaml", lambda path: compare_runs(path.parent, here / "other")),
        "config": File(here / "run" / "config.yaml", DeployConfig.from_file),
        "sweep": File(_write_file(here / "sweep.json", sweep.to_json()), Sweep.from_file),
        "journal": File(_write_file(here / "out" / ".scalepoint" / "journal.json", json.dumps(stages)), _journal),
        "npz": File(here / "data.npz", _load_data),
        "safetensors": File(here / "data.safetensors", _load_data),
        "weights": File(here / "weights.safetensors", weights),
        "weights of torch": File(here / "weights.pt", weights),
        "metadata": File(
            _write_file(here / "said.yaml", "labels: [cat, dog]\nsize: {a: &b 3, c: *b}\n"),
            lambda path: with_metadata(DeployConfig(metadata=str(path)), ObjectLoader()),
        ),
        "checkpoint": File(here / "llm" / "config.json", checkpoint),
        "index": File(_write_file(here / "llm" / "model.safetensors.index.json", json.dumps(index)), checkpoint),
        "shard": File(here / "llm" / "part-1.safetensors", checkpoint),
        "tokenizer": File(here / "words" / "tokenizer.json", tokenizer),
        "tokenizer config": File(_write_file(here / "words" / "tokenizer_config.json", '{"bos_token": "a"}'), special),
        "chat template": File(_write_file(here / "words" / "chat_template.jinja", "{{ messages }}"), special),
        "tuning": File(_write_file(here / "tuned" / "tuning.json", pages), tuned),
        "tuning that ended": File(_write_file(here / "ended" / "tuning.json", pages), ended),
        "text": File(_write_file(here / "text.txt", "some words\n"), lambda path: list(_iterate_texts(path))),
        "lines": File(
            _write_file(here / "text.jsonl", '{"text": "some words"}\n'), lambda path: list(_iterate_texts(path))
        ),
        "report of a command": File(here / "other" / "report.json", Report.from_file),
    }


NAMES = (
    "manifest", "tensors", "ONNX", "ONNX, checked", "report", "config of a run", "config", "sweep", "journal", "npz",
    "safetensors", "weights", "weights of torch", "metadata", "checkpoint", "index", "shard", "tokenizer",
    "tokenizer config", "chat template", "tuning", "tuning that ended", "text", "lines", "report of a command",
)  # fmt: skip
WITH_CHECKSUM = ("manifest", "tensors")  # never read as other values
each_amount = pytest.mark.parametrize("amount", ["few", pytest.param("all", marks=pytest.mark.slow)])


def test_every_file_is_readable_undamaged(files: dict[str, File]) -> None:
    assert tuple(files) == NAMES
    for file in files.values():
        file.read(file.path)


def _read(file: File, content: bytes) -> Any:
    """Read a file with other content: return its value, or None for a ScalepointError. Other errors fail the test."""
    file.path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalepointWarning)
        try:
            return file.read(file.path)
        except ScalepointError:
            return None


@each_amount
@pytest.mark.parametrize("name", NAMES)
def test_fault_54_cut_off_anywhere(files: dict[str, File], name: str, amount: str) -> None:
    file, content = files[name], files[name].path.read_bytes()
    step = max(1, len(content) // TRIALS[amount][0])
    try:
        for end in sorted({*range(0, len(content), step), 1, 7, 8, 9, len(content) - 1}):
            value = _read(file, content[:end])
            assert value is None or name not in WITH_CHECKSUM, end
    finally:
        file.path.write_bytes(content)


@each_amount
@pytest.mark.parametrize("name", NAMES)
def test_fault_55_bits_turned(files: dict[str, File], name: str, amount: str) -> None:
    file, original = files[name], files[name].path.read_bytes()
    expected, rng = file.read(file.path), random.Random(0)  # noqa: S311  # no secret
    try:
        for _ in range(TRIALS[amount][1]):
            index, damaged = rng.randrange(len(original)), bytearray(original)
            damaged[index] ^= 1 << rng.randrange(8)
            read_value = _read(file, bytes(damaged))
            assert read_value is None or name not in WITH_CHECKSUM or torch.equal(read_value, expected), index
    finally:
        file.path.write_bytes(original)


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 * 10**9)


def _zero(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_outside(path: Path, target: Path) -> None:
    path.symlink_to(target)


# A file that the user names may be a link. A file in a folder may not be a link to another folder.
USER_FILES = (
    "ONNX", "ONNX, checked", "config", "sweep", "npz", "safetensors", "weights", "weights of torch",
    "metadata", "text", "lines", "report of a command",
)  # fmt: skip
ACCEPTED_DAMAGE = {  # kind of damage -> files that are then treated as missing
    _fifo: ("journal", "config of a run", "chat template", "tokenizer config", "tuning"),
    _sparse: ("journal", "tuning", "text"),
    _zero: ("journal", "config of a run", "chat template", "tokenizer config", "tuning"),
    _link_outside: (*USER_FILES, "journal", "tuning"),
}


@pytest.fixture
def alarm() -> Iterator[None]:
    """A reader that waits for a FIFO gets an error that is not a ScalepointError."""

    def ring(*_: object) -> None:
        raise RuntimeError("blocked")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("spoil", ACCEPTED_DAMAGE, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_pipes_devices_and_links_are_errors(
    files: dict[str, File], name: str, spoil: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    file, aside = files[name], tmp_path / "whole"
    shutil.move(file.path, aside)
    try:
        spoil(file.path, aside)
        if name in ACCEPTED_DAMAGE[spoil]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScalepointWarning)
                file.read(file.path)
        else:
            with pytest.raises(ScalepointError):
                file.read(file.path)
    finally:
        file.path.unlink(missing_ok=True)
        shutil.move(aside, file.path)
