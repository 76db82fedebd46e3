"""Tiny random language models of many families as folders, and their rounding to nearest."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.formats.checkpoint_folder.folder import list_quantizable
from scalepoint.numerics import E4M3, E8M0, FP4, QuantizationScheme, get_format
from scalepoint.spec import PerBlockGranularity, PerTensorGranularity, QuantizationSpec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, **GROUPED),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **GROUPED),
    "phi3": lambda: transformers.Phi3Config(**SIZES, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "olmo": lambda: transformers.OlmoConfig(**SIZES, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **GROUPED),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
}


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Source:
    """Save a random model of this family."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return Source.open(folder)


def round_to_nearest(
    weight: Tensor, spec: QuantizationSpec, dtype: torch.dtype, activation: QuantizationSpec | None = None
) -> QuantizedWeight:
    """Quantize a weight by rounding to nearest, with scales that are exact in `dtype`."""
    rows, columns = weight.shape
    number_format = get_format(spec.dtype)
    block_size = spec.granularity.block_size if isinstance(spec.granularity, PerBlockGranularity) else columns
    blocks = weight.to(torch.float32).reshape(rows, -1, block_size)
    largest = blocks.abs().amax(-1)
    if isinstance(spec.granularity, PerTensorGranularity):
        largest = largest.amax().expand_as(largest)
    outer = None
    if spec.dtype == FP4 and spec.scale_dtype == E4M3:
        outer = 2.0 ** (largest.amax() / (448 * 6)).log2().ceil()  # a power of two is exact in every runtime
        scale = (largest / 6 / outer).to(E4M3).to(torch.float32) * outer
    elif spec.scale_dtype == E8M0:
        scale = 2.0 ** (largest.log2().floor() - 2)
    elif spec.qscheme == QuantizationScheme.ASYMMETRIC:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / number_format.high).to(dtype).to(torch.float32)
        zero_point = (-low / scale).round().clamp(0, number_format.high).to(torch.int32)
        codes = ((blocks / scale[..., None]).round() + zero_point[..., None]).clamp(0, number_format.high)
        return QuantizedWeight(codes.reshape(weight.shape).to(torch.uint8), scale, spec, zero_point, activation)
    else:
        scale = (largest / number_format.high).to(dtype).to(torch.float32)
    steps = (blocks / scale[..., None]).clamp(number_format.low, number_format.high).reshape(weight.shape)
    if not number_format.is_float:
        return QuantizedWeight(steps.round().to(torch.int8), scale, spec, activation=activation)
    codes = round_float4(steps).to(E4M3) if spec.dtype == FP4 else steps.to(spec.dtype)
    return QuantizedWeight(codes, scale, spec, activation=activation, outer_scale=outer)


def round_float4(values: Tensor) -> Tensor:
    """Round to nearest, ties to even: argmin returns the first minimum, so values with last bit 0 come first."""
    grid = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])
    return grid[(values.abs()[..., None] - grid).abs().argmin(-1)] * values.sign()


def quantize(
    source: Source,
    spec: QuantizationSpec,
    activation: QuantizationSpec | None = None,
    *,
    scale_dtype: torch.dtype | None = None,
    choose: Callable[[str], QuantizationSpec | None] | None = None,
) -> QuantizedCheckpoint:
    """Quantize all layers except routers; or each layer with the spec that `choose` returns, None for float."""
    weights = {}
    for layer in list_quantizable(source):
        layer_spec = (None if layer.endswith("gate") else spec) if choose is None else choose(layer)
        if layer_spec is not None:
            weight = source.tensor(f"{layer}.weight")
            weight = weight.T if is_transposed(source, layer) else weight
            weights[f"{layer}.weight"] = round_to_nearest(weight, layer_spec, scale_dtype or weight.dtype, activation)
    return QuantizedCheckpoint(source, weights)


def is_transposed(source: Source, name: str) -> bool:
    """Whether the source stores this matrix as (in, out), as GPT-2's Conv1D layers do."""
    return source.model_type == "gpt2" and "transformer.h." in name


def load_model(folder: Path) -> transformers.PreTrainedModel:
    """Load a folder like a user, without the network."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")


def load_reference(checkpoint: QuantizedCheckpoint, folder: Path) -> transformers.PreTrainedModel:
    """Load the source's model with the dequantized weights."""
    source = checkpoint.source
    shutil.copytree(source.folder, folder, dirs_exist_ok=True)
    tensors = {name: source.tensor(name) for name in source.tensors}
    for name, weight in checkpoint.quantized.items():
        values = weight.dequantize(source.tensors[name].dtype)
        tensors[name] = (values.T if is_transposed(source, name) else values).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(folder)


@torch.no_grad()
def compute_logits(model: transformers.PreTrainedModel) -> Tensor:
    return model(torch.arange(3, 19)[None]).logits
