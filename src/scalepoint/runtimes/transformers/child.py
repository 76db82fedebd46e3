"""Child program that runs a folder in transformers on the CPU.

`child_loop.py` starts it. It imports nothing of scalepoint. Folders in the format compressed-tensors are loaded by the
package of that name. For gptq and awq transformers requires packages that do not install everywhere, so their layouts
are unpacked here. Nothing is downloaded, and no code of a folder is run.
"""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position of output i among the eight 4-bit codes of a 32-bit word
MODEL_TYPES_WITH_CONV1D = ("gpt2", "openai-gpt")  # their layers (transformers.Conv1D) store weights as (in, out)


class File:
    """A loaded model. Options: threads (0: torch chooses)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads", 1):
            torch.set_num_threads(options.get("threads", 1))
        self.inputs = ["input_ids"]
        self.model = _load_model(Path(path)).eval()
        self._compute_logits(torch.zeros(1, 1, dtype=torch.int64))  # the first run unpacks weights, which takes longer

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Compute the logits of every token."""
        logits, _ = self._compute_logits(torch.from_numpy(np.ascontiguousarray(feeds["input_ids"], np.int64)))
        return [("logits", logits.to(torch.float32).numpy())]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Generate `count` tokens greedily. Return them with the seconds for the prompt and for the generation."""
        start = time.perf_counter()
        logits, cache = self._compute_logits(torch.tensor([tokens]), use_cache=True)
        generated = [int(logits[0, -1].argmax())]
        prefill_end = time.perf_counter()
        while len(generated) < count:
            logits, cache = self._compute_logits(torch.tensor([generated[-1:]]), use_cache=True, past_key_values=cache)
            generated.append(int(logits[0, -1].argmax()))
        end = time.perf_counter()
        return {
            "tokens": generated[:count],
            "prefill_seconds": prefill_end - start,
            "decode_seconds": end - prefill_end,
        }

    def executed(self) -> list[dict[str, Any]]:
        """Return [] because every product is computed in float."""
        return []

    @torch.no_grad()
    def _compute_logits(self, tokens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        outputs = self.model(tokens, **options)
        return outputs.logits, outputs.past_key_values


def _load_model(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    settings = config.get("quantization_config", {})
    options = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}
    if settings.get("quant_method") not in ("gptq", "awq"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    model_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del model_config.quantization_config  # the weights are unpacked here
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    is_transposed = config.get("model_type") in MODEL_TYPES_WITH_CONV1D
    weights = _load_weights(folder, settings, is_transposed=is_transposed)
    return model_class.from_pretrained(None, config=model_config, state_dict=weights, dtype=model_config.dtype)


def _load_weights(folder: Path, settings: dict[str, Any], *, is_transposed: bool) -> dict[str, torch.Tensor]:
    """Load all tensors, with the packed weights as float values. Transposed weights are (in, out)."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    for layer in layers:
        qweight, qzeros, scales = (tensors.pop(f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))
        groups = tensors.pop(f"{layer}.g_idx", None)  # the group of each input; only gptq has it
        if groups is None:
            weight = _unpack_awq(qweight, qzeros, scales)
        else:
            weight = _unpack_gptq(qweight, qzeros, scales, groups, _layer_settings(settings, layer))
        tensors[f"{layer}.weight"] = (weight if is_transposed else weight.T).contiguous()
    return tensors


def _layer_settings(settings: dict[str, Any], layer: str) -> dict[str, Any]:
    """Return the settings of one layer: in "dynamic", the first matching pattern overrides the general settings."""
    for pattern, overrides in settings.get("dynamic", {}).items():
        if re.match(pattern.removeprefix("+:"), layer):
            return {**settings, **overrides}
    return settings


def _unpack_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    """Return the weight (in, out). The format "gptq" stores zero points minus one."""
    bits, (_, outputs) = settings["bits"], scales.shape
    codes = _unpack_codes(qweight.T, bits, len(groups)).T
    zero_points = _unpack_codes(qzeros, bits, outputs)
    if settings.get("checkpoint_format", "gptq") == "gptq":
        zero_points = zero_points + 1
    return (codes - zero_points[groups]) * scales[groups].to(torch.float32)


def _unpack_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight (in, out). The eight codes of a word are stored in AWQ_ORDER."""
    rows, outputs = len(qweight), scales.shape[1]
    first_of_word = (torch.arange(outputs) // 8 * 8).reshape(-1, 8)
    order = (first_of_word + torch.tensor(AWQ_ORDER)).flatten()
    codes = _unpack_codes(qweight, 4, outputs)[:, order]
    zero_points = _unpack_codes(qzeros, 4, outputs)[:, order]
    groups = torch.arange(rows) // (rows // len(scales))
    return (codes - zero_points[groups]) * scales[groups].to(torch.float32)


def _unpack_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack `count` codes from each row of 32-bit words. Code i starts at bit i * bits and may span two words."""
    words = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))  # so the last word has a next one
    first_bit = torch.arange(count) * bits
    word_index, shift = first_bit // 32, first_bit % 32
    two_words = words[:, word_index] | (words[:, word_index + 1] << 32)
    mask = (1 << bits) - 1
    return (two_words >> shift) & mask
