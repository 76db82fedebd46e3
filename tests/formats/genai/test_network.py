"""For every family, the graph computes the same as the transformers model with the dequantized weights."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scalepoint.errors import ExportError
from scalepoint.formats.genai import ORT_GENAI
from tests.formats.genai.tiny import FAMILIES, OrtModel, int_spec, quantize_folder, save_model, simulate, sqnr

TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that exports a family with int4 weights in blocks of 32, once per family."""

    @cache
    def export(name: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("genai")
        model = save_model(name, folder / "float")
        checkpoint = quantize_folder(folder / "float", int_spec(4))
        ORT_GENAI.check(checkpoint.source, int_spec(4), None)
        ORT_GENAI.write(checkpoint, folder / "out")
        with torch.no_grad():
            simulated = simulate(checkpoint, folder / "simulated")(TOKENS).logits.numpy()
            float_logits = model(TOKENS).logits.numpy()
        return SimpleNamespace(folder=folder / "out", simulated=simulated, float_logits=float_logits)

    return export


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_simulation(exported, name):
    model = exported(name)
    logits, _ = OrtModel(model.folder)(TOKENS.numpy())
    assert sqnr(model.simulated, logits) > 110
    assert sqnr(model.simulated, model.float_logits) < 40  # else nothing was quantized
    with_int8_activations, _ = OrtModel(model.folder, level=4)(TOKENS.numpy())
    lower_bound = 15 if "moe" in name or name == "mixtral" else 25  # rounding may change which expert is chosen
    assert lower_bound < sqnr(model.simulated, with_int8_activations) < 60


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_one_by_one_give_the_same_logits_as_all_at_once(exported, name):
    model, tokens = OrtModel(exported(name).folder), TOKENS.numpy()
    at_once, _ = model(tokens)
    logits, past = model(tokens[:, :9])
    one_by_one = [logits]
    for position in range(9, tokens.shape[1]):
        logits, past = model(tokens[:, position : position + 1], past)
        one_by_one.append(logits)
    assert sqnr(at_once, np.concatenate(one_by_one, 1)) > 110


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "olmoe"])
def test_only_the_last_token_of_every_text_has_logits(exported, name):
    simulated = exported(name).simulated
    model, tokens = OrtModel(exported(name).folder, all_logits=False), TOKENS.numpy()
    logits, _ = model(tokens)
    assert logits.shape == (2, 1, 96)
    assert sqnr(simulated[:, -1:], logits) > 110
    mask = np.ones_like(tokens)
    mask[1, 15:] = 0  # a shorter text, padded at its end
    logits, _ = model(tokens, mask=mask)
    assert sqnr(simulated[[0, 1], [23, 14]], logits[:, 0]) > 110


@pytest.mark.parametrize(
    ("bits", "block_size", "is_symmetric"),
    [(8, 32, True), (8, 0, True), (4, 16, False), (4, 32, False), (2, 32, True)],
    ids=["int8", "int8 per row", "uint4 of 16", "uint4 of 32", "int2"],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_other_widths_and_blocks_equal_the_simulation(tmp_path, name, bits, block_size, is_symmetric):
    save_model(name, tmp_path / "float")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(bits, block_size, is_symmetric=is_symmetric))
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        simulated = simulate(checkpoint, tmp_path / "simulated")(TOKENS).logits.numpy()
    logits, _ = OrtModel(tmp_path / "out")(TOKENS.numpy())
    # With 8 bits the kernels may round activations whatever the accuracy level is.
    assert sqnr(simulated, logits) > (110 if bits != 8 else 30)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "olmo2"])
