"""The graph computes what the model of transformers does with the same weights, family by family."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scalepoint.errors import ExportError
from scalepoint.formats.genai import ORT_GENAI
from tests.formats.genai.tiny import FAMILIES, OrtModel, decibels, int_spec, make, quantized, simulate

WORDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A family, int4 in blocks of 32, as a folder; made once."""

    @cache
    def made(name: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("genai")
        model = make(name, folder / "float")
        checkpoint = quantized(folder / "float", int_spec(4))
        ORT_GENAI.check(checkpoint.source, int_spec(4), None)
        ORT_GENAI.write(checkpoint, folder / "out")
        with torch.no_grad():
            wanted = simulate(checkpoint, folder / "simulated")(WORDS).logits.numpy()
            exact = model(WORDS).logits.numpy()
        return SimpleNamespace(folder=folder / "out", wanted=wanted, float=exact, checkpoint=checkpoint)

    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_simulation(written, name):
    found = written(name)
    got, _ = OrtModel(found.folder)(WORDS.numpy())
    assert decibels(found.wanted, got) > 110
    assert decibels(found.wanted, found.float) < 40  # else nothing was quantized
    rounded, _ = OrtModel(found.folder, level=4)(WORDS.numpy())
    least = 15 if "moe" in name or name == "mixtral" else 25  # another expert may be chosen
    assert least < decibels(found.wanted, rounded) < 60  # activations in int8


@pytest.mark.parametrize("name", FAMILIES)
def test_words_one_by_one_give_what_they_give_at_once(written, name):
    model, words = OrtModel(written(name).folder), WORDS.numpy()
    at_once, _ = model(words)
    logits, past = model(words[:, :9])
    found = [logits]
    for place in range(9, words.shape[1]):
        logits, past = model(words[:, place : place + 1], past)
        found.append(logits)
    assert decibels(at_once, np.concatenate(found, 1)) > 110


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "olmoe"])
def test_only_the_last_word_of_every_text_has_logits(written, name):
    found = written(name)
    model, words = OrtModel(found.folder, is_whole=False), WORDS.numpy()
    got, _ = model(words)
    assert got.shape == (2, 1, 96)
    assert decibels(found.wanted[:, -1:], got) > 110
    mask = np.ones_like(words)
    mask[1, 15:] = 0  # a shorter text, filled up at its end
    got, _ = model(words, mask=mask)
    assert decibels(found.wanted[[0, 1], [23, 14]], got[:, 0]) > 110


@pytest.mark.parametrize(
    ("bits", "block", "is_symmetric"),
    [(8, 32, True), (8, 0, True), (4, 16, False), (4, 32, False), (2, 32, True)],
    ids=["int8", "int8 a row", "uint4 of 16", "uint4 of 32", "int2"],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_other_widths_and_blocks(tmp_path, name, bits, block, is_symmetric):
    make(name, tmp_path / "float")
    checkpoint = quantized(tmp_path / "float", int_spec(bits, block, is_symmetric=is_symmetric))
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        wanted = simulate(checkpoint, tmp_path / "simulated")(WORDS).logits.numpy()
    got, _ = OrtModel(tmp_path / "out")(WORDS.numpy())
    assert decibels(wanted, got) > (110 if bits != 8 else 30)  # 8 bits: kernels may round activations at every level


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "olmo2"])
def test_layers_that_stay_float_and_mixed_widths(tmp_path, name):
    make(name, tmp_path / "float")
    kept = ("norm", "ln_", "wpe", "embed", "wte", "down_proj", "c_proj", "dense_4h", "q_proj", "query_key_value")
    checkpoint = quantized(tmp_path / "float", int_spec(4), kept)
    wide = {key: each for key, each in quantized(tmp_path / "float", int_spec(8)).quantized.items() if "v_proj" in key}
    checkpoint = type(checkpoint)(checkpoint.source, {**checkpoint.quantized, **wide})
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        wanted = simulate(checkpoint, tmp_path / "simulated")(WORDS).logits.numpy()
    got, _ = OrtModel(tmp_path / "out")(WORDS.numpy())
    assert decibels(wanted, got) > (30 if wide else 110)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_what_stays_float_takes_16_bits_as_in_the_checkpoint(tmp_path, name, dtype):
    make(name, tmp_path / "float").to(dtype).save_pretrained(tmp_path / "half")
    sizes = []
    for each in ("float", "half"):
        checkpoint = quantized(tmp_path / each, int_spec(4), ("norm", "ln_", "wpe", "wte", "embed", "query_key_value"))
        ORT_GENAI.write(checkpoint, tmp_path / "out")
        sizes.append((tmp_path / "out" / "model.onnx.data").stat().st_size)
    with torch.no_grad():
        wanted = simulate(checkpoint, tmp_path / "simulated")(WORDS).logits.numpy()
    got, _ = OrtModel(tmp_path / "out")(WORDS.numpy())
    assert decibels(wanted, got) > 110
    assert sizes[0] - sizes[1] >= 96 * 64 * 2  # of the embedding at least


def test_changed_tensors_and_new_biases_are_what_is_written(tmp_path):
    make("qwen2", tmp_path / "float")
    checkpoint = quantized(tmp_path / "float", int_spec(4))
    key = "model.layers.0.self_attn.q_proj.bias"
    changed = {
        key: checkpoint.source.tensor(key) + 1,
        "model.norm.weight": checkpoint.source.tensor("model.norm.weight") * 2,
    }
    checkpoint = type(checkpoint)(checkpoint.source, checkpoint.quantized, changed)
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        wanted = simulate(checkpoint, tmp_path / "simulated")(WORDS).logits.numpy()
    got, _ = OrtModel(tmp_path / "out")(WORDS.numpy())
    assert decibels(wanted, got) > 110
    biased = {"model.layers.0.mlp.down_proj.bias": torch.ones(64)}  # a bias that the source has not
    ORT_GENAI.write(
        type(checkpoint)(checkpoint.source, checkpoint.quantized, {**changed, **biased}), tmp_path / "biased"
    )
    other, _ = OrtModel(tmp_path / "biased")(WORDS.numpy())
    assert decibels(got, other) < 40


def test_experts_that_stay_float_or_differ_are_refused(tmp_path):
    make("qwen3_moe", tmp_path / "float")
    layer = "model.layers.1.mlp.experts.2.up_proj.weight"
    checkpoint = quantized(tmp_path / "float", int_spec(4), ("norm", ".gate.", layer))
    with pytest.raises(ExportError, match=r"experts\.2\.up_proj stays float"):
        ORT_GENAI.write(checkpoint, tmp_path / "out")
    mixed = {**checkpoint.quantized, layer: quantized(tmp_path / "float", int_spec(8)).quantized[layer]}
    with pytest.raises(ExportError, match="several kinds"):
        ORT_GENAI.write(type(checkpoint)(checkpoint.source, mixed), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tied_embedding_is_stored_once(written):
    import onnx

    folder = written("llama").folder
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    places = [
        entry.value
        for tensor in tensors
        for entry in tensor.external_data
        if entry.key == "offset" and tensor.name in ("model.embed_tokens.codes", "model.embed_tokens.table")
    ]
    assert len(places) == 2
    assert len(set(places)) == 1
