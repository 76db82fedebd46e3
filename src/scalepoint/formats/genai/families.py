"""The families of language models that can be written, each a function from config.json to a Decoder."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from scalepoint.errors import TargetError
from scalepoint.formats.genai.decoder import Activation, Decoder, DecoderBlock, DecoderExperts, TensorNames
from scalepoint.formats.genai.rotary import describe_rotary

Config = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
ATTENTION = {part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")}
GATED = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
PRE_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
POST_NORMS = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
SANDWICH_NORMS = {**POST_NORMS, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
ROUTER = {"router": "mlp.gate"}
SHARED = {
    **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
}
EXPERTS = {part: f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL = {
    "gate": "block_sparse_moe.experts.{expert}.w1",
    "up": "block_sparse_moe.experts.{expert}.w3",
    "down": "block_sparse_moe.experts.{expert}.w2",
}


def describe_decoder(config: Config) -> Decoder:
    """The description of a model, or what can be written instead."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        raise TargetError(
            f"ort-genai does not write models of the type {kind!r} (model_type in config.json): it writes "
            f"{', '.join(sorted(FAMILIES))}"
        )
    try:
        return FAMILIES[kind](config)
    except KeyError as error:
        raise TargetError(f"config.json of a {kind} model lacks {error.args[0]!r}") from error


