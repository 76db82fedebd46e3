"""SmolLM2-135M for ONNX Runtime GenAI: our folder next to that of its own builder, tokens per second and perplexity.

One thread, CPU time, runs of all folders interleaved in one process. Our weights are rounded to nearest, so that the
rows compare the graphs and their kernels; one more folder is as deploy_checkpoint makes it. Then the greedy text is
compared with that of torch with the same weights. Needs onnxruntime-genai and transformers.
"""

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from scalepoint import deploy_checkpoint
from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.quantize import Override, QuantConfig
from scalepoint.runtimes import find_runtime
from scalepoint.spec import QuantizationSpec
from smollm import folder as smollm
from texts import parts

OUT = Path(__file__).parent.parent / "out"
WORK = OUT / "genai"
PROMPT, TOKENS = 64, 17
WIDTHS = {  # of the blocks, then of the tied embedding and head
    "int4 of 32": ((4, 32), (4, 32)),
    "int4 of 64": ((4, 64), (4, 64)),
    "int4 of 32, head int8": ((4, 32), (8, 32)),
    "int4 of 64, head int8": ((4, 64), (8, 64)),
    "int8 of 32": ((8, 32), (8, 32)),
}
BUILDER = {"int4 of 32": (), "int4 of 64": ("--extra_options", "block_size=64")}
LEAST = 1.0  # of ours against the builder's with the same blocks


@dataclass
class Result:
    name: str
    bytes: int
    prefill: float  # tokens a second
    decode: float
    prefill_ratio: float  # against the builder's folder with blocks of 32, which has an int4 head
    decode_ratio: float
    perplexity: float


def nearest(weight: Tensor, bits: int, block: int) -> QuantizedWeight:
    """Round a weight to the nearest codes, symmetric around zero, with one scale per block."""
    granularity = {"type": "per_block", "block_size": block, "axis": 1}
    spec = QuantizationSpec(dtype=f"int{bits}", granularity=granularity)
    half = 2 ** (bits - 1)
    blocks = weight.float().reshape(weight.shape[0], -1, block)
    largest = torch.take_along_dim(blocks, blocks.abs().argmax(-1, keepdim=True), -1)
    scale = -largest / half  # of either sign: the largest value is -half exactly
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (blocks / scale).round().clamp(-half, half - 1)
    return QuantizedWeight(codes.reshape(weight.shape).to(torch.int8), scale[..., 0], spec)


def quantized(source: Source, blocks: tuple[int, int], table: tuple[int, int]) -> QuantizedCheckpoint:
    """Every matrix; `table` are bits and block of the embedding, which is the head too."""
    matrices = [name for name, stored in source.tensors.items() if len(stored.shape) == 2]
    packed = {name: nearest(source.tensor(name), *(table if "embed" in name else blocks)) for name in matrices}
    return QuantizedCheckpoint(source, packed)


def tuned(blocks: tuple[int, int], table: tuple[int, int]) -> Path:
    """A folder of deploy_checkpoint with accuracy="balanced" and these widths, made once."""
    folder = WORK / f"ours balanced int{blocks[0]} of {blocks[1]}"
    if not (folder / "genai_config.json").exists():
        inner, outer = ({"n_bits": bits, "block_size": block} for bits, block in (blocks, table))
        ends = (Override(name="lm_head", weight=outer), Override(type="embedding", weight=outer))
        texts = {name: WORK / f"{name}.txt" for name in ("calibrate", "judge")}
        WORK.mkdir(parents=True, exist_ok=True)
        for name, file in texts.items():
            file.write_text(parts()[name], encoding="utf-8")
        deploy_checkpoint(
            smollm(), folder, target="ort-genai", config=QuantConfig(weight=inner, overrides=ends), accuracy="balanced",
            data=texts["calibrate"], judge=texts["judge"], verify=False,
        )  # fmt: skip
    return folder


def built(name: str, options: tuple[str, ...]) -> Path:
    """A folder of onnxruntime-genai's own builder, made once."""
    folder = WORK / f"builder {name}"
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(smollm()), "-o", str(folder)]
        subprocess.run([*command, "-p", "int4", "-e", "cpu", *options], check=True, capture_output=True)
    return folder


def runtime() -> Any:
    """Imported late: only a run needs it."""
    try:
        return import_module("onnxruntime_genai")
    except ImportError:
        sys.exit("onnxruntime-genai is not installed: pip install -c constraints.txt onnxruntime-genai")


def speeds(folders: dict[str, Path], tokens: list[int], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """CPU seconds a token of the prompt and of the text, in turns."""
    one = json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}})
    models = {}
    for name, path in folders.items():
        config = runtime().Config(str(path))
        config.overlay(one)
        models[name] = runtime().Model(config)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in folders}
    for turn in range(rounds + 1):
        for name, model in models.items():
            prompt, text = generation(model, tokens)
            if turn:
                times[name][0].append(prompt)
                times[name][1].append(text)
    return times


def quiet(times: list[float]) -> float:
    """The lower quartile: decoding waits for memory, which other programs on the machine use too."""
    return statistics.quantiles(times, n=4)[0]