def test_float_layers_and_mixed_widths_equal_the_simulation(tmp_path, name):
    save_model(name, tmp_path / "float")
    float_parts = ("norm", "ln_", "wpe", "embed", "wte", "down_proj", "c_proj", "dense_4h", "q_proj", "query_key_value")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4), float_parts)
    in_int8 = quantize_folder(tmp_path / "float", int_spec(8)).quantized
    wide = {key: weight for key, weight in in_int8.items() if "v_proj" in key}
    checkpoint = type(checkpoint)(checkpoint.source, {**checkpoint.quantized, **wide})
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        simulated = simulate(checkpoint, tmp_path / "simulated")(TOKENS).logits.numpy()
    logits, _ = OrtModel(tmp_path / "out")(TOKENS.numpy())
    assert sqnr(simulated, logits) > (30 if wide else 110)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_float_layers_take_16_bits_if_they_do_in_the_checkpoint(tmp_path, name, dtype):
    save_model(name, tmp_path / "float").to(dtype).save_pretrained(tmp_path / "half")
    float_parts = ("norm", "ln_", "wpe", "wte", "embed", "query_key_value")
    sizes = []
    for folder_name in ("float", "half"):
        checkpoint = quantize_folder(tmp_path / folder_name, int_spec(4), float_parts)
        ORT_GENAI.write(checkpoint, tmp_path / "out")
        sizes.append((tmp_path / "out" / "model.onnx.data").stat().st_size)
    with torch.no_grad():
        simulated = simulate(checkpoint, tmp_path / "simulated")(TOKENS).logits.numpy()
    logits, _ = OrtModel(tmp_path / "out")(TOKENS.numpy())
    assert sqnr(simulated, logits) > 110
    assert sizes[0] - sizes[1] >= 96 * 64 * 2  # at least half of the embedding


def test_changed_tensors_and_new_biases_are_written(tmp_path):
    save_model("qwen2", tmp_path / "float")
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4))
    key = "model.layers.0.self_attn.q_proj.bias"
    changed = {
        key: checkpoint.source.tensor(key) + 1,
        "model.norm.weight": checkpoint.source.tensor("model.norm.weight") * 2,
    }
    checkpoint = type(checkpoint)(checkpoint.source, checkpoint.quantized, changed)
    ORT_GENAI.write(checkpoint, tmp_path / "out")
    with torch.no_grad():
        simulated = simulate(checkpoint, tmp_path / "simulated")(TOKENS).logits.numpy()
    logits, _ = OrtModel(tmp_path / "out")(TOKENS.numpy())
    assert sqnr(simulated, logits) > 110
    biased = {"model.layers.0.mlp.down_proj.bias": torch.ones(64)}  # the source has no such bias
    with_bias = type(checkpoint)(checkpoint.source, checkpoint.quantized, {**changed, **biased})
    ORT_GENAI.write(with_bias, tmp_path / "biased")
    logits_with_bias, _ = OrtModel(tmp_path / "biased")(TOKENS.numpy())
    assert sqnr(logits, logits_with_bias) < 40


def test_experts_that_stay_float_or_differ_are_rejected(tmp_path):
    save_model("qwen3_moe", tmp_path / "float")
    layer = "model.layers.1.mlp.experts.2.up_proj.weight"
    checkpoint = quantize_folder(tmp_path / "float", int_spec(4), ("norm", ".gate.", layer))
    with pytest.raises(ExportError, match=r"experts\.2\.up_proj stays float"):
        ORT_GENAI.write(checkpoint, tmp_path / "out")
    mixed = {**checkpoint.quantized, layer: quantize_folder(tmp_path / "float", int_spec(8)).quantized[layer]}
    with pytest.raises(ExportError, match="different layouts"):
        ORT_GENAI.write(type(checkpoint)(checkpoint.source, mixed), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tied_embedding_is_stored_once(exported):
    import onnx

    folder = exported("llama").folder
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    offsets = [
        entry.value
        for tensor in tensors
        for entry in tensor.external_data
        if entry.key == "offset" and tensor.name in ("model.embed_tokens.codes", "model.embed_tokens.table")
    ]
    assert len(offsets) == 2
    assert len(set(offsets)) == 1