def _llama_like(config: Config, kind: str, parts: Mapping[str, str], **further: Any) -> Decoder:
    """Llama, and what is called as it is there."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head = int(config.get("head_dim") or hidden // heads)
    found = {
        "kind": kind,
        "vocabulary": int(config["vocab_size"]),
        "hidden": hidden,
        "heads": heads,
        "groups": int(config.get("num_key_value_heads") or heads),
        "head": head,
        "context": int(config["max_position_embeddings"]),
        "epsilon": float(config.get("rms_norm_eps") or 1e-5),
        "names": TensorNames("model.embed_tokens", "model.norm", "lm_head", "model.layers.{block}.", parts),
        "blocks": _describe_blocks(config, head),
        "is_tied": bool(config.get("tie_word_embeddings", False)),
        "activation": _find_activation(config.get("hidden_act") or config["hidden_activation"]),
    }
    made = Decoder(**{**found, **further})
    longest = [each.rotary.longest for each in made.blocks if each.rotary and each.rotary.longest]
    return Decoder(**{**found, **further, "context": min([made.context, *longest])})


def _describe_blocks(config: Config, head: int) -> tuple[DecoderBlock, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or [
        _attention_kind(config, index) for index in range(int(config["num_hidden_layers"]))
    ]
    base = {"sliding_attention": config.get("rope_local_base_freq")}
    return tuple(
        DecoderBlock(
            describe_rotary(config, head, kind, base.get(kind)),
            int(window) if window and kind == "sliding_attention" else None,
            _has_experts(config, index),
        )
        for index, kind in enumerate(kinds)
    )


def _attention_kind(config: Config, index: int) -> str:
    """Whether a block has the window, where an older config leaves it to the code."""
    family = str(config["model_type"])
    every = {"gemma2": 2, "gemma3_text": int(config.get("sliding_window_pattern") or 6), "olmo3": 4}
    if family in every:
        has_window = (index + 1) % every[family] != 0
    elif family.startswith("qwen"):
        has_window = index >= int(config.get("max_window_layers") or 0)
    else:
        has_window = True
    return "sliding_attention" if has_window else "full_attention"


def _has_experts(config: Config, index: int) -> bool:
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    is_sparse = (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0
    return bool(count and is_sparse and index not in (config.get("mlp_only_layers") or ()))


def _find_activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise TargetError(f"ort-genai writes the activations {', '.join(ACTIVATIONS)}, not {name!r}")
    return ACTIVATIONS[name]


def _llama(config: Config) -> Decoder:
    return _llama_like(config, str(config["model_type"]), {**ATTENTION, **GATED, **PRE_NORMS})


def _qwen3(config: Config) -> Decoder:
    return _llama_like(config, "qwen3", {**ATTENTION, **GATED, **PRE_NORMS, **QK_NORM}, qk_norm="head")


def _phi3(config: Config) -> Decoder:
    parts = {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj"}
    return _llama_like(config, "phi3", {**parts, "down": "mlp.down_proj", **PRE_NORMS})


def _phi(config: Config) -> Decoder:
    if config.get("qk_layernorm"):
        raise TargetError("ort-genai does not write phi models with qk_layernorm")
    parts = {
        **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v")},
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "before_attention": "input_layernorm",
    }
    names = TensorNames("model.embed_tokens", "model.final_layernorm", "lm_head", "model.layers.{block}.", parts)
    epsilon = float(config["layer_norm_eps"])
    return _llama_like(config, "phi", parts, names=names, norm="layer", is_parallel=True, epsilon=epsilon)


def _gemma(config: Config) -> Decoder:
    hidden = config.get("hidden_activation") or "gelu_pytorch_tanh"  # what its code takes, whatever hidden_act says
    return _llama_like(config, "gemma", {**ATTENTION, **GATED, **PRE_NORMS}, **_gemma_settings(config, hidden))


def _gemma2(config: Config) -> Decoder:
    kind = str(config["model_type"])
    is_third = kind == "gemma3_text"
    parts = {**ATTENTION, **GATED, **SANDWICH_NORMS, **(QK_NORM if is_third else {})}
    return _llama_like(
        config,
        kind,
        parts,
        qk_norm="head" if is_third else "",
        scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        **_gemma_settings(config, config["hidden_activation"]),
    )


def _gemma_settings(config: Config, activation: str) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise TargetError(
            "ort-genai writes decoders: this Gemma looks at later words too (use_bidirectional_attention)"
        )
    return {
        "activation": _find_activation(activation),
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(float(config["hidden_size"])),
        "is_tied": bool(config.get("tie_word_embeddings", True)),
    }


def _olmo(config: Config) -> Decoder:
    parts = {**ATTENTION, **GATED, **PRE_NORMS}
    return _llama_like(config, "olmo", parts, norm="layer", epsilon=1e-5, clip=config.get("clip_qkv"))


def _olmo2(config: Config) -> Decoder:
    parts = {**ATTENTION, **GATED, **POST_NORMS, **QK_NORM}
    return _llama_like(config, str(config["model_type"]), parts, qk_norm="all")


def _mixture(config: Config, **further: Any) -> Decoder:
    """Qwen-MoE, OLMoE, Mixtral: experts by their names in the checkpoint."""
    kind = str(config["model_type"])
    is_mixtral = kind == "mixtral"
    experts = DecoderExperts(
        count=int(config.get("num_experts") or config["num_local_experts"]),
        used=int(config["num_experts_per_tok"]),
        is_normalized=is_mixtral or bool(config.get("norm_topk_prob", False)),
        names=MIXTRAL if is_mixtral else EXPERTS,
    )
    router = {"router": "block_sparse_moe.gate"} if is_mixtral else ROUTER
    parts = {**ATTENTION, **GATED, **PRE_NORMS, **router, **further.pop("parts", {})}
    return _llama_like(config, kind, parts, experts=experts, **further)


def _qwen2_moe(config: Config) -> Decoder:
    return _mixture(config, parts=SHARED, has_shared=True)


def _qwen3_moe(config: Config) -> Decoder:
    return _mixture(config, parts=QK_NORM, qk_norm="head")


def _olmoe(config: Config) -> Decoder:
    return _mixture(config, parts=QK_NORM, qk_norm="all", clip=config.get("clip_qkv"))


def _gpt2(config: Config) -> Decoder:
    if config.get("add_cross_attention") or config.get("scale_attn_by_inverse_layer_idx"):
        raise TargetError("ort-genai does not write GPT-2 with cross attention or scale_attn_by_inverse_layer_idx")
    parts = {
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "before_attention": "ln_1",
        "before_mlp": "ln_2",
    }
    heads, hidden = int(config["n_head"]), int(config["n_embd"])
    return Decoder(
        kind="gpt2",
        vocabulary=int(config["vocab_size"]),
        hidden=hidden,
        heads=heads,
        groups=heads,
        head=hidden // heads,
        context=int(config["n_positions"]),
        epsilon=float(config["layer_norm_epsilon"]),
        names=TensorNames("wte", "ln_f", "lm_head", "h.{block}.", parts, "wpe"),
        blocks=(DecoderBlock(),) * int(config["n_layer"]),
        is_tied=bool(config.get("tie_word_embeddings", True)),
        activation=_find_activation(config["activation_function"]),
        norm="layer",
        scale=None if config.get("scale_attn_weights", True) else 1.0,
        is_transposed=True,
    )


def _gpt_neox(config: Config) -> Decoder:
    parts = {
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        **PRE_NORMS,
    }
    names = TensorNames(
        "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", "gpt_neox.layers.{block}.", parts
    )
    return _llama_like(
        config,
        "gpt_neox",
        parts,
        names=names,
        norm="layer",
        epsilon=float(config["layer_norm_eps"]),
        is_parallel=bool(config.get("use_parallel_residual", True)),
        is_mixed=True,
        groups=int(config["num_attention_heads"]),
    )


FAMILIES: dict[str, Callable[[Config], Decoder]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "phi": _phi,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma2,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixture,
}
