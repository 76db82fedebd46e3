"""Text and tokens as sequences: how many, how long, and none is used for both calibration and perplexity."""

import pytest
import torch

from scalepoint import deploy_checkpoint
from scalepoint.checkpoints import Source
from scalepoint.checkpoints import text as module
from scalepoint.checkpoints.text import context_length, load_sequences, load_tokenizer
from scalepoint.errors import CalibrationError, UsageError

CONFIG = {"weight": {"n_bits": 4, "block_size": 32}}


def load_text(llama, data, *, length, count):
    return load_sequences(data, Source.open(llama[0]), length=length, count=count, what="data")


@pytest.mark.parametrize(
    ("shapes", "length", "count", "sizes"),
    [
        ([(4, 64)], 32, 3, [32, 32, 32]),
        ([(70,)], 32, 8, [32, 32]),
        ([(2, 24), (1, 40)], 32, 8, [24, 24, 32]),
        ([(1, 8)] * 5, 8, 3, [8, 8, 8]),
    ],
)
def test_tokens_are_cut_and_counted_as_text_is(llama, shapes, length, count, sizes):
    data = [torch.randint(0, 320, shape) for shape in shapes]
    sequences = load_text(llama, data, length=length, count=count)
    assert [tuple(sequence.shape) for sequence in sequences] == [(1, size) for size in sizes]
    assert torch.equal(sequences[0][0], data[0].reshape(-1, data[0].shape[-1])[0, : sizes[0]])


def test_a_run_reads_only_as_many_tokens_as_requested(llama, tmp_path):
    torch.manual_seed(0)
    rows = torch.randint(0, 320, (64, 48))
    done = deploy_checkpoint(
        llama[0], tmp_path / "out", target="compressed-tensors", config=CONFIG, data=[rows], length=16, samples=3,
        verify=False, progress=False,
    )  # fmt: skip
    assert done.tuned.samples == 3
    assert done.report.language.tokens == 16 * 15  # of 16 sequences, every token but the first
    from_tokens = deploy_checkpoint(
        llama[0], tmp_path / "own", target="compressed-tensors", config=CONFIG, accuracy="fast", judge=[rows],
        length=16, verify=False, progress=False,
    )  # fmt: skip
    assert from_tokens.report.language.tokens == 16 * 15


@pytest.mark.parametrize("data", [[torch.arange(32)[None]], "text"], ids=["tokens", "text"])
def test_no_sequence_is_used_for_both_calibration_and_evaluation(llama, tmp_path, data):
    if data == "text":
        data = tmp_path / "short.txt"
        data.write_text("the cat sees the dog , and then it sleeps . " * 4)
    with pytest.raises(CalibrationError, match="judge="):
        deploy_checkpoint(llama[0], tmp_path / "out", target="compressed-tensors", config=CONFIG, data=data, length=32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokens", [torch.zeros(1, 1).long(), torch.zeros(4), torch.zeros(1, 1, 4).long(), "a"])
def test_tokens_that_are_not_a_sequence_are_refused(llama, tokens):
    with pytest.raises(UsageError, match="integer tensors"):
        load_text(llama, [tokens], length=8, count=2)


@pytest.mark.parametrize("data", [[torch.arange(200)[None] % 300] * 2, "text"], ids=["tokens", "text"])
def test_sequences_longer_than_the_context_are_refused(llama, tmp_path, data):
    data = llama[0] / "calibration.txt" if data == "text" else data
    with pytest.raises(UsageError, match="length=128"):
        deploy_checkpoint(llama[0], tmp_path / "out", target="compressed-tensors", config=CONFIG, data=data, length=150)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scaling", [[1], "linear", 3, {"original_max_position_embeddings": "many"}])
def test_a_context_is_read_from_a_config_of_any_kind(llama, scaling):
    source = Source.open(llama[0])
    source = Source(source.folder, {**source.config, "rope_parameters": None, "rope_scaling": scaling}, source.tensors)
    assert context_length(source, 5) == 128


def test_only_as_much_text_is_tokenized_as_is_needed(llama, tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text((llama[0] / "calibration.txt").read_text() * 20)
    real, tokenized = load_tokenizer(Source.open(llama[0])), []

    class Counting:
        def encode(self, text, **options):
            tokenized.append(len(text))
            return real.encode(text, **options)

    monkeypatch.setattr(module, "load_tokenizer", lambda source: Counting())
    sequences = load_text(llama, path, length=32, count=4)
    assert sum(tokenized) < 5_000 < len(path.read_text())
    all_tokens = real.encode(path.read_text(), add_special_tokens=False)
    assert torch.cat(sequences, 1)[0].tolist() == all_tokens[:128]
    everything = load_text(llama, path, length=32, count=10**6)
    assert torch.cat(everything, 1)[0].tolist() == all_tokens[: len(all_tokens) // 32 * 32]
