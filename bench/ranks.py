"""One job on 1, 2 and 4 ranks of this machine: wall time, CPU time, what they send: the terms of the cost model.

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, fx, nn

from scalepoint import ranks
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq
from scalepoint.transformation import transform
from scalepoint.tuning import TuneConfig, tune

SIZES = (1, 2, 4)
JOBS = ("min-max", "histograms", "tuning")
OUT = Path(__file__).parent.parent / "out"


def net(width: int = 48) -> nn.Module:
    """A small convolutional net whose work is products."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).eval()


def batches(count: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 64, 64, generator=made) for _ in range(count)]


class Sent:
    """Counts what goes through the collectives."""

    def __init__(self) -> None:
        self.bytes = self.meetings = 0
        for name in ("all_gather", "all_reduce"):
            setattr(distributed, name, self._counting(getattr(distributed, name)))
        meet = ranks._Group.meet

        def counted(group: Any, what: str, own: dict[str, Any]) -> Any:
            self.meetings += 1
            return meet(group, what, own)

        ranks._Group.meet = counted  # type: ignore[method-assign]

    def _counting(self, original: Any) -> Any:
        def counted(*tensors: Any, **how: Any) -> Any:
            sent = tensors[-1]
            self.bytes += sent.numel() * sent.element_size()
            return original(*tensors, **how)

        return counted


def inserted(job: str) -> fx.GraphModule:
    key = "histogram_mse" if job == "histograms" else "global_minmax"
    config: dict[str, Any] = {"activation": {"dtype": "uint8", "qscheme": "asymmetric", "qparam_calculator_cls": key}}
    if job == "tuning":
        config["weight"] = {"dtype": "int4", "granularity": {"type": "per_channel"}}
    result = transform(net(), batches(1)[0])
    return insert_qdq(result.model, result.matches, QuantConfig.build(config))


def work(job: str, count: int) -> dict[str, float]:
    """What one rank does, and what it took."""
    torch.set_num_threads(1)
    model, data, sent = inserted(job), batches(count), Sent()
    if job == "tuning":
        calibrate(model, data, freeze_weights=True, progress=False)
        sent.bytes = sent.meetings = 0
    with ranks.agreed("starting"):
        pass
    wall, cpu = time.perf_counter(), time.process_time()
    if job == "tuning":
        report = tune(model, data, TuneConfig(rows=16_384), progress=False)
        solver = sum(row.seconds for row in report.layers)
    else:
        calibrate(model, data, progress=False)
        solver = 0.0
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "layers": solver,
        "bytes": sent.bytes,
        "meetings": sent.meetings,
    }


def run(job: str, size: int, count: int) -> dict[str, float]:
    """One group: the wall time of the slowest rank, the CPU time of the busiest and of all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--job", job, "--size", str(size), "--batches", str(count)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        group = [subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], env=env) for rank in range(size)]
        if any(each.wait() for each in group):
            raise SystemExit("a rank failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        "wall": max(each["wall"] for each in found),
        "busiest": max(each["cpu"] for each in found),
        "cpu": sum(each["cpu"] for each in found),
        "bytes": found[0]["bytes"],
        "meetings": found[0]["meetings"],
        "layers": found[0]["layers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--job", "--folder"):
        parser.add_argument(name, default="")
    for name, value in (("--rank", 0), ("--size", 0), ("--batches", 32), ("--repeats", 3)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    if given.size:
        init = f"file://{given.folder}/store"
        distributed.init_process_group("gloo", init_method=init, rank=given.rank, world_size=given.size)
        (Path(given.folder) / f"{given.rank}.json").write_text(json.dumps(work(given.job, given.batches)))
        return
    taken: dict[tuple[str, int], list[dict[str, float]]] = {(job, size): [] for job in JOBS for size in SIZES}
    for _ in range(given.repeats):
        for (job, size), runs in taken.items():
            runs.append(run(job, size, given.batches))
            print(job, size, runs[-1], flush=True)
    rows = []
    for (job, size), runs in taken.items():
        middle = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        one = statistics.median(each["busiest"] for each in taken[job, 1])
        rows.append({"job": job, "ranks": size, "of one": middle["busiest"] / one, **middle})
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    OUT.mkdir(exist_ok=True)
    (OUT / "ranks.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
