"""The supported families of language models: for each a function that turns config.json into a Decoder.

`_llama_like` reads the keys that most configs share. A family passes the fields of Decoder that differ:

    qk_norm          "head": a norm over each head of queries and keys; "all": one norm over all heads
    norm_offset      1: the checkpoint stores the weight of a norm minus 1 (Gemma)
    interleaves_qkv  rows of qkv are q, k, v of the first head, then of the second, ... (GPT-NeoX)
    is_transposed    matrices are stored as (in, out), as by Conv1D of GPT-2
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
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
# Layers of a block: the role that network.py uses -> the name in the checkpoint. A name that no block has is not read:
# a block with experts does not use GATED.
ATTENTION = {part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")}
GATED = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
PRE_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
POST_NORMS = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
SANDWICH_NORMS = {**POST_NORMS, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
ROUTER = {"router": "mlp.gate"}
SHARED_EXPERT = {
    **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
}
EXPERTS = {part: f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL_EXPERTS = {
    "gate": "block_sparse_moe.experts.{expert}.w1",
    "up": "block_sparse_moe.experts.{expert}.w3",
    "down": "block_sparse_moe.experts.{expert}.w2",
}


def describe_decoder(config: Config) -> Decoder:
    """Return the description of a model; raise TargetError if its family is not supported."""
    model_type = str(config.get("model_type", ""))
    if model_type not in FAMILIES:
        raise TargetError(
            f"ort-genai does not support models of type {model_type!r} (model_type in config.json), only "
            f"{', '.join(sorted(FAMILIES))}"
        )
    try:
        return FAMILIES[model_type](config)
    except KeyError as error:
        raise TargetError(f"config.json of a {model_type} model lacks {error.args[0]!r}") from error


def _llama_like(config: Config, model_type: str, parts: Mapping[str, str], **overrides: Any) -> Decoder:
    """Describe a model whose config has the keys of Llama; `overrides` are fields of Decoder that differ."""
    head_count, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_size = int(config.get("head_dim") or hidden_size // head_count)
    fields = {
        "model_type": model_type,
        "vocabulary_size": int(config["vocab_size"]),
        "hidden_size": hidden_size,
        "head_count": head_count,
        "kv_head_count": int(config.get("num_key_value_heads") or head_count),
        "head_size": head_size,
        "context_length": int(config["max_position_embeddings"]),
        "norm_epsilon": float(config.get("rms_norm_eps") or 1e-5),
        "names": _name_tensors(parts),
        "blocks": _describe_blocks(config, head_size),
        "has_tied_head": bool(config.get("tie_word_embeddings", False)),
    }
    if "activation" not in overrides:  # Gemma's config may lack both keys
        fields["activation"] = _find_activation(config.get("hidden_act") or config["hidden_activation"])
    decoder = Decoder(**{**fields, **overrides})
    limits = [block.rotary.max_positions for block in decoder.blocks if block.rotary and block.rotary.max_positions]
    return replace(decoder, context_length=min([decoder.context_length, *limits]))


def _name_tensors(parts: Mapping[str, str], norm: str = "model.norm") -> TensorNames:
    return TensorNames(
        embedding="model.embed_tokens", norm=norm, head="lm_head", block="model.layers.{block}.", parts=parts
    )


def _describe_blocks(config: Config, head_size: int) -> tuple[DecoderBlock, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layer_types = config.get("layer_types") or [
        _layer_type(config, index) for index in range(int(config["num_hidden_layers"]))
    ]
    rotary_base_by_layer_type = {"sliding_attention": config.get("rope_local_base_freq")}
    return tuple(
        DecoderBlock(
            rotary=describe_rotary(config, head_size, layer_type, rotary_base_by_layer_type.get(layer_type)),
            window=int(window) if window and layer_type == "sliding_attention" else None,
            has_experts=_has_experts(config, index),
        )
        for index, layer_type in enumerate(layer_types)
    )


def _layer_type(config: Config, index: int) -> str:
    """Return the layer type of a block as the code of older transformers does, whose configs have no `layer_types`."""
    family = str(config["model_type"])
    full_attention_period = {
        "gemma2": 2,
        "gemma3_text": int(config.get("sliding_window_pattern") or 6),
        "olmo3": 4,
    }
    if family in full_attention_period:
        has_window = (index + 1) % full_attention_period[family] != 0
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
        raise TargetError(f"ort-genai supports the activations {', '.join(ACTIVATIONS)}, not {name!r}")
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
        raise TargetError("ort-genai does not support phi models with qk_layernorm")
    parts = {
        **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v")},
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
        "before_attention": "input_layernorm",
    }
    names = _name_tensors(parts, norm="model.final_layernorm")
    epsilon = float(config["layer_norm_eps"])
    return _llama_like(config, "phi", parts, names=names, norm="layer", is_parallel=True, norm_epsilon=epsilon)


def _gemma(config: Config) -> Decoder:
    hidden_act = config.get("hidden_act") or "gelu_pytorch_tanh"
    if hidden_act == "gelu":  # in configs of the first release, which meant the approximation
        hidden_act = "gelu_pytorch_tanh"
    activation = config.get("hidden_activation") or hidden_act
    return _llama_like(config, "gemma", {**ATTENTION, **GATED, **PRE_NORMS}, **_gemma_settings(config, activation))


def _gemma2_or_3(config: Config) -> Decoder:
    model_type = str(config["model_type"])
    is_gemma3 = model_type == "gemma3_text"
    parts = {**ATTENTION, **GATED, **SANDWICH_NORMS, **(QK_NORM if is_gemma3 else {})}
    return _llama_like(
        config,
        model_type,
        parts,
        qk_norm="head" if is_gemma3 else "",
        attention_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        **_gemma_settings(config, config["hidden_activation"]),
    )


def _gemma_settings(config: Config, activation: str) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise TargetError(
            "ort-genai supports decoders only: this Gemma also attends to later tokens (use_bidirectional_attention)"
        )
    return {
        "activation": _find_activation(activation),
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(float(config["hidden_size"])),
        "has_tied_head": bool(config.get("tie_word_embeddings", True)),
    }


def _olmo(config: Config) -> Decoder:
    # The norms of OLMo have no weights in the checkpoint. A norm needs a name to exist in the graph.
    parts = {**ATTENTION, **GATED, **PRE_NORMS}
    return _llama_like(config, "olmo", parts, norm="layer", norm_epsilon=1e-5, qkv_clip=config.get("clip_qkv"))


def _olmo2_or_3(config: Config) -> Decoder:
    parts = {**ATTENTION, **GATED, **POST_NORMS, **QK_NORM}
    return _llama_like(config, str(config["model_type"]), parts, qk_norm="all")


def _mixture(config: Config, extra_parts: Mapping[str, str] | None = None, **overrides: Any) -> Decoder:
    """Describe Qwen-MoE, OLMoE or Mixtral, whose checkpoints store experts one by one.

    Some blocks of Qwen-MoE have the layers of GATED instead of experts.
    """
    model_type = str(config["model_type"])
    is_mixtral = model_type == "mixtral"
    experts = DecoderExperts(
        count=int(config.get("num_experts") or config["num_local_experts"]),
        active_count=int(config["num_experts_per_tok"]),
        normalizes_weights=is_mixtral or bool(config.get("norm_topk_prob", False)),
        names=MIXTRAL_EXPERTS if is_mixtral else EXPERTS,
    )
    router = {"router": "block_sparse_moe.gate"} if is_mixtral else ROUTER
    parts = {**ATTENTION, **GATED, **PRE_NORMS, **router, **(extra_parts or {})}
    return _llama_like(config, model_type, parts, experts=experts, **overrides)


def _qwen2_moe(config: Config) -> Decoder:
    return _mixture(config, SHARED_EXPERT, has_shared_expert=True)


def _qwen3_moe(config: Config) -> Decoder:
    return _mixture(config, QK_NORM, qk_norm="head")


def _olmoe(config: Config) -> Decoder:
    return _mixture(config, QK_NORM, qk_norm="all", qkv_clip=config.get("clip_qkv"))


def _gpt2(config: Config) -> Decoder:
    if config.get("add_cross_attention") or config.get("scale_attn_by_inverse_layer_idx"):
        raise TargetError("ort-genai does not support GPT-2 with cross attention or scale_attn_by_inverse_layer_idx")
    parts = {
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "before_attention": "ln_1",
        "before_mlp": "ln_2",
    }
    head_count, hidden_size = int(config["n_head"]), int(config["n_embd"])
    return Decoder(
        model_type="gpt2",
        vocabulary_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        head_count=head_count,
        kv_head_count=head_count,
        head_size=hidden_size // head_count,
        context_length=int(config["n_positions"]),
        norm_epsilon=float(config["layer_norm_epsilon"]),
        names=TensorNames(
            embedding="wte", norm="ln_f", head="lm_head", block="h.{block}.", parts=parts, positions="wpe"
        ),
        blocks=(DecoderBlock(),) * int(config["n_layer"]),
        has_tied_head=bool(config.get("tie_word_embeddings", True)),
        activation=_find_activation(config["activation_function"]),
        norm="layer",
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
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
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        block="gpt_neox.layers.{block}.",
        parts=parts,
    )
    return _llama_like(
        config,
        "gpt_neox",
        parts,
        names=names,
        norm="layer",
        norm_epsilon=float(config["layer_norm_eps"]),
        is_parallel=bool(config.get("use_parallel_residual", True)),
        interleaves_qkv=True,
        kv_head_count=int(config["num_attention_heads"]),
    )


FAMILIES: dict[str, Callable[[Config], Decoder]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "phi": _phi,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2_or_3,
    "gemma3_text": _gemma2_or_3,
    "olmo": _olmo,
    "olmo2": _olmo2_or_3,
    "olmo3": _olmo2_or_3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixture,
}
