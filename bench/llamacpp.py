"""SmolLM2-135M in llama.cpp: its own quantizer next to our codes in its blocks, perplexity, and agreement.

    npm install --prefix ~/.cache/scalepoint/llamacpp @node-llama-cpp/linux-x64@3.22
    python bench/llamacpp.py [--rows 20]        writes out/llamacpp.json

All files come from the same float weights and are measured in llama.cpp on the same tokens, rows of 512. The float
weights are already on a 4-bit grid (blocks of 32, asymmetric, close to llama.cpp's Q4_1 and Q4_K), so the 4-bit rows
look better than they would for other weights.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

import smollm
from scalepoint import deploy_checkpoint
from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.formats.gguf import GGUF, round_to_block_type
from scalepoint.numerics import get_format
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.llamacpp.child import File, Llama
from scalepoint.runtimes.serving import RuntimeSession
from scalepoint.spec import ExtendedQuantizationSpec
from texts import parts

OUT = Path(__file__).parents[1] / "out"
THEIRS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "Q3_K_M", "Q2_K")
OURS = {"int8": 32, "int4": 32}
LENGTH, PROMPTS, PROMPT, NEW = 512, 4, 32, 50


@dataclass(frozen=True)
class Row:
    """One file."""

    name: str
    megabytes: float
    perplexity: float
    seconds: float  # of the CPU, to quantize
    simulated: float | None = None  # perplexity of the simulation
    decibels: float | None = None  # of llama.cpp's logits against the simulation's, on one row
    exact: float | None = None  # the same where it reads the weights as what they stand for
    same: tuple[int, ...] = ()  # greedy tokens until the simulation's first other one, after the first rows
    same_exact: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name:28} {self.megabytes:6.0f} MB  perplexity {self.perplexity:7.3f}  {self.seconds:5.1f} CPU-s"
        if self.simulated is None:
            return text
        alike = f"{self.decibels:.1f} dB (exact: {self.exact:.1f}), tokens alike {self.same} (exact: {self.same_exact})"
        return f"{text}  simulated {self.simulated:.3f}, {alike}"


def judge_file(path: Path, rows: Tensor, name: str, seconds: float) -> Row:
    """Its perplexity in llama.cpp."""
    served = RuntimeSession(find_runtime("llamacpp"), path, threads=1)
    losses = []
    for row in rows.split(1):
        (logits,) = served({"input_ids": row[:, :-1].numpy()})
        losses.append(F.cross_entropy(torch.from_numpy(logits[0]), row[0, 1:]).item())
    served.close()
    return Row(name, path.stat().st_size / 1e6, math.exp(sum(losses) / len(losses)), seconds)


def nearest(source: Source, dtype: str, block: int) -> QuantizedCheckpoint:
    """Every layer to the nearest codes, the largest one of a block on the highest; embedding and head in float16."""
    granularity = {"type": "per_block", "block_size": block, "axis": 1}
    spec = ExtendedQuantizationSpec(dtype=dtype, granularity=granularity, qscheme="symmetric")
    row = get_format(spec.dtype)
    packed = {}
    for name, stored in source.tensors.items():
        if len(stored.shape) == 2 and "embed" not in name:
            values = source.tensor(name, torch.float32).reshape(stored.shape[0], -1, block)
            scale, _ = round_to_block_type(spec, stored.shape[1], values.abs().amax(2) / row.high)
            codes = (values / scale[..., None]).round().clamp(row.low, row.high)
            packed[name] = QuantizedWeight(codes.reshape(stored.shape).to(row.storage), scale, spec)
    table = source.tensor("model.embed_tokens.weight").to(torch.float16)
    return QuantizedCheckpoint(source, packed, {"model.embed_tokens.weight": table})


def simulation(checkpoint: QuantizedCheckpoint) -> Any:
    """The model of transformers with what the codes stand for."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(checkpoint.source.folder, dtype=torch.float32).eval()
    state = {name: packed.dequantize() for name, packed in checkpoint.quantized.items()}
    state |= {name: value.float() for name, value in checkpoint.changed.items()}
    model.load_state_dict(state, strict=False)
    return model


