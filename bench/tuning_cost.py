"""What tuning costs: seconds a layer and a batch as both grow, and the peak of memory as the batches do.

Time is of the CPU; a ratio of 1 is linear. Memory is what the process grows by beyond the model, values between layers
limited to 4 MB; the batches are made when they are asked for. It is taken in a process that gives freed memory back at
once (MALLOC_MMAP_THRESHOLD_): what glibc keeps for later is no need of tuning.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from measure import Row, interleave, peak_extra_bytes, report
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune

WIDTH, SIZE, BATCH, REPEATS = 32, 16, 32, 3
MEMORY = "--memory"  # measure that alone
CONFIG = QuantConfig(
    activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True)
)


class Stream:
    """So many batches, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            yield torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))


def net(layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU()]
    for _ in range(layers - 1):
        parts += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*parts).eval()


def tuning(layers: int, batches: int, memory: str = "2GB") -> Callable[[], object]:
    """A function that quantizes and tunes anew each time; the time of quantizing is small beside it."""
    model, settings = net(layers), TuneConfig(memory=memory, rows=2048)  # type: ignore[arg-type]

    def run() -> object:
        made: Any = quantize(model, next(iter(Stream(1))), CONFIG, forward_loop=Stream(2), progress=False)
        assert isinstance(made, fx.GraphModule)
        return tune(made, Stream(batches), settings, progress=False)

    return run


def peaks_of_memory() -> dict[int, int]:
    """By the number of batches."""
    tuning(4, 2)()  # what is loaded at first use is no cost of the data
    return {count: peak_extra_bytes(tuning(6, count, "4MB")) for count in (4, 8, 16, 32)}


def measured_apart() -> dict[int, int]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, __file__, MEMORY]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(count): peak for count, peak in json.loads(found.stdout).items()}


def main() -> int:
    torch.set_num_threads(1)
    by_layers = interleave({str(count): tuning(count, 4) for count in (4, 16)}, REPEATS)
    by_batches = interleave({str(count): tuning(6, count) for count in (4, 16)}, REPEATS)
    peaks = measured_apart()
    value = BATCH * WIDTH * SIZE**2 * 4
    rows = [Row("seconds a layer, 16 layers", by_layers["16"] / 4 / by_layers["4"], 1.25, "4 layers")]
    rows += [Row("seconds a batch, 16 batches", by_batches["16"] / 4 / by_batches["4"], 1.25, "4 batches")]
    for count in (8, 16, 32):
        note = f"{peaks[count] / 1e6:.0f} MB; the values between two layers are {2 * count * value / 1e6:.0f} MB"
        rows.append(Row(f"peak memory, {count} batches", peaks[count] / peaks[4], 1.25, "4 batches", note))
    path = Path(__file__).parents[1] / "out" / "tuning-cost.json"
    return int(not report("what tuning costs", rows, path))


if __name__ == "__main__":
    if MEMORY in sys.argv:
        torch.set_num_threads(1)
        print(json.dumps(peaks_of_memory()))
    else:
        sys.exit(main())
