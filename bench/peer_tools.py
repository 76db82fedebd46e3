"""Runs another quantization tool in an environment where it is installed; imports nothing of scalepoint.

    python peer_tools.py vision HOW NETWORK DATA OUTPUT
    python peer_tools.py language HOW FOLDER TOKENS BITS OUTPUT

DATA: safetensors of `calibration` and `test`. TOKENS: safetensors of `calibration`, one text per row. OUTPUT: for
vision the outputs, for language the dequantized weight of every linear layer; and `seconds`, the CPU time of
quantizing. bench/tuning.py starts it.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))


def brevitas(model: nn.Module, batches: list[Tensor], way: str) -> nn.Module:
    """As its own example of classification does: GPTQ or Qronos with activation order, then its bias correction."""
    from brevitas.graph.quantize import preprocess_for_quantize  # noqa: PLC0415
    from brevitas_examples.imagenet_classification.ptq import ptq_common as ptq  # noqa: PLC0415

    loader = [(images, images) for images in batches]
    is_imagenet = model(batches[0][:1]).shape[-1] == 1000
    prepared = preprocess_for_quantize(model, equalize_iters=0, merge_bn=True)
    quantized: nn.Module = ptq.quantize_model(
        prepared,
        backend="layerwise" if is_imagenet else "fx",  # the first keeps 8 bits at both ends, the second nowhere
        weight_bit_width=4,
        act_bit_width=8,
        bias_bit_width=None,
        weight_quant_granularity="per_channel",
        weight_param_method="mse",
        act_quant_percentile=99.999,
        act_quant_type="asym",
        scale_factor_type="float_scale",
        quant_format="int",
    )
    with torch.no_grad():
        quantized.eval()(batches[0])  # its weight quantizers are made at the first use
    ptq.calibrate(loader, quantized)
    if way == "qronos":
        ptq.apply_qronos(quantized, loader, act_order=True)
    else:
        ptq.apply_gptq(loader, quantized, act_order=True, use_quant_activations=True)
    ptq.apply_bias_correction(loader, quantized)
    return quantized.eval()


def nncf_int8(model: nn.Module, batches: list[Tensor], _: str) -> nn.Module:
    """Post-training quantization with its bias correction; for torch it has the fast one alone."""
    import nncf as tool  # noqa: PLC0415
    from nncf.quantization.advanced_parameters import (  # noqa: PLC0415
        AdvancedQuantizationParameters,
        QuantizationParameters,
    )

    narrow = AdvancedQuantizationParameters(weights_quantization_params=QuantizationParameters(num_bits=4))
    if model(batches[0][:1]).shape[-1] == 1000:
        raise SystemExit("nncf keeps one width for all layers")
    quantized: nn.Module = tool.quantize(
        model,
        tool.Dataset(batches),
        preset=tool.QuantizationPreset.MIXED,
        target_device=tool.TargetDevice.NPU,  # the others refuse 4 bits
        subset_size=len(batches),
        fast_bias_correction=True,
        advanced_parameters=narrow,
    )
    return quantized.eval()


VISION_TOOLS: dict[str, Callable[[nn.Module, list[Tensor], str], nn.Module]] = {"brevitas": brevitas, "nncf": nncf_int8}


def run_vision() -> None:
    tool_and_way, network, data, output = sys.argv[2:]
    tool, _, way = tool_and_way.partition(":")
    torch.set_num_threads(1)
    tensors = load_file(data)
    model = importlib.import_module(network).trained().eval()
    batches = list(tensors["calibration"].split(32))
    start = time.process_time()
    quantized = VISION_TOOLS[tool](model, batches, way)
    seconds = time.process_time() - start
    with torch.no_grad():
        outputs = torch.cat([quantized(images) for images in tensors["test"].split(64)])
    save_file({"outputs": outputs.contiguous(), "seconds": torch.tensor(seconds)}, output)


GROUP = 64


def auto_round(model: nn.Module, tokens: Tensor, bits: int, tokenizer: object) -> nn.Module:
    """Quantize with AutoRound: the 50 iterations of its light recipe, and symmetric groups.

    It runs in float32, because bfloat16 is slow on some CPUs.
    """
    from auto_round import AutoRound  # noqa: PLC0415

    tool = AutoRound(
        model, tokenizer, scheme=f"W{bits}A16", bits=bits, group_size=GROUP, sym=True, iters=50, lr=5e-3,
        seqlen=tokens.shape[1], nsamples=len(tokens), batch_size=8, enable_torch_compile=False, device_map="cpu",
        dataset=[{"input_ids": row[None]} for row in tokens], amp=False,
    )  # fmt: skip
    quantized, _ = tool.quantize()
    return quantized


def nncf_weights(model: nn.Module, tokens: Tensor, bits: int, tokenizer: object) -> nn.Module:
    """AWQ and scale estimation, its recipe for accuracy."""
    import nncf as tool  # noqa: PLC0415

    quantized: nn.Module = tool.compress_weights(
        model, mode=tool.CompressWeightsMode.INT4_SYM, group_size=GROUP, ratio=1.0, awq=True, scale_estimation=True,
        dataset=tool.Dataset([{"input_ids": row[None]} for row in tokens]), subset_size=len(tokens),
        ignored_scope=tool.IgnoredScope(patterns=[".*embed.*", ".*lm_head.*"]),
    )  # fmt: skip
    return quantized


def stands_for(quantized: nn.Module, name: str) -> Tensor:
    """The weight of a layer as floats: NNCF keeps packed codes, and a module that unpacks them."""
    weight, parameter_name = quantized.get_submodule(name).weight, f"{name.replace('.', ':')}:weight"
    for module_name, module in quantized.named_modules():
        if parameter_name in module_name and type(module).__name__.endswith("Decompressor"):
            weight = module(weight)
    return weight.detach().float().contiguous()


def is_all(quantized: nn.Module, weights: dict[str, Tensor], folder: str, tokens: Tensor) -> bool:
    """Whether the weights are all that the tool changed: with them the model computes what the tool's does."""
    import transformers  # noqa: PLC0415

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight in weights.items():
        plain.get_submodule(name).weight.data.copy_(weight)
    with torch.no_grad():
        logits, expected = (model(tokens[:1]).logits.float() for model in (plain, quantized))
    return bool((logits - expected).norm() <= 1e-3 * expected.norm())


LANGUAGE_TOOLS: dict[str, Callable[[nn.Module, Tensor, int, object], nn.Module]] = {
    "auto-round": auto_round,
    "nncf": nncf_weights,
}


def run_language() -> None:
    import transformers  # noqa: PLC0415

    tool, folder, data, bits, output = sys.argv[2:7]
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name]
    tokens, start = load_file(data)["calibration"], time.process_time()
    quantized = LANGUAGE_TOOLS[tool](model, tokens, int(bits), tokenizer)
    seconds = torch.tensor(time.process_time() - start)
    weights = {name: stands_for(quantized, name) for name in names}
    if not is_all(quantized, weights, folder, tokens):
        sys.exit(f"{tool} changed more than the weights of the linear layers")
    save_file({"seconds": seconds, **weights}, output)


if __name__ == "__main__":
    {"vision": run_vision, "language": run_language}[sys.argv[1]]()
