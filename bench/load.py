"""Under load: a thousand layers, ten thousand batches, a hundred deployments in one process. Nothing may pile up.

    python bench/load.py [layers] [batches] [trials]        all three, or those named

Memory is what the process holds after a collection (Linux: VmRSS, freed pages given back), or how far it grew while a
step worked (VmHWM). Counted are also open files, child processes, threads, hooks on the caller's model, and files that
are left in the folder for temporary ones.
"""

import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from measure import peak_extra_bytes
from scalepoint.quantize import calibrate, insert_qdq
from scalepoint.transformation import transform

OUT = Path(__file__).parent.parent / "out" / "load.json"
LAYERS, BATCHES, TRIALS, WARM = (100, 1000), (100, 10_000), 100, 20
MB = 1e6
GROWTH = 1.05  # allowed of memory
SLOPE = 1.5  # allowed of the time of a layer, ten times the layers


def chain(layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*parts).eval()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()


def batches(count: int) -> Iterator[Tensor]:
    made = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(8, 3, 16, 16, generator=made)


def of_layers() -> Iterator[dict[str, Any]]:
    """The whole road of a chain, ten times as long: seconds of the CPU for each layer."""
    seconds = {}
    for count in LAYERS:
        model, data = chain(count), [torch.randn(4, 64) for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            done = scalepoint.deploy(model, data[0], data, output=folder, progress=False, force=True, strict=True)
            seconds[count] = (time.process_time() - start) / count
        found = done.verification
        assert found is not None
        assert found.holds
        assert found.low_precision == count
    few, many = LAYERS
    yield row(
        f"deploy: CPU of a layer at {many:,} layers, against {few}",
        f"{1e3 * seconds[few]:.0f} ms",
        f"{1e3 * seconds[many]:.0f} ms",
        seconds[many] / seconds[few] <= SLOPE,
    )


def of_batches() -> Iterator[dict[str, Any]]:
    """Calibration over a hundred times the batches: how far the process grows meanwhile."""
    peaks = []
    for count in (BATCHES[0], *BATCHES):  # the first one is to be warm
        result = transform(net(), torch.randn(8, 3, 16, 16), target="onnxruntime")
        model = insert_qdq(result.model, result.matches)
        peaks.append(peak_extra_bytes(partial(calibrate, model, batches(count), progress=False)))
    few, many = BATCHES
    grown = max(peaks[2], 1) / max(peaks[1], MB)  # less than a megabyte is noise
    yield row(
        f"calibrate: memory it takes over {many:,} batches, against {few}",
        f"{peaks[1] / MB:.1f} MB",
        f"{peaks[2] / MB:.1f} MB",
        grown <= GROWTH or peaks[2] < 2 * MB,
    )


def of_trials() -> Iterator[dict[str, Any]]:
    """All stages in a loop (smoke), each with its runtime in a child: what is left after the first, and after all."""
    model, data, found = net(), list(batches(2)), []
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        for number in range(TRIALS):
            scalepoint.deploy(model, data[0], data, output=Path(folder) / "out", progress=False, force=True, smoke=True)
            if number + 1 in (WARM, TRIALS):
                found.append(left(model, Path(folder)))
        tempfile.tempdir = None
    before, after = found
    for name, value in after.items():
        holds = value <= before[name] * GROWTH if name == "memory" else value <= before[name]
        shown = [f"{each[name] / MB:.0f} MB" if name == "memory" else str(each[name]) for each in found]
        yield row(f"deploy, {TRIALS} times: {name}, against {WARM} times", *shown, holds)


def left(model: nn.Module, folder: Path) -> dict[str, int]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "memory": held(),
        "open files": len(os.listdir("/proc/self/fd")),
        "child processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "threads": threading.active_count(),
        "hooks on the model": sum(len(getattr(each, name)) for each in model.modules() for name in tables),
        "temporary files": sum(each.name != "out" for each in folder.iterdir()),
    }


def held() -> int:
    gc.collect()
    CDLL("libc.so.6").malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def row(what: str, before: str, after: str, holds: bool) -> dict[str, Any]:
    return {"what": what, "before": before, "after": after, "holds": holds}


def main() -> int:
    parts = {"layers": of_layers, "batches": of_batches, "trials": of_trials}
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(parts)
    known: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        found = list(parts[name]())
        known = {**(json.loads(OUT.read_text()) if OUT.is_file() else {}), name: found}
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(known, indent=1))
    table = Table("what", "before", "after", "flat")
    rows = [each for name in chosen for each in known[name]]
    for each in rows:
        table.add_row(each["what"], each["before"], each["after"], "yes" if each["holds"] else "NO")
    Console().print(table)
    return int(not all(each["holds"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
