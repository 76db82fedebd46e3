"""deploy_checkpoint: block by block, reported numbers are those of the written weights, killed runs can be resumed."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import scalepoint
from scalepoint import deploy_checkpoint, perplexity
from scalepoint.checkpoints.skeleton import CheckpointWeights
from scalepoint.checkpoints.text import load_sequences
from scalepoint.errors import CalibrationError, CaptureError, ConfigError, StoreError, UsageError
from scalepoint.formats import registry
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.support.files import replace_folder
from scalepoint.targets import find_target, list_targets
from scalepoint.tuning.checkpoint import Checkpoint
from tests.warm import warm

FOUR = QuantConfig(weight={"n_bits": 4, "block_size": 32}, activation="float")


def write(checkpoint, path):
    """Every weight as what it stands for: a checkpoint that transformers reads."""

    def fill(folder):
        tensors = {
            name: checkpoint.quantized[name].dequantize() if name in checkpoint.quantized else checkpoint.tensor(name)
            for name in checkpoint.source.tensors
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(checkpoint.source.folder / "config.json", folder / "config.json")

    replace_folder(path, fill)


@pytest.fixture(autouse=True)
def _values(monkeypatch):
    """The weights' values in the place of any format: what a format packs is judged with it."""
    formats = {name: CheckpointFormat(name, "", write, lambda *_: None) for name in list_targets(language=True)}
    monkeypatch.setattr(registry._CHECKPOINT_FORMATS, "builtin", formats)


def deployed(llama, path, target="compressed-tensors", config=FOUR, **more):
    folder, _ = llama
    defaults = {"data": folder / "calibration.txt", "judge": folder / "judge.txt", "length": 32, "samples": 24}
    return deploy_checkpoint(
        folder, path, target=target, config=config, **{**defaults, "verify": False, "progress": False, **more}
    )


UNINTERRUPTED = {}


@pytest.fixture
def uninterrupted(llama, tmp_path_factory, _values):
    """The usual run, made once: what it gave, its folder, and how many weights were here at a time."""
    if not UNINTERRUPTED:
        most, load = [0], CheckpointWeights.load

        def loading(self, tensors):
            load(self, tensors)
            most[0] = max(most[0], sum(tensor.numel() for tensor in self._loaded.values()))

        path = tmp_path_factory.mktemp("whole") / "out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointWeights, "load", loading)
            UNINTERRUPTED["run"] = deployed(llama, path), path, most[0]
    return UNINTERRUPTED["run"]