def compared(path: Path, model: Any, rows: Tensor, **options: bool) -> tuple[float, tuple[int, ...]]:
    """Decibels on the first row, and greedy tokens until the first other one, after the first rows."""
    file = File(str(path), {"threads": 1, **options})
    expected = model(rows[:1, :-1]).logits.double()
    noise = (torch.from_numpy(file.run({"input_ids": rows[:1, :-1].numpy()})[0][1]) - expected).square().sum()
    same = []
    for prompt in rows[:PROMPTS, :PROMPT]:
        generated = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        pairs = enumerate(
            zip(file.generate(prompt.tolist(), NEW)["tokens"], generated[0, PROMPT:].tolist(), strict=True)
        )
        same.append(next((at for at, (one, other) in pairs if one != other), NEW))
    return 10 * math.log10(float(expected.square().sum() / noise.clamp(min=1e-30))), tuple(same)


@torch.no_grad()
def ours(source: Source, dtype: str, rows: Tensor, folder: Path) -> Row:
    start = time.process_time()
    checkpoint, path = nearest(source, dtype, OURS[dtype]), folder / f"ours-{dtype}.gguf"
    GGUF.write(checkpoint, path)
    row = judge_file(path, rows, f"nearest {dtype}, blocks of {OURS[dtype]}", time.process_time() - start)
    model = simulation(checkpoint)
    losses = [F.cross_entropy(model(text_row[:, :-1]).logits[0], text_row[0, 1:]).item() for text_row in rows.split(1)]
    decibels, same = compared(path, model, rows)
    exact, same_exact = compared(path, model, rows, exact=True)
    perplexity = math.exp(sum(losses) / len(losses))
    return replace(row, simulated=perplexity, decibels=decibels, exact=exact, same=same, same_exact=same_exact)


def deployed(accuracy: str, rows: Tensor, folder: Path) -> Row:
    """The file of deploy_checkpoint; one that an earlier run made is used again."""
    path = folder / accuracy / f"{accuracy}.gguf"
    record = path.with_suffix(".json")
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        text = folder / "calibrate.txt"
        text.write_text(parts()["calibrate"], encoding="utf-8")
        start = time.process_time()
        data = None if accuracy == "fast" else text
        deploy_checkpoint(smollm.folder(), path, target="gguf", accuracy=accuracy, data=data, judge=None, verify=False)
        record.write_text(json.dumps({"seconds": time.process_time() - start}))
    return judge_file(path, rows, f"{accuracy} int4, blocks of 32", json.loads(record.read_text())["seconds"])


def theirs(plain: Path, kind: str, rows: Tensor, folder: Path) -> Row:
    start = time.process_time()
    path = folder / f"llamacpp-{kind}.gguf"
    Llama().quantize(str(plain), str(path), kind)
    return judge_file(path, rows, f"llama.cpp {kind}", time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20)
    count = parser.parse_args().rows
    torch.set_num_threads(1)
    source, folder = Source.open(smollm.folder()), OUT / "llamacpp"
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "float.gguf"
    GGUF.write(QuantizedCheckpoint(source, {}), plain)
    tokens = File(str(plain), {"threads": 1}).tokens(parts()["judge"])
    rows = torch.from_numpy(np.array(tokens[: count * (LENGTH + 1)])).view(count, LENGTH + 1)
    logits: list[Row] = []
    for make in (
        lambda: judge_file(plain, rows, "float32", 0.0),
        *(partial(theirs, plain, kind, rows, folder) for kind in THEIRS),
        *(partial(ours, source, dtype, rows, folder) for dtype in OURS),
        *(partial(deployed, accuracy, rows, folder) for accuracy in ("fast", "balanced")),
    ):
        logits.append(make())
        print(logits[-1], flush=True)
        content = {"tokens": count * LENGTH, "rows": [asdict(row) for row in logits]}
        (OUT / "llamacpp.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
