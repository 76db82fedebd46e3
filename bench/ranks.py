"""One job on 1, 2 and 4 ranks of this machine: wall time, CPU time and bytes sent, the terms of the cost model.

    python bench/ranks.py            runs of each size in turn, medians; writes out/ranks.json

wall = batches / ranks * forward  +  solver  +  meetings * latency  +  bytes / bandwidth. The CPU time of the busiest
rank is what the wall time would be with a free core for each; on a shared machine the wall time itself says little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint import deploy_checkpoint, distributed
from scalepoint.distributed.channel import Channel
from scalepoint.pipeline import deploy_checkpoint as deploy
from scalepoint.pipeline.checkpoint_job import prepare_checkpoint_job
from scalepoint.pipeline.checkpoint_stages import build_quantized_graph
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq
from scalepoint.transformation import transform
from scalepoint.tuning import TuneConfig, tune

SIZES = (1, 2, 4)
JOBS = ("min-max", "histograms", "tuning", "checkpoint")
WORDS, LENGTH = 2048, 256
OUT = Path(__file__).parent.parent / "out"


def net(width: int = 48) -> nn.Module:
    """A small convolutional net whose work is products."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).eval()


def batches(count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 64, 64, generator=rng) for _ in range(count)]


class Sent:
    """Counts what goes through the collectives."""

    def __init__(self) -> None:
        self.bytes = self.meetings = 0
        for name in ("all_gather", "all_reduce", "broadcast"):
            setattr(torch.distributed, name, self._counting(getattr(torch.distributed, name)))
        exchange = Channel.exchange

        def counted(channel: Channel, phase: str, content: dict[str, Any]) -> Any:
            self.meetings += 1
            return exchange(channel, phase, content)

        Channel.exchange = counted  # type: ignore[method-assign]

    def _counting(self, original: Any) -> Any:
        def counted(*tensors: Any, **options: Any) -> Any:
            sent = next(tensor for tensor in reversed(tensors) if isinstance(tensor, Tensor))
            self.bytes += sent.numel() * sent.element_size()
            return original(*tensors, **options)

        return counted


def inserted(job: str) -> fx.GraphModule:
    key = "histogram_mse" if job == "histograms" else "global_minmax"
    config: dict[str, Any] = {"activation": {"dtype": "uint8", "qscheme": "asymmetric", "qparam_calculator_cls": key}}
    if job == "tuning":
        config["weight"] = {"dtype": "int4", "granularity": {"type": "per_channel"}}
    result = transform(net(), batches(1)[0])
    return insert_qdq(result.model, result.matches, QuantConfig.build(config))


def write_llama(folder: Path) -> None:
    """A Llama of two blocks with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # only this job needs it

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=WORDS, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def prepared(job: str, count: int, folder: Path) -> Callable[[], object]:
    """What is timed."""
    if job == "checkpoint":
        rng = torch.Generator().manual_seed(1)
        tokens = [torch.randint(WORDS, (1, LENGTH), generator=rng) for _ in range(2 * count)]
        options: dict[str, Any] = {"data": tokens[:count], "judge": tokens[count : count + count // 2], "verify": False}
        job = prepare_checkpoint_job(
            folder / "llama", folder / "out", target="compressed-tensors", config=None, accuracy="balanced"
        )
        captured = build_quantized_graph(job, tokens)  # every rank does that alike, and it is the same for any data
        deploy.build_quantized_graph = lambda *_: captured
        options["target"] = "compressed-tensors"
        return lambda: deploy_checkpoint(folder / "llama", folder / "out", progress=False, **options)
    model, data = inserted(job), batches(count)
    if job != "tuning":
        return lambda: calibrate(model, data, progress=False)
    calibrate(model, data, freeze_weights=True, progress=False)
    return lambda: tune(model, data, TuneConfig(rows=16_384), progress=False)


def work(job: str, count: int, folder: Path) -> dict[str, float]:
    """What one rank does, and what it took."""
    torch.set_num_threads(1)
    run, sent = prepared(job, count, folder), Sent()
    distributed.wait_for_all("starting")
    sent.bytes = sent.meetings = 0
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "bytes": sent.bytes,
        "meetings": sent.meetings,
    }


def run(job: str, size: int, count: int) -> dict[str, float]:
    """One group: the wall time of the slowest rank, the CPU time of the busiest and of all."""
    with tempfile.TemporaryDirectory() as folder:
        if job == "checkpoint":
            write_llama(Path(folder) / "llama")
        command = [sys.executable, __file__, "--job", job, "--size", str(size), "--batches", str(count)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        group = [subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], env=env) for rank in range(size)]
        if any(process.wait() for process in group):
            raise SystemExit("a rank failed")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        "wall": max(process["wall"] for process in ranks),
        "busiest": max(process["cpu"] for process in ranks),
        "cpu": sum(process["cpu"] for process in ranks),
        "bytes": ranks[0]["bytes"],
        "meetings": ranks[0]["meetings"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--job", "--folder"):  # --job alone: only that one
        parser.add_argument(name, default="")
    for name, value in (("--rank", 0), ("--size", 0), ("--batches", 32), ("--repeats", 3)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    if options.size:
        init = f"file://{options.folder}/store"
        torch.distributed.init_process_group("gloo", init_method=init, rank=options.rank, world_size=options.size)
        (Path(options.folder) / f"{options.rank}.json").write_text(
            json.dumps(work(options.job, options.batches, Path(options.folder)))
        )
        return
    runs_by_job: dict[tuple[str, int], list[dict[str, float]]] = {
        (job, size): [] for job in JOBS if options.job in ("", job) for size in SIZES
    }
    for _ in range(options.repeats):
        for (job, size), runs in runs_by_job.items():
            runs.append(run(job, size, options.batches))
            print(job, size, runs[-1], flush=True)
    rows = []
    for (job, size), runs in runs_by_job.items():
        middle = {key: statistics.median(run_row[key] for run_row in runs) for key in runs[0]}
        one = statistics.median(run_row["busiest"] for run_row in runs_by_job[job, 1])
        rows.append({"job": job, "ranks": size, "of one": middle["busiest"] / one, **middle})
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    OUT.mkdir(exist_ok=True)
    (OUT / "ranks.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
