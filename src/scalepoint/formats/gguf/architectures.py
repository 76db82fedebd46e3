"""The architectures of llama.cpp: their names, how their tensors differ, and which configs llama.cpp cannot run.

Names of tensors come from the gguf package. Rows of q and k are reordered where llama.cpp rotates neighbouring channels
and transformers rotates halves. GPT-NeoX stores q, k, v head by head; llama.cpp expects all of q, then k, then v.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import ExportError

Config = Mapping[str, Any]
RowOrder = Callable[[Config, int], Tensor]
SILU, GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # names in config.json


def count_heads(config: Config) -> int:
    return int(require_key(config, "num_attention_heads", "n_head"))


def head_size(config: Config) -> int:
    return int(config.get("head_dim") or require_key(config, "hidden_size", "n_embd") // count_heads(config))


def require_key(config: Config, *names: str) -> Any:
    """Return the value of the first of these keys that the config has."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ExportError(f"config.json has no {names[0]}, which a GGUF file needs")


def interleave_halves(config: Config, rows: int) -> Tensor:
    """Return the row order that interleaves the two halves of each head: 0, n, 1, n+1, ..."""
    size = head_size(config)
    return torch.arange(rows).reshape(-1, 2, size // 2).transpose(1, 2).flatten()


def split_qkv_rows(config: Config, rows: int) -> Tensor:
    """Return the row order that turns (head, q k v) into (q k v, head)."""
    return torch.arange(rows).reshape(count_heads(config), 3, -1).transpose(0, 1).flatten()


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp runs one model type of transformers.

    Attributes:
        name: The name in gguf.MODEL_ARCH.
        row_orders: Reordering of a layer's rows, by the last part of the layer's path.
        activations: The activation, by its names in config.json.
        norm_offset: Added to the weights of norms.
        transposed: Layers that the checkpoint stores as (in, out).
        is_tied: Whether the head is the embedding: True: always; False: never, llama.cpp needs a head; None: either.
        normalizes_experts: Whether llama.cpp scales the weights of the chosen experts to sum 1; None: no experts.
        has_layer_norm: Whether norms are layer norms; else they are RMS norms.
        writes_rope_dimensions: Whether the number of rotated channels is written to the file.
        check: Returns why llama.cpp cannot run a config, or None.
    """

    name: str
    row_orders: Mapping[str, RowOrder]
    activations: tuple[str, ...] = SILU
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()
    is_tied: bool | None = None
    normalizes_experts: bool | None = None
    has_layer_norm: bool = False
    writes_rope_dimensions: bool = False
    check: Callable[[Config], str | None] = lambda config: None


def _check_no_window(config: Config) -> str | None:
    if config.get("use_sliding_window"):
        return "use_sliding_window is on, which llama.cpp does not support for this architecture"
    return None


def _check_no_dense_layers(config: Config) -> str | None:
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        return "some layers have no experts (mlp_only_layers, decoder_sparse_step)"
    return _check_no_window(config)


def _check_gemma(full_attention_period: int) -> Callable[[Config], str | None]:
    def check(config: Config) -> str | None:
        scalar, divisor = config.get("query_pre_attn_scalar"), head_size(config)
        if int(config["num_hidden_layers"]) in (46, 62):  # llama.cpp recognizes the 27B models by their depth
            divisor = config["hidden_size"] // count_heads(config)
        if scalar is not None and scalar != divisor:
            return f"query_pre_attn_scalar={scalar}: llama.cpp divides by the root of {divisor}"
        for index, layer_type in enumerate(config.get("layer_types") or []):
            has_full_attention = (index + 1) % full_attention_period == 0
            if (layer_type == "full_attention") != has_full_attention:
                return f"layer_types: in llama.cpp every {full_attention_period}th layer has full attention"
        return None

    return check


def _check_olmoe(config: Config) -> str | None:
    if (config.get("num_key_value_heads") or count_heads(config)) != count_heads(config):
        return "its queries share keys (num_key_value_heads), which llama.cpp does not support for this architecture"
    return None


def _check_gpt2(config: Config) -> str | None:
    if not config.get("scale_attn_weights", True) or config.get("scale_attn_by_inverse_layer_idx"):
        return "attention scores are scaled differently (scale_attn_weights, scale_attn_by_inverse_layer_idx)"
    return None


def _check_phi(config: Config) -> str | None:
    if config.get("qk_layernorm"):
        return "qk_layernorm is on, which llama.cpp does not support for this architecture"
    return None


INTERLEAVED_QK = {"q_proj": interleave_halves, "k_proj": interleave_halves}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LLAMA", INTERLEAVED_QK, writes_rope_dimensions=True),
    "mistral": Architecture("LLAMA", INTERLEAVED_QK, writes_rope_dimensions=True),
    "mixtral": Architecture("LLAMA", INTERLEAVED_QK, writes_rope_dimensions=True, normalizes_experts=True),
    "qwen2": Architecture("QWEN2", {}, check=_check_no_window),
    "qwen3": Architecture("QWEN3", {}, check=_check_no_window),
    "qwen2_moe": Architecture("QWEN2MOE", {}, is_tied=False, normalizes_experts=False, check=_check_no_dense_layers),
    "qwen3_moe": Architecture("QWEN3MOE", {}, normalizes_experts=True, check=_check_no_dense_layers),
    "gemma": Architecture("GEMMA", {}, GELU, 1.0, is_tied=True),
    "gemma2": Architecture("GEMMA2", {}, GELU, 1.0, is_tied=True, check=_check_gemma(2)),
    "gemma3_text": Architecture("GEMMA3", {}, GELU, 1.0, check=_check_gemma(6)),
    "phi": Architecture(
        "PHI2", {}, GELU, is_tied=False, has_layer_norm=True, writes_rope_dimensions=True, check=_check_phi
    ),
    "phi3": Architecture("PHI3", {}, writes_rope_dimensions=True),
    "gpt2": Architecture(
        "GPT2", {}, GELU, transposed=("c_attn", "c_proj", "c_fc"), has_layer_norm=True, check=_check_gpt2
    ),
    "gpt_neox": Architecture(
        "GPTNEOX",
        {"query_key_value": split_qkv_rows},
        GELU,
        is_tied=False,
        has_layer_norm=True,
        writes_rope_dimensions=True,
    ),
    "olmo": Architecture("OLMO", INTERLEAVED_QK, has_layer_norm=True),
    "olmo2": Architecture("OLMO2", {}, is_tied=False),
    "olmoe": Architecture("OLMOE", {}, is_tied=False, normalizes_experts=False, check=_check_olmoe),
}


def find_architecture(config: Config) -> Architecture:
    """Return the architecture of a model; raise ExportError if llama.cpp cannot run the model."""
    model_type = str(config.get("model_type", ""))
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise ExportError(
            f"target gguf does not support models of type {model_type!r} (model_type in config.json), only "
            f"{', '.join(sorted(ARCHITECTURES))}. The targets compressed-tensors and gptq support more families"
        )
    reason = _find_difference(config, model_type, architecture)
    if reason:
        raise ExportError(f"llama.cpp cannot run this {model_type}: {reason}")
    return architecture


def _find_difference(config: Config, model_type: str, architecture: Architecture) -> str | None:
    """Return what llama.cpp would compute differently from the model, or None."""
    if architecture.is_tied and config.get("tie_word_embeddings") is False:
        return "its head is not the embedding, llama.cpp always uses the embedding"
    normalizes_experts = config.get("norm_topk_prob")
    if normalizes_experts is None and model_type != "mixtral" and architecture.normalizes_experts is not None:
        normalizes_experts = False  # the default of transformers
    if normalizes_experts not in (None, architecture.normalizes_experts):
        return f"norm_topk_prob={normalizes_experts}, llama.cpp always uses {architecture.normalizes_experts}"
    activation = config.get("hidden_activation") or config.get("hidden_act") or config.get("activation_function")
    if activation is not None and activation not in architecture.activations:
        return f"its activation is {activation}, llama.cpp computes {architecture.activations[0]}"
    return architecture.check(config)
