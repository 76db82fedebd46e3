"""Tiny random models of every family as folders, their rounding to nearest, and exported graphs in ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationSpec

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SPARSE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, biases, llama3 angles": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama, yarn angles": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral, window": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi": ("PhiConfig", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "phi3": ("Phi3Config", {}),
    "phi3, long angles": ("Phi3Config", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 24, **WINDOWED}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 24, **WINDOWED}),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3, two kinds of angles": (
        "Olmo3Config",
        {**WINDOWED, "rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}},
    ),
    "gpt2": ("GPT2Config", {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25, "num_attention_heads": 1}),
    "gpt_neox, one after another": (
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "num_attention_heads": 2},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**SPARSE, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SPARSE, "norm_topk_prob": True, "head_dim": 32}),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def save_model(name: str, folder: Path) -> torch.nn.Module:
    """Save a model with weights large enough that every part affects the logits."""
    class_name, settings = FAMILIES[name]
    is_gpt2 = class_name == "GPT2Config"
    base = {key: value for key, value in BASE.items() if not (is_gpt2 and key in _NOT_IN_GPT2)}
    config = getattr(transformers, class_name)(**{**base, **settings})
    config._attn_implementation = "eager"  # the only implementation with soft caps
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=0.3 if "embed" in key or "wte" in key else 0.15)
            else:
                value.add_(torch.randn_like(value) * 0.1)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


_NOT_IN_GPT2 = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def int_spec(bits: int, block_size: int = 32, *, is_symmetric: bool = True) -> QuantizationSpec:
    """The spec of an integer weight in blocks; block_size=0: one scale per row."""
    dtype, scheme = (f"int{bits}", "symmetric") if is_symmetric else (f"uint{bits}", "asymmetric")
    granularity = {"type": "per_channel", "axis": 0}
    if block_size:
        granularity = {"type": "per_block", "block_size": block_size, "axis": 1}
    return QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity)


def round_to_nearest(weight: Tensor, spec: QuantizationSpec) -> QuantizedWeight:
    """Quantize a weight by rounding to nearest, with one scale per block or row."""
    number_format = get_format(spec.dtype)
    size = getattr(spec.granularity, "block_size", None) or weight.shape[1]
    blocks = weight.float().reshape(weight.shape[0], -1, size)
    if number_format.low < 0:
        scale = (blocks.abs().amax(-1) / -number_format.low).clamp(min=1e-6)
        codes, zero_point = (blocks / scale[..., None]).round(), None
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / number_format.high).clamp(min=1e-6)
        zero_point = (-low / scale).round().to(torch.int32)
        codes = (blocks / scale[..., None]).round() + zero_point[..., None]
    codes = codes.clamp(number_format.low, number_format.high).reshape(weight.shape)
    return QuantizedWeight(codes.to(torch.int8 if number_format.low < 0 else torch.uint8), scale, spec, zero_point)


def quantize_folder(
    folder: Path, spec: QuantizationSpec, float_parts: tuple[str, ...] = ("norm", "wpe", ".gate.weight", "ln_")
) -> QuantizedCheckpoint:
    """Round every matrix of a folder to nearest, except those whose names contain one of `float_parts`."""
    source = Source.open(folder)
    weights = {}
    for name, stored in source.tensors.items():
        if len(stored.shape) == 2 and not any(part in name for part in float_parts):
            weight = source.tensor(name)
            is_transposed = source.model_type == "gpt2" and ".h." in name  # GPT-2 stores (in, out)
            weights[name] = round_to_nearest(weight.T if is_transposed else weight, spec)
    return QuantizedCheckpoint(source, weights)


def simulate(checkpoint: QuantizedCheckpoint, folder: Path) -> torch.nn.Module:
    """Load the transformers model from a folder with the dequantized weights."""
    from safetensors.torch import save_file

    is_gpt2 = checkpoint.source.model_type == "gpt2"
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.float_names}
    for name, weight in checkpoint.quantized.items():
        values = weight.dequantize()
        tensors[name] = (values.T if is_gpt2 and ".h." in name else values).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((checkpoint.source.folder / "config.json").read_bytes())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


class OrtModel:
    """The graph of a folder in plain ONNX Runtime.

    Args:
        folder: The exported folder.
        level: The accuracy level of MatMulNBits; 1 computes in float, 4 rounds activations to int8.
        all_logits: Whether to return the logits of all tokens instead of the last one.
    """

    def __init__(self, folder: Path, level: int = 1, *, all_logits: bool = True) -> None:
        import onnx
        import onnxruntime as ort

        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for node in model.graph.node:
            if all_logits and node.output[0] == "last":
                node.op_type = "Identity"
                del node.input[1:], node.attribute[:]
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = level
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.inputs = {declared.name: declared.shape for declared in self.session.get_inputs()}

    def __call__(
        self, tokens: np.ndarray, past: dict[str, np.ndarray] | None = None, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return logits, and the keys and values to pass as `past` in the next call."""
        batch, count = tokens.shape
        cached = 0 if past is None else next(iter(past.values())).shape[2]
        feeds = {
            "input_ids": tokens,
            "attention_mask": np.ones((batch, cached + count), np.int64) if mask is None else mask,
            **(past or {}),
        }
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.tile(np.arange(cached, cached + count), (batch, 1))
        for name, shape in self.inputs.items():
            if name not in feeds:
                feeds[name] = np.zeros((batch, shape[1], 0, shape[3]), np.float32)
        names = [declared.name for declared in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        logits = outputs.pop("logits")
        return logits, {name.replace("present", "past_key_values"): value for name, value in outputs.items()}


def sqnr(expected: np.ndarray, actual: np.ndarray) -> float:
    """The signal to quantization noise ratio in dB."""
    return float(10 * np.log10((expected**2).sum() / max(((expected - actual) ** 2).sum(), 1e-30)))
