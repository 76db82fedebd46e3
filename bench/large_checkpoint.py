"""A language model that is larger than the memory it may have: peak memory, and a run that is killed and goes on.

    python bench/large_checkpoint.py [--gigabytes 3.2] [--accuracy fast|balanced]

Random weights in bf16 are written to out/large shard by shard. Then deploy_checkpoint makes an int4 folder of them in a
process of its own: once whole, once killed (SIGKILL) when a third of its pieces are kept and started again with
resume=True. Told are the peak of each process's own memory (RssAnon: what others cannot take back) beyond that of a
process that only imports what is needed, and whether both folders hold the same bytes.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, WORDS = 1536, 4096, 12, 4096
OUT = Path("out") / "large"
# Scales are those of the largest weight: a search over them would take most of the time.
CHILD = """
import sys, torch, scalepoint, transformers
from scalepoint import deploy_checkpoint
from scalepoint.quantize import QuantConfig
source, output, accuracy, resume = sys.argv[1:5]
if source:
    torch.manual_seed(0)
    tokens = [torch.randint(0, {words}, (1, 128)) for _ in range(8)]
    config = QuantConfig(weight=dict(n_bits=4, block_size=128))
    deploy_checkpoint(source, output, target="compressed-tensors", config=config, accuracy=accuracy, data=tokens[:7],
                      judge=tokens[7:], verify=False, memory="200MB", resume=bool(resume), progress=True)
"""


def make(folder: Path, layers: int) -> None:
    """The checkpoint, a shard a block."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": WORDS,
        "intermediate_size": MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for block in range(layers + 1):
        shapes = _block(block) if block < layers else _ends()
        generator = torch.Generator().manual_seed(block)
        tensors = {
            name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for name, shape in shapes.items()
        }
        file = f"model-{block:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _block(index: int) -> dict[str, tuple[int, ...]]:
    name = f"model.layers.{index}"
    square = {f"{name}.self_attn.{each}_proj.weight": (HIDDEN, HIDDEN) for each in "qkvo"}
    wide = {f"{name}.mlp.{each}_proj.weight": (MLP, HIDDEN) for each in ("gate", "up")}
    norms = {f"{name}.{each}_layernorm.weight": (HIDDEN,) for each in ("input", "post_attention")}
    return {**square, **wide, f"{name}.mlp.down_proj.weight": (HIDDEN, MLP), **norms}


def _ends() -> dict[str, tuple[int, ...]]:
    tables = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (WORDS, HIDDEN))
    return {**tables, "model.norm.weight": (HIDDEN,)}


def run(source: str, output: str, accuracy: str, resume: str = "", kill_after: int = 0) -> tuple[int, float, int]:
    """(peak of its own memory in bytes, CPU seconds, exit code) of a child; killed when so many pieces are kept."""
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(words=WORDS), source, output, accuracy, resume])
    place = Path(output or "none")
    kept = place.with_name(f".{place.name}.work") / "tuning"
    peak, seconds = 0, 0.0
    while child.poll() is None:
        peak, seconds = max(peak, _own(child.pid)), max(seconds, _cpu(child.pid))
        if kill_after and len(list(kept.glob("piece-*.safetensors"))) >= kill_after:
            os.kill(child.pid, signal.SIGKILL)
            kill_after = 0
        time.sleep(0.02)
    return peak, seconds, child.returncode


def _own(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def digest(folder: Path) -> str:
    seen = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        seen.update(path.name.encode() + path.read_bytes())
    return seen.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--accuracy", default="fast")
    asked = parser.parse_args()
    one = sum(torch.Size(shape).numel() for shape in _block(0).values()) * 2
    layers = max(1, round(asked.gigabytes * 1e9 / one))
    source = OUT / f"source-{layers}"
    if not (source / "model.safetensors.index.json").exists():
        make(source, layers)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    empty, _, _ = run("", "", "")
    whole, seconds, code = run(str(source), str(OUT / "whole"), asked.accuracy)
    killed, _, signal_code = run(str(source), str(OUT / "again"), asked.accuracy, kill_after=2 * layers // 3)
    resumed, _, again_code = run(str(source), str(OUT / "again"), asked.accuracy, "resume")
    peaks = [(each - empty) / 1e9 for each in (whole, killed, resumed)]
    is_same = code == again_code == 0 and digest(OUT / "whole") == digest(OUT / "again")
    print(f"{size / 1e9:.2f} GB in bf16, {layers} blocks, accuracy={asked.accuracy}, {seconds:.0f} CPU-s")
    print(f"peak beyond an interpreter that imports the same ({empty / 1e9:.2f} GB):", end=" ")
    print(f"whole {peaks[0]:.2f} GB, killed (exit {signal_code}) {peaks[1]:.2f} GB, resumed {peaks[2]:.2f} GB")
    print(f"same bytes: {is_same}")
    found = {"gigabytes": size / 1e9, "blocks": layers, "accuracy": asked.accuracy, "cpu_seconds": seconds}
    found |= {"peak_gigabytes": max(peaks), "same_bytes": is_same}
    (Path("out") / f"large-{asked.accuracy}.json").write_text(json.dumps(found, indent=1))
    sys.exit(0 if is_same and max(peaks) < 1.5 else 1)


if __name__ == "__main__":
    main()
