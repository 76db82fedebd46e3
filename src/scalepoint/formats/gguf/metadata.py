"""Write the metadata of a model to a GGUF file: sizes, attention, rope, norms, experts, factors of scaled ropes."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import ExportError
from scalepoint.formats.gguf.architectures import Architecture, Config, count_heads, head_size, require_key

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "longrope", "su")
YARN_KEYS = {  # key in config.json -> name in the methods of GGUFWriter
    "extrapolation_factor": "ext_factor",
    "attention_factor": "attn_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}


def add_metadata(writer: Any, config: Config, architecture: Architecture) -> None:
    """Write sizes and everything that the arithmetic of llama.cpp needs."""
    heads, head_channels = count_heads(config), head_size(config)
    hidden_size = int(require_key(config, "hidden_size", "n_embd"))
    writer.add_block_count(count_blocks(config))
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_vocab_size(int(require_key(config, "vocab_size")))
    if "head_dim" in config:
        writer.add_key_length(head_channels)
        writer.add_value_length(head_channels)
    _add_norms(writer, config, architecture)
    _add_attention(writer, config, architecture)
    _add_rope(writer, config, architecture)
    _add_experts(writer, config)


def count_blocks(config: Config) -> int:
    return int(require_key(config, "num_hidden_layers", "n_layer"))


def context_length(config: Config) -> int:
    """Return the context length; at most the window of models whose sliding window llama.cpp ignores."""
    length = int(require_key(config, "max_position_embeddings", "n_positions", "n_ctx"))
    window = config.get("sliding_window") if config.get("model_type") in ("mistral", "mixtral", "phi3") else None
    return min(length, int(window)) if window else length


def read_rope(config: Config) -> Mapping[str, Any]:
    """Read the rope parameters of full attention, from the keys of any version of transformers."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention") or rope)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ExportError(f"rope of type {rope_type!r} cannot be stored in a GGUF file, only {', '.join(ROPE_TYPES)}")
    theta = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return {
        **rope,
        "rope_type": rope_type,
        "rope_theta": float(theta),
        "partial_rotary_factor": float(share),
        "original_max_position_embeddings": int(original or require_key(config, "max_position_embeddings")),
    }


def _add_norms(writer: Any, config: Config, architecture: Architecture) -> None:
    if architecture.has_layer_norm:
        writer.add_layer_norm_eps(float(config.get("layer_norm_eps") or config.get("layer_norm_epsilon") or 1e-5))
    else:
        writer.add_layer_norm_rms_eps(float(require_key(config, "rms_norm_eps")))


def _add_attention(writer: Any, config: Config, architecture: Architecture) -> None:
    if config.get("clip_qkv") is not None:
        writer.add_clamp_kqv(float(config["clip_qkv"]))
    if architecture.name == "GPTNEOX":
        writer.add_parallel_residual(bool(config.get("use_parallel_residual", True)))
    if architecture.name == "PHI3":  # llama.cpp needs the key; context_length() already limits texts to the window
        writer.add_sliding_window(0)
    if architecture.name in ("GEMMA2", "GEMMA3") and config.get("sliding_window"):
        writer.add_sliding_window(int(config["sliding_window"]))
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(float(config["attn_logit_softcapping"]))
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(float(config["final_logit_softcapping"]))


def _add_rope(writer: Any, config: Config, architecture: Architecture) -> None:
    from gguf import RopeScalingType  # noqa: PLC0415  # an extra

    if architecture.name == "GPT2":
        return
    rope = read_rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture.writes_rope_dimensions:
        writer.add_rope_dimension_count(rotary_channels(config))
    local_rope = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    local_theta = local_rope.get("rope_theta") or config.get("rope_local_base_freq")
    if local_theta:
        writer.add_rope_freq_base_swa(float(local_theta))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] in ("longrope", "su") or architecture.name == "PHI3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] in ("longrope", "su"):
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(_longrope_attention_factor(config, rope))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, name in YARN_KEYS.items():
            if rope.get(key) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(float(rope[key]))


def rotary_channels(config: Config) -> int:
    """Return the number of channels of a head that rope rotates."""
    return int(read_rope(config)["partial_rotary_factor"] * head_size(config))


def _longrope_attention_factor(config: Config, rope: Mapping[str, Any]) -> float:
    """Return the factor by which longrope scales attention."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = rope["original_max_position_embeddings"]
    growth = int(require_key(config, "max_position_embeddings")) / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _add_experts(writer: Any, config: Config) -> None:
    count = config.get("num_local_experts") or config.get("num_experts")
    if count is None:
        return
    writer.add_expert_count(int(count))
    writer.add_expert_used_count(int(require_key(config, "num_experts_per_tok")))
    if config.get("moe_intermediate_size") is not None:
        writer.add_expert_feed_forward_length(int(config["moe_intermediate_size"]))
    if config.get("shared_expert_intermediate_size") is not None:
        writer.add_expert_shared_feed_forward_length(int(config["shared_expert_intermediate_size"]))


def rope_factors(config: Config) -> dict[str, Tensor]:
    """Return the tensors of scaled ropes, by name: the divisor of every frequency."""
    if config.get("model_type") == "gpt2":
        return {}
    rope = read_rope(config)
    if rope["rope_type"] in ("longrope", "su"):
        return {f"rope_factors_{key}.weight": torch.tensor(rope[f"{key}_factor"]).float() for key in ("long", "short")}
    if rope["rope_type"] != "llama3":
        return {}
    # llama3: frequencies with few rotations within the original context are divided by `factor`, those with many stay.
    channels, factor = head_size(config), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, channels, 2).float() / channels)
    rotations = rope["original_max_position_embeddings"] / wavelengths
    unscaled_share = ((rotations - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": 1 / ((1 - unscaled_share) / factor + unscaled_share)}
