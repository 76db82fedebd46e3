"""A folder in transformers, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported.

compressed-tensors are loaded by the package of that name. For gptq and awq transformers asks for packages that do not
install everywhere: their layouts are read here, by their definitions, and the model gets the values. Nothing is
fetched, and no code of a folder is run.
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

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where the outputs of a word lie in it
TURNED = ("gpt2", "openai-gpt")  # whose layers keep weights as (in, out)


class File:
    """options: threads (0: it chooses)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        if options.get("threads", 1):
            torch.set_num_threads(options.get("threads", 1))
        self.inputs = ["input_ids"]
        self.model = _loaded(Path(path)).eval()
        self._logits(torch.zeros(1, 1, dtype=torch.int64))  # the first run unpacks

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Logits of every word."""
        logits, _ = self._logits(torch.from_numpy(np.ascontiguousarray(feeds["input_ids"], np.int64)))
        return [("logits", logits.to(torch.float32).numpy())]

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """So many further tokens, each the likeliest, and the seconds for the prompt and for the others."""
        start = time.perf_counter()
        logits, past = self._logits(torch.tensor([tokens]), use_cache=True)
        made = [int(logits[0, -1].argmax())]
        prefilled = time.perf_counter()
        while len(made) < count:
            logits, past = self._logits(torch.tensor([made[-1:]]), use_cache=True, past_key_values=past)
            made.append(int(logits[0, -1].argmax()))
        ended = time.perf_counter()
        return {"tokens": made[:count], "prefill_seconds": prefilled - start, "decode_seconds": ended - prefilled}

    def executed(self) -> list[dict[str, Any]]:
        """Nothing: every product is one of floats."""
        return []

    @torch.no_grad()
    def _logits(self, words: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        found = self.model(words, **options)
        return found.logits, found.past_key_values


def _loaded(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    settings = config.get("quantization_config", {})
    options = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}
    if settings.get("quant_method") not in ("gptq", "awq"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    plain = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del plain.quantization_config
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(plain)]
    weights = _unpacked(folder, settings, config.get("model_type") in TURNED)
    return kind.from_pretrained(None, config=plain, state_dict=weights, dtype=plain.dtype)


def _unpacked(folder: Path, settings: dict[str, Any], turned: bool) -> dict[str, torch.Tensor]:
    """All tensors, the packed ones as the values that they stand for."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    for name in [each for each in found if each.endswith(".qweight")]:
        layer = name.removesuffix(".qweight")
        qweight, qzeros, scales = (found.pop(f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))
        index = found.pop(f"{layer}.g_idx", None)
        if index is None:
            values = _awq(qweight, qzeros, scales)
        else:
            values = _gptq(qweight, qzeros, scales, index, _own(settings, layer))
        found[f"{layer}.weight"] = (values if turned else values.T).contiguous()
    return found


def _own(settings: dict[str, Any], layer: str) -> dict[str, Any]:
    """The settings of one layer."""
    for pattern, own in settings.get("dynamic", {}).items():
        if re.match(pattern.removeprefix("+:"), layer):
            return {**settings, **own}
    return settings


def _gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    bits, (_, outputs) = settings["bits"], scales.shape
    codes = _codes(qweight.T, bits, len(index)).T
    less = 1 if settings.get("checkpoint_format", "gptq") == "gptq" else 0
    zeros = _codes(qzeros, bits, outputs) + less
    return (codes - zeros[index]) * scales[index].to(torch.float32)


def _awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, outputs = len(qweight), scales.shape[1]
    places = (torch.arange(outputs) // 8 * 8).reshape(-1, 8) + torch.tensor(AWQ_PLACES)
    codes, zeros = (_codes(each, 4, outputs)[:, places.flatten()] for each in (qweight, qzeros))
    group = torch.arange(rows) // (rows // len(scales))
    return (codes - zeros[group]) * scales[group].to(torch.float32)


def _codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The codes of every row: code i starts at bit i * bits."""
    wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    start = torch.arange(count) * bits
    both = wide[:, start // 32] | wide[:, start // 32 + 1] << 32
    return both >> start % 32 & (1 << bits) - 1