def generation(model: Any, tokens: list[int]) -> tuple[float, float]:
    params = runtime().GeneratorParams(model)
    total = len(tokens) + TOKENS
    params.set_search_options(do_sample=False, max_length=total, min_length=total)
    generator = runtime().Generator(model, params)
    start = time.process_time()
    generator.append_tokens(np.asarray(tokens, np.int32))
    generator.generate_next_token()
    middle = time.process_time()
    while not generator.is_done():
        generator.generate_next_token()
    return (middle - start) / len(tokens), (time.process_time() - middle) / (TOKENS - 1)


def perplexity(path: Path, rows: Tensor) -> float:
    """Of the file in ONNX Runtime, activations rounded as it does."""
    file = runpy.run_path(str(find_runtime("ort-genai").child))["File"](str(path), {})
    losses = []
    for row in rows:
        [(_, logits)] = file.run({"input_ids": row[None, :-1].numpy()})
        losses.append(torch.nn.functional.cross_entropy(torch.from_numpy(logits[0]), row[1:]).item())
    return float(np.exp(np.mean(losses)))


def texts(path: Path, checkpoint: QuantizedCheckpoint, prompts: list[list[int]]) -> dict[str, list[int]]:
    """How many of the first greedy tokens are those of torch with the same weights, prompt by prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.source.folder, dtype=torch.float32).eval()
    state = {name: packed.dequantize() for name, packed in checkpoint.quantized.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    kind = runpy.run_path(str(find_runtime("ort-genai").child))["File"]
    equal_tokens: dict[str, list[int]] = {"activations float": [], "activations int8": []}
    for tokens in prompts:
        with torch.no_grad():
            generated = model.generate(torch.tensor([tokens]), max_new_tokens=50, min_new_tokens=50, do_sample=False)
        expected = generated[0, len(tokens) :].tolist()
        for name, options in (("activations float", {"exact": True}), ("activations int8", {})):
            got = kind(str(path), options).generate(tokens, 50)["tokens"]
            differ = (
                position for position, (ours, theirs) in enumerate(zip(got, expected, strict=True)) if ours != theirs
            )
            equal_tokens[name].append(next(differ, 50))
    return equal_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="turns of each folder")
    parser.add_argument("--rows", type=int, default=12, help="texts of 256 tokens that perplexity is measured on")
    arguments = parser.parse_args()
    source, console = Source.open(smollm()), Console()
    tokenizer = Tokenizer.from_file(str(smollm() / "tokenizer.json"))
    judge_rows = torch.tensor(tokenizer.encode(parts()["judge"]).ids[: arguments.rows * 257]).view(arguments.rows, 257)
    folders = {f"builder, {name}": built(name, options) for name, options in BUILDER.items()}
    for name, widths in WIDTHS.items():
        folders[f"ours, {name}"] = WORK / f"ours {name}"
        ORT_GENAI.write(quantized(source, *widths), WORK / f"ours {name}")
    folders["ours, int4 of 32, balanced"] = tuned(*WIDTHS["int4 of 32"])
    times = speeds(folders, judge_rows.flatten()[:PROMPT].tolist(), arguments.rounds)
    first = times[next(iter(folders))]
    results = []
    for name, path in folders.items():
        prompt, text = times[name]
        results.append(
            Result(
                name,
                sum(row.stat().st_size for row in path.glob("model.onnx*")),
                1 / quiet(prompt),
                1 / quiet(text),
                quiet(first[0]) / quiet(prompt),
                quiet(first[1]) / quiet(text),
                perplexity(path, judge_rows),
            )
        )
    same = texts(
        folders["ours, int4 of 32"], quantized(source, *WIDTHS["int4 of 32"]), judge_rows[:6, :PROMPT].tolist()
    )
    table = Table("folder", "MB", "prefill", "decode", "ratios", "perplexity")
    for row in results:
        ratios = f"{row.prefill_ratio:.2f} / {row.decode_ratio:.2f}"
        speed = f"{row.prefill:.0f}", f"{row.decode:.1f}"
        table.add_row(row.name, f"{row.bytes / 1e6:.1f}", *speed, ratios, f"{row.perplexity:.2f}")
    console.print(table)
    console.print("prefill and decode: tokens a second; ratios: against the first row")
    console.print(f"greedy tokens equal to those of torch with the same weights, of 50, six prompts: {same}")
    OUT.mkdir(exist_ok=True)
    contents = {"rows": [asdict(row) for row in results], "equal_tokens": same, "prompt": PROMPT, "tokens": TOKENS}
    contents |= {"rounds": arguments.rounds, "texts": arguments.rows}
    (OUT / "genai.json").write_text(json.dumps(contents, indent=2))
    judged_by = [row for row in results if row.name in ("ours, int4 of 32", "ours, int4 of 32, head int8")]
    sys.exit(any(min(row.prefill_ratio, row.decode_ratio) < LEAST for row in judged_by))


if __name__ == "__main__":
    main()
