"""What llama.cpp must know of an architecture, as a table: its name there, how its tensors differ, what it cannot run.

Names of tensors come from the gguf package. The rows of q and k turn where llama.cpp rotates neighbours and
transformers halves; rows of a fused q, k, v stand head by head in GPT-NeoX and are sorted. The rest is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import ExportError

Config = Mapping[str, Any]
RowOrder = Callable[[Config, int], Tensor]
SILU, GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def count_heads(config: Config) -> int:
    return int(require_key(config, "num_attention_heads", "n_head"))


def head_size(config: Config) -> int:
    return int(config.get("head_dim") or require_key(config, "hidden_size", "n_embd") // count_heads(config))


def require_key(config: Config, *names: str) -> Any:
    """The first of the keys that the config has."""
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if found is None:
        raise ExportError(f"config.json has no {names[0]}, which a GGUF file must tell")
    return found


def interleave_halves(config: Config, rows: int) -> Tensor:
    """Rows of a head from halves (0 1 2 .. | n n+1 ..) to neighbours (0 n 1 n+1 ..)."""
    size = head_size(config)
    return torch.arange(rows).reshape(-1, 2, size // 2).transpose(1, 2).flatten()


def split_qkv_rows(config: Config, rows: int) -> Tensor:
    """Rows from (head, q k v) to (q k v, head)."""
    return torch.arange(rows).reshape(count_heads(config), 3, -1).transpose(0, 1).flatten()


@dataclass(frozen=True)
class Architecture:
    """One model type of transformers."""

    name: str  # of MODEL_ARCH
    rows: Mapping[str, RowOrder]  # how the rows of layers are ordered, by the end of their names
    activations: tuple[str, ...] = SILU
    norm_shift: float = 0.0
    transposed: tuple[str, ...] = ()  # layers that keep (in, out)
    is_tied: bool | None = None  # True: always tied in llama.cpp; False: it wants a head of its own; None: both
    norms_experts: bool | None = None  # whether llama.cpp makes the weights of the chosen experts sum to 1
    has_layer_norm: bool = False
    says_rope: bool = False  # the rotated part of a head
    check: Callable[[Config], str | None] = lambda config: None  # why llama.cpp cannot run a config


def _check_no_window(config: Config) -> str | None:
    if config.get("use_sliding_window"):
        return "use_sliding_window is on, which llama.cpp does not know for this architecture"
    return None


def _check_no_dense_layers(config: Config) -> str | None:
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        return "some layers have no experts (mlp_only_layers, decoder_sparse_step)"
    return _check_no_window(config)


def _check_gemma(every: int) -> Callable[[Config], str | None]:
    def check(config: Config) -> str | None:
        scalar, size = config.get("query_pre_attn_scalar"), head_size(config)
        layers = int(config["num_hidden_layers"])
        if layers in (46, 62):  # the models of 27 billion parameters, which it knows by their depth
            size = config["hidden_size"] // count_heads(config)
        if scalar is not None and scalar != size:
            return f"query_pre_attn_scalar={scalar}: llama.cpp divides by the root of {size}"
        kinds = config.get("layer_types") or []
        if any((kind == "full_attention") != ((at + 1) % every == 0) for at, kind in enumerate(kinds)):
            return f"layer_types: llama.cpp takes every {every}th layer as one of full attention"
        return None

    return check


def _check_olmoe(config: Config) -> str | None:
    if (config.get("num_key_value_heads") or count_heads(config)) != count_heads(config):
        return "its queries share keys (num_key_value_heads), which llama.cpp does not know for this architecture"
    return None


def _check_gpt2(config: Config) -> str | None:
    if not config.get("scale_attn_weights", True) or config.get("scale_attn_by_inverse_layer_idx"):
        return "attention scores are scaled in another way"
    return None


def _check_phi(config: Config) -> str | None:
    return (
        "qk_layernorm is on, which llama.cpp does not know for this architecture"
        if config.get("qk_layernorm")
        else None
    )


INTERLEAVED_QK = {"q_proj": interleave_halves, "k_proj": interleave_halves}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LLAMA", INTERLEAVED_QK, says_rope=True),
    "mistral": Architecture("LLAMA", INTERLEAVED_QK, says_rope=True),
    "mixtral": Architecture("LLAMA", INTERLEAVED_QK, says_rope=True, norms_experts=True),
    "qwen2": Architecture("QWEN2", {}, check=_check_no_window),
    "qwen3": Architecture("QWEN3", {}, check=_check_no_window),
    "qwen2_moe": Architecture("QWEN2MOE", {}, is_tied=False, norms_experts=False, check=_check_no_dense_layers),
    "qwen3_moe": Architecture("QWEN3MOE", {}, norms_experts=True, check=_check_no_dense_layers),
    "gemma": Architecture("GEMMA", {}, GELU, 1.0, is_tied=True),
    "gemma2": Architecture("GEMMA2", {}, GELU, 1.0, is_tied=True, check=_check_gemma(2)),
    "gemma3_text": Architecture("GEMMA3", {}, GELU, 1.0, check=_check_gemma(6)),
    "phi": Architecture("PHI2", {}, GELU, is_tied=False, has_layer_norm=True, says_rope=True, check=_check_phi),
    "phi3": Architecture("PHI3", {}, says_rope=True),
    "gpt2": Architecture(
        "GPT2", {}, GELU, transposed=("c_attn", "c_proj", "c_fc"), has_layer_norm=True, check=_check_gpt2
    ),
    "gpt_neox": Architecture(
        "GPTNEOX", {"query_key_value": split_qkv_rows}, GELU, is_tied=False, has_layer_norm=True, says_rope=True
    ),
    "olmo": Architecture("OLMO", INTERLEAVED_QK, has_layer_norm=True),
    "olmo2": Architecture("OLMO2", {}, is_tied=False),
    "olmoe": Architecture("OLMOE", {}, is_tied=False, norms_experts=False, check=_check_olmoe),
}


def find_architecture(config: Config) -> Architecture:
    """By the model type, or a refusal that says what is known or what stands against it."""
    kind = str(config.get("model_type", ""))
    found = ARCHITECTURES.get(kind)
    if found is None:
        raise ExportError(
            f"target gguf does not write models of the type {kind!r} (model_type in config.json): it writes "
            f"{', '.join(sorted(ARCHITECTURES))}. The targets compressed-tensors and gptq take more families"
        )
    activation = config.get("hidden_activation") or config.get("hidden_act") or config.get("activation_function")
    why = found.check(config)
    if activation is not None and activation not in found.activations:
        why = f"its activation is {activation}, llama.cpp computes {found.activations[0]}"
    norms = config.get("norm_topk_prob")
    if norms is None and kind != "mixtral" and found.norms_experts is not None:
        norms = False  # what transformers takes where config.json leaves it out
    if norms not in (None, found.norms_experts):
        why = f"norm_topk_prob={norms}, llama.cpp always takes {found.norms_experts}"
    if found.is_tied and config.get("tie_word_embeddings") is False:
        why = "its head is not the embedding, llama.cpp takes the embedding"
    if why:
        raise ExportError(f"llama.cpp cannot run this {kind}: {why}")
    return found
