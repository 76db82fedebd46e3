"""Tiny language models in folders, their rounding to nearest, and the simulation of the result."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.formats.gguf import round_to_block_type
from scalepoint.numerics import get_format
from scalepoint.spec import ExtendedQuantizationSpec

VOCABULARY_SIZE = 320
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 128, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
GEMMA = {"head_dim": 64, "tie_word_embeddings": True, "query_pre_attn_scalar": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


FAMILIES = {
    "llama": SIZES,
    "llama, tied": {**SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "llama, scaled rope": {**SIZES, "model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {**SIZES, "head_dim": 32},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 32},
    "qwen2_moe": {**SIZES, **EXPERTS, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**SIZES, **EXPERTS, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
    "gemma": {**SIZES, "head_dim": 64, "tie_word_embeddings": True},
    "gemma2": {**SIZES, **GEMMA},
    "gemma3_text": {**SIZES, **GEMMA, "num_hidden_layers": 6, "sliding_window": 16},
    "phi": {**SIZES, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": SIZES,
    "gpt2": {
        "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY_SIZE, "bos_token_id": 0,
        "eos_token_id": 0, "initializer_range": 0.1,
    },
    "gpt_neox": {**without(SIZES, "num_key_value_heads"), "hidden_act": "gelu_new"},
    "olmo": {**SIZES, "clip_qkv": 2.0},
    "olmo2": SIZES,
    "olmoe": {**SIZES, **EXPERTS, "num_key_value_heads": 4},
}  # fmt: skip


def save_byte_level_tokenizer(folder):
    """Save a byte-level BPE tokenizer with a few merges, which splits text like GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 10,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog and the other cat, that they then had"] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "add_bos_token": False,
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def save_checkpoint(family, folder, *, dtype=torch.float32, **fields):
    """Save a model with random weights, norms and biases."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = {**FAMILIES[family], **fields}
    config = AutoConfig.for_model(settings.pop("model_type", family), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))
            elif "embed" in name or "wte" in name:
                value.mul_(5 if "gemma" not in family else 1)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    save_byte_level_tokenizer(folder)
    return Source.open(folder)


def block_spec(dtype, block_size, **fields):
    """The spec of a weight in blocks."""
    return ExtendedQuantizationSpec(
        dtype=dtype,
        granularity={"type": "per_block", "block_size": block_size, "axis": 1},
        **{"qscheme": "symmetric", **fields},
    )


def round_to_nearest(weight, spec, block_size):
    """Quantize by rounding to nearest, with scales that GGUF can store."""
    number_format = get_format(spec.dtype)
    low, high = int(number_format.low), int(number_format.high)
    values = weight.float().reshape(weight.shape[0], -1, block_size)
    minimum, maximum = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
    if spec.qscheme == "symmetric":
        scale, _ = round_to_block_type(spec, weight.shape[1], torch.maximum(-minimum, maximum) / max(high, 1))
        codes = (values / scale[..., None]).round().clamp(low, high)
        return QuantizedWeight(codes.reshape(weight.shape).to(number_format.storage), scale, spec)
    if spec.qformulation == "minval":
        scale, minval = round_to_block_type(spec, weight.shape[1], (maximum - minimum) / (high - low), minimum)
        codes = ((values - minval[..., None]) / scale[..., None]).round().clamp(0, high - low) + low
        return QuantizedWeight(codes.reshape(weight.shape).to(number_format.storage), scale, spec, minval=minval)
    scale, _ = round_to_block_type(spec, weight.shape[1], (maximum - minimum) / (high - low))
    zero_point = (-minimum / scale).round().clamp(0, high)
    codes = (values / scale[..., None] + zero_point[..., None]).round().clamp(low, high)
    return QuantizedWeight(codes.reshape(weight.shape).to(number_format.storage), scale, spec, zero_point.int())


FLOAT_PARTS = ("embed", "wte", "wpe", "lm_head", "mlp.gate.", "moe.gate.", "expert_gate")


def quantize_checkpoint(source, spec, block_size):
    """Round every matrix to nearest, except those whose names contain one of FLOAT_PARTS."""
    weights = {}
    for name, stored in source.tensors.items():
        if len(stored.shape) == 2 and not any(part in name for part in FLOAT_PARTS):
            weight = source.tensor(name, torch.float32)
            weight = weight.T.contiguous() if is_transposed(source, name) else weight
            weights[name] = round_to_nearest(weight, spec, block_size)
    return QuantizedCheckpoint(source, weights)


def is_transposed(source, name):
    return source.model_type == "gpt2" and ".c_" in name


def simulate(checkpoint, folder):
    """Load the transformers model with the dequantized weights in float32."""
    source = checkpoint.source
    state = {name: source.tensor(name, torch.float32) for name in source.tensors}
    for name, weight in checkpoint.quantized.items():
        values = weight.dequantize()
        state[name] = values.T.contiguous() if is_transposed(source, name) else values
    shutil.copytree(source.folder, folder)
    save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def sqnr(actual, expected):
    """The signal to quantization noise ratio in dB."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise.clamp(min=1e-30)))
