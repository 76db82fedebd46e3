"""What tuning costs: seconds a layer and a batch as both grow, and the peak of memory as the batches do.

Time is of the CPU; a ratio of 1 is linear. Memory is what the process grows by beyond the model, values between layers
limited to 20 MB; the batches are made when they are asked for.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from measure import Row, interleave, peak_extra_bytes, report
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune

WIDTH, SIZE, BATCH, REPEATS = 32, 32, 16, 3
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
    model, settings = net(layers), TuneConfig(memory=memory)  # type: ignore[arg-type]

    def run() -> object:
        made: Any = quantize(model, next(iter(Stream(1))), CONFIG, forward_loop=Stream(2), progress=False)
        assert isinstance(made, fx.GraphModule)
        return tune(made, Stream(batches), settings, progress=False)

    return run


def main() -> int:
    torch.set_num_threads(1)
    by_layers = interleave({str(count): tuning(count, 4) for count in (4, 8, 16)}, REPEATS)
    by_batches = interleave({str(count): tuning(6, count) for count in (4, 8, 16)}, REPEATS)
    tuning(4, 2)()  # what is loaded at first use is no cost of the data
    peaks = {count: peak_extra_bytes(tuning(6, count, "20MB")) for count in (4, 8, 16, 32)}
    value = BATCH * WIDTH * SIZE**2 * 4
    rows = [Row("seconds a layer, 16 layers", by_layers["16"] / 4 / by_layers["4"], 1.25, "4 layers")]
    rows += [Row("seconds a batch, 16 batches", by_batches["16"] / 4 / by_batches["4"], 1.25, "4 batches")]
    for count in (8, 16, 32):
        note = f"{peaks[count] / 1e6:.0f} MB; the values between two layers are {2 * count * value / 1e6:.0f} MB"
        rows.append(Row(f"peak memory, {count} batches", peaks[count] / peaks[4], 1.25, "4 batches", note))
    path = Path(__file__).parents[1] / "out" / "tuning-cost.json"
    return int(not report("what tuning costs", rows, path))


if __name__ == "__main__":
    sys.exit(main())