def perplexity_of_folder(folder, path):
    """The perplexity of what was written, by transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(path, local_files_only=True).eval()
    source = scalepoint.checkpoints.Source.open(folder)
    tokens = load_sequences(folder / "judge.txt", source, length=32, count=16, what="text")
    with torch.no_grad():
        return perplexity(lambda batch: model(batch).logits, tokens)


def test_the_simulation_equals_the_written_weights(llama, uninterrupted):
    done, path, _ = uninterrupted
    check_simulation(llama, done, path)


@pytest.mark.slow
def test_the_simulation_equals_the_weights_for_gguf(llama, tmp_path):
    check_simulation(llama, deployed(llama, tmp_path / "out", "gguf"), tmp_path / "out")


def check_simulation(llama, done, path):
    folder, _ = llama
    assert done.score == pytest.approx(perplexity_of_folder(folder, path), rel=1e-6)
    assert done.float_score == pytest.approx(perplexity_of_folder(folder, folder), rel=1e-6)
    assert {row.name for row in done.tuned.layers} == {
        f"model.layers.{block}.{name}_proj"
        for block in (0, 1)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["out"]  # nothing is left of the work
    assert json.loads((path / "report.json").read_text())["accuracy"][0]["name"] == "perplexity"


@pytest.mark.slow
def test_tuning_loses_less_than_rounding(llama, tmp_path):
    config = QuantConfig(weight={"n_bits": 2, "block_size": 32}, activation="float")
    fast = deployed(llama, tmp_path / "fast", config=config, accuracy="fast")
    tuned = deployed(llama, tmp_path / "tuned", config=config)
    assert abs(tuned.score - tuned.float_score) < 0.5 * (fast.score - fast.float_score)


def test_ranges_of_static_activations_are_observed_while_tuning(llama, tmp_path):
    config = QuantConfig(weight={"per_channel": True}, activation={"symmetric": True})
    done = deployed(llama, tmp_path / "out", config=config)
    assert done.score == pytest.approx(done.float_score, rel=0.05)
    assert done.score != done.float_score


@pytest.mark.slow
def test_nearest_codes_are_compared_with_the_observed_ranges(llama, tmp_path):
    config = QuantConfig(weight={"per_channel": True}, activation={"symmetric": True})
    done = deployed(llama, tmp_path / "out", config=config)
    assert all(piece.before < 0.1 for piece in done.tuned.pieces)  # without ranges it is about 1


class Killed(BaseException):
    pass


def test_a_killed_run_is_resumed_and_writes_the_same_bytes(llama, tmp_path, monkeypatch, uninterrupted):
    stored, keep = [], Checkpoint.store_piece

    def killed(self, name, states, done):
        keep(self, name, states, done)
        stored.append(name)
        if len(stored) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "store_piece", killed)
        with pytest.raises(Killed):
            deployed(llama, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is the same run: nothing to warn of
        deployed(llama, tmp_path / "again", resume=True)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        uninterrupted[1] / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_a_run_with_another_config_is_not_resumed(llama, tmp_path, monkeypatch):
    def stopped(self, name, states, done):
        keep(self, name, states, done)
        raise Killed

    keep = Checkpoint.store_piece
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "store_piece", stopped)
        with pytest.raises(Killed):
            deployed(llama, tmp_path / "out", accuracy="fast")
    eight = QuantConfig(weight={"n_bits": 8, "block_size": 32}, activation="float")
    with pytest.warns(scalepoint.errors.ScalepointWarning, match="config changed since"):
        deployed(llama, tmp_path / "out", config=eight, accuracy="fast", resume=True)
    written_weight = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert len(written_weight[0, :32].unique()) > 16


def test_only_the_weights_of_one_piece_are_in_memory(uninterrupted):
    block = 3 * 64 * 128 + 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64
    assert 0 < uninterrupted[2] < block


def test_no_weight_is_read_before_it_is_loaded(llama, tmp_path, monkeypatch):
    """Scales that are searched for cost as much over weights that are not there."""
    norms, freeze = [], QuantizedLayer.freeze

    def freezing(self):
        norms.append(bool(self.weight.any()))
        freeze(self)

    monkeypatch.setattr(QuantizedLayer, "freeze", freezing)
    deployed(llama, tmp_path / "out", accuracy="fast")
    assert norms
    assert all(norms)


def test_without_data_weights_are_rounded_and_nothing_is_scored(llama, tmp_path):
    done = deployed(llama, tmp_path / "out", data=None, judge=None, accuracy="fast")
    assert done.score is None
    written_weight = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    steps = written_weight.reshape(128, 2, 32)
    assert max(len(block.unique()) for row in steps for block in row) <= 16


def test_impossible_options_are_refused_before_any_work(llama, tmp_path):
    folder, _ = llama
    with pytest.raises(CalibrationError, match="accuracy='fast'"):
        deployed(llama, tmp_path / "out", data=None, judge=None)
    with pytest.raises(UsageError, match="takes models, not checkpoints"):
        deployed(llama, tmp_path / "out", "onnxruntime")
    with pytest.raises(UsageError, match="the checkpoint itself"):
        deployed(llama, folder)
    with pytest.raises(ConfigError, match="whole model"):
        deployed(llama, tmp_path / "out", config=QuantConfig(migrate=("awq",)))
    with pytest.raises(CalibrationError, match="sequence of 4096"):
        deployed(llama, tmp_path / "out", length=4096)
    with pytest.raises(UsageError, match="path of a text file, or tokens"):
        deployed(llama, tmp_path / "out", data="the cat sees the house . " * 200)
    assert not list(tmp_path.iterdir())


def spoiled(folder, tmp_path, **config):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    stored_config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(stored_config | config))
    return copy


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"hidden_size": 32}, StoreError, r"shape \[\d+, \d+\].*config.json"),
        ({"num_hidden_layers": 3}, StoreError, r"has no model\.layers\.2\."),
        ({"model_type": "nonesuch"}, scalepoint.errors.CaptureError, "nonesuch"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}},
            scalepoint.errors.CaptureError,
            "never run",
        ),
    ],
    ids=["shapes", "missing", "unknown", "remote code"],
)
def test_a_config_that_does_not_fit_the_weights_is_an_error(llama, tmp_path, config, error, says):
    folder, _ = llama
    copy = spoiled(folder, tmp_path, **config)
    data = [torch.ones(2, 8, dtype=torch.int64)]
    with pytest.raises(error, match=says):
        deploy_checkpoint(copy, tmp_path / "out", target="gguf", data=data, verify=False)


def test_targets_of_language_models_are_listed_separately():
    assert list_targets(language=True) == ["compressed-tensors", "gptq", "awq", "gguf", "ort-genai"]
    assert "gguf" not in list_targets()
    assert find_target("gguf").is_language
    with pytest.raises(UsageError, match="deploy_checkpoint writes it"):
        scalepoint.formats.find_format("gguf")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 1}, "length: must be at least 2"),
        ({"samples": 0}, "samples: must be at least 1"),
        ({"memory": "lots"}, "memory='lots'"),
    ],
    ids=str,
)
def test_invalid_numbers_are_refused(llama, tmp_path, options, says):
    with pytest.raises(UsageError, match=says):
        deployed(llama, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_a_file_is_refused(llama, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="choose a folder"):
        deployed(llama, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def damaged(llama, folder, change):
    """The checkpoint with another config."""
    shutil.copytree(llama[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder, None


def test_the_error_says_that_transformers_refuses_the_config(llama, tmp_path):
    source = damaged(llama, tmp_path / "source", {"num_attention_heads": 5})
    with pytest.raises(CaptureError, match="cannot make a language model"):
        deployed(source, tmp_path / "out")


def test_a_failure_before_the_first_finished_block_leaves_no_files(llama, tmp_path):
    source = damaged(llama, tmp_path / "source", {"num_hidden_layers": 3})
    with pytest.raises(StoreError, match=r"has no model\.layers\.2\."):
        deployed(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failed_run_does_not_delete_the_users_folder(llama, tmp_path):
    source = damaged(llama, tmp_path / "source", {"num_hidden_layers": 3})
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError, match=r"has no model\.layers\.2\."):
        deployed(source, tmp_path / "out", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("finished", [0, 1])
def test_a_full_disk_is_reported_and_finished_blocks_are_kept_on_disk(llama, tmp_path, monkeypatch, finished):
    keep, stored = Checkpoint.store_piece, []

    def full(self, *args):
        if len(stored) == finished:
            raise OSError(28, "No space left on device")
        stored.append(args)
        keep(self, *args)

    monkeypatch.setattr(Checkpoint, "store_piece", full)
    with pytest.raises(StoreError, match="No space left" + (".*resume=True" if finished else "")):
        deployed(llama, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ([".out.work"] if finished else [])


LIMITED = """
import resource, sys, torch, transformers
import torch._dynamo
import scalepoint
from pathlib import Path
source, output = sys.argv[1:]
tokens = [torch.randint(0, 320, (8, 32))]
config = {"weight": {"n_bits": 4, "block_size": 32}, "activation": "float"}
asked = dict(target="compressed-tensors", config=config, judge=tokens, verify=False, progress=False)
scalepoint.deploy_checkpoint(source, output + "-small", data=tokens, **asked)  # all that is needed is loaded
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 300_000_000,) * 2)
long = torch.randint(0, 320, (1, 100_000))
scalepoint.deploy_checkpoint(source, output, data=[long], length=long.shape[1], **asked)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_running_out_of_memory_is_reported_and_leaves_no_files(llama, tmp_path):
    """The mask of 100,000 tokens takes 10 GB."""
    source, _ = damaged(llama, tmp_path / "source", {"max_position_embeddings": 100_000})
    command = [*warm(), "-c", LIMITED, str(source), str(tmp_path / "out")]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=one)
    assert "StoreError" in done.stderr
    assert "memory ran out; memory=" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-small", "source"]
