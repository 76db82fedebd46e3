"""The model of a checkpoint with weights that are loaded and dropped."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from scalepoint.checkpoints import Source
from scalepoint.checkpoints.skeleton import build_skeleton, check_config, find_head
from scalepoint.errors import CaptureError, StoreError

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "gemma2": SMALL,
    "mistral": SMALL,
    "phi3": {**SMALL, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "olmo2": SMALL,
    "qwen2_moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**SMALL, **EXPERTS},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
}


def save_model(kind, folder, **settings):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**KINDS[kind], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_with_loaded_weights_the_skeleton_computes_what_the_model_does(tmp_path, kind):
    model = save_model(kind, tmp_path)
    skeleton, weights = build_skeleton(Source.open(tmp_path))
    tokens = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        assert not skeleton(tokens).logits.any() or kind in ("gpt2", "gpt_neox")  # no weight is loaded yet
        weights.load(skeleton.parameters())
        torch.testing.assert_close(skeleton(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)
        weights.drop()
        assert not any(parameter.any() for parameter in skeleton.parameters())
    assert find_head(skeleton) == "lm_head"


def test_a_tied_head_stays_tied(tmp_path):
    save_model("llama", tmp_path, tie_word_embeddings=True)
    skeleton, weights = build_skeleton(Source.open(tmp_path))
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert weights.name_of(skeleton.lm_head.weight) == "model.embed_tokens.weight"


def test_16_bit_weights_are_loaded_as_float32(tmp_path):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["llama"](**SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path)
    skeleton, weights = build_skeleton(Source.open(tmp_path))
    weights.load(skeleton.parameters())
    weight = skeleton.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.model.layers[0].mlp.up_proj.weight.float())


def test_the_error_names_a_missing_expert(tmp_path):
    save_model("olmoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 5}))
    with pytest.raises(StoreError, match=r"experts\.4\.gate_proj\.weight|has shape"):
        build_skeleton(Source.open(tmp_path))


def test_experts_that_are_stored_in_one_tensor_are_rejected_with_that_reason(tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model("granitemoe", **{**SMALL, **experts})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match="for each layer"):
        build_skeleton(Source.open(tmp_path))


def test_a_memory_error_is_not_reported_as_an_error_of_the_config(tmp_path, monkeypatch):
    save_model("llama", tmp_path)

    def out_of_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", out_of_memory)
    with pytest.raises(MemoryError):
        check_config(Source.open(tmp_path))


def test_a_separate_head_in_the_file_overrides_a_config_that_ties_it(tmp_path):
    save_model("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(1)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = Source.open(tmp_path)
    assert source.config["tie_word_embeddings"] is False
    skeleton, weights = build_skeleton(source)
    weights.load(skeleton.parameters())
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(skeleton(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)


def test_a_head_that_equals_the_embedding_stays_tied(tmp_path):
    save_model("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    skeleton, _ = build_skeleton(Source.open(tmp_path))
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
