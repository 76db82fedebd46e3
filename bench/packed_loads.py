"""Do gptq folders load elsewhere? transformers with auto-round, on the CPU, tiny random models of several families.

    pip install auto-round      (it brings accelerate and datasets: an environment of its own)
    python bench/packed_loads.py

Prints the largest difference of logits from a float model with the values of the codes, beside the largest logit. The
models are float16, in which auto-round computes.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.formats.packed.tiny import logits_of, make, quantize, reference

from scalepoint.formats import find_checkpoint_format
from scalepoint.spec import ExtendedQuantizationSpec

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "olmo", "gpt_neox", "gpt2")
BLOCKS = {"type": "per_block", "block_size": 32, "axis": 1}


def difference(family: str, bits: int, folder: Path) -> tuple[float, float]:
    spec = ExtendedQuantizationSpec(dtype=f"int{bits}", granularity=BLOCKS)
    source = make(family, folder / "in", torch.float16)
    heads = ("lm_head", "embed_out")  # auto-round leaves them float
    checkpoint = quantize(
        source, spec, scale_dtype=torch.float16, choose=lambda layer: None if layer in heads else spec
    )
    find_checkpoint_format("gptq").write(checkpoint, folder / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out",
        local_files_only=True,
        dtype="auto",
        device_map="cpu",
        quantization_config=transformers.AutoRoundConfig(),
    )
    packed = sum(hasattr(module, "qweight") for module in model.modules())
    assert packed == len(checkpoint.packed), f"{packed} of {len(checkpoint.packed)} layers are packed"
    found, wanted = logits_of(model), logits_of(reference(checkpoint, folder / "reference"))
    return float((found - wanted).abs().max()), float(wanted.abs().max())


def main() -> None:
    transformers.logging.set_verbosity_error()
    print("family     bits  difference  largest logit")
    for family in FAMILIES:
        for bits in (2, 3, 4, 8):
            with tempfile.TemporaryDirectory() as folder:
                apart, largest = difference(family, bits, Path(folder))
            print(f"{family:10} {bits:4} {apart:11.5f} {largest:14.3f}")


if __name__ == "__main__":
    main()
