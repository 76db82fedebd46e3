"""Accuracy kept: really trained networks, real labelled data, float against fake-quantized.

Small networks on Fashion-MNIST (10,000 held-out pictures). With `--pictures FOLDER` (JPEG files of 224 x 224 and a
labels.csv with `file,label`) also EfficientNet-Lite0 on those. With `--runtime` the exported files are judged in ONNX
Runtime instead of the simulation, and MiniLM on the sentences of the demo joins them.
"""

import argparse
import copy
import csv
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fashion_mnist as fashion
import scalepoint
from scalepoint.quantize import CalibrationMethod, QuantConfig, TensorQuantConfig, prepare_qat, quantize
from scalepoint.verification import RuntimeModel

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
import lite0
import sentences

OUT = Path(__file__).parent.parent / "out"
CALIBRATION = 512
QAT = 20_000
MSE = CalibrationMethod.MSE
W4A4 = QuantConfig(
    activation=TensorQuantConfig(n_bits=4, symmetric=False, calibration_method=MSE),
    weight=TensorQuantConfig(n_bits=4, per_channel=True, calibration_method=MSE),
)


@dataclass(frozen=True)
class Result:
    model: str
    how: str
    accuracy: float
    drop: float
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.drop <= self.limit


Judge = Callable[[Any], float]
Road = Callable[[str, nn.Module, list[Any], Judge], list[Result]]


def simulated(name: str, model: nn.Module, calibration: list[Any], judge: Judge) -> list[Result]:
    """The defaults of the targets."""
    results = [Result(name, "float32", judge(model), 0.0)]
    for target in ("tensorrt", "reference"):
        quantized = quantize(model, calibration[0], forward_loop=calibration, target=target)
        reached = judge(quantized)
        results.append(Result(name, f"W8A8, target {target}", reached, results[0].accuracy - reached, 0.5))
    return results


def in_runtime(name: str, model: nn.Module, calibration: list[Any], judge: Judge) -> list[Result]:
    """The exported file in ONNX Runtime on this CPU, one thread."""
    results = [Result(name, "float32", judge(model), 0.0)]
    quantized = quantize(model, calibration[0], forward_loop=calibration, target="onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        path = scalepoint.export(quantized, Path(folder) / "model.onnx", calibration[0])
        reached = judge(RuntimeModel(path, threads=1))
    results.append(Result(name, "int8 file in ONNX Runtime", reached, results[0].accuracy - reached, 0.5))
    return results


def w4a4(name: str, model: nn.Module, x: Tensor, y: Tensor, judge: Judge) -> list[Result]:
    """4 bits everywhere: what calibration alone loses, and how much training with fake quantization wins back."""
    before = judge(model)
    quantized = quantize(model, x[:2], W4A4, forward_loop=list(x[:CALIBRATION].split(64)))
    calibrated = judge(quantized)
    trainee = prepare_qat(copy.deepcopy(quantized), learn_scales=True)
    torch.manual_seed(0)
    fashion.train(trainee, x[:QAT], y[:QAT], epochs=1, rate=1e-3)
    reached = judge(trainee)
    lost = before - calibrated
    return [
        Result(name, "W4A4, calibrated", calibrated, lost),
        Result(name, f"W4A4, QAT on {QAT:,} pictures", reached, before - reached, lost / 2),
    ]


def pictures(folder: Path) -> tuple[Tensor, Tensor]:
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    arrays = [np.asarray(Image.open(folder / row["file"]).convert("RGB")) for row in rows]
    x = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    return x, torch.tensor([int(row["label"]) for row in rows])


def photographs(folder: Path, road: Road) -> list[Result]:
    x, y = pictures(folder)
    model = lite0.trained()

    def scaled(part: Tensor) -> Tensor:
        return (part.to(torch.float32) - 127) / 128

    held_out = list(zip(x[128:].split(50), y[128:].split(50), strict=True))

    @torch.no_grad()
    def judge(run: Any) -> float:
        right = sum(int((run(scaled(part)).argmax(1) == labels).sum()) for part, labels in held_out)
        return 100 * right / len(y[128:])

    return road(f"EfficientNet-Lite0, {len(y) - 128} photographs", model, list(scaled(x[:128]).split(64)), judge)


def reviews(road: Road) -> list[Result]:
    """The sentence encoder of the demo, judged by the classifier that was fitted on its float vectors."""
    model, tokenizer = sentences.load()
    texts, positive = sentences.sentences()
    train, end = sentences.TRAIN, sentences.TRAIN + sentences.TEST
    head = sentences.classifier(sentences.vectors(model, sentences.batches(tokenizer, texts[:train])), positive[:train])
    held_out, answers = sentences.batches(tokenizer, texts[train:end]), positive[train:end]

    @torch.no_grad()
    def judge(run: Any) -> float:
        return 100 * float(((head(sentences.vectors(run, held_out))[:, 0] > 0) == answers).float().mean())

    return road(f"MiniLM-L6, {len(answers)} reviews", model, sentences.batches(tokenizer, texts[end:]), judge)


def show(results: list[Result], path: Path) -> bool:
    table = Table(title="accuracy, percent")
    for column in ("model", "how", "accuracy", "drop", "limit"):
        table.add_column(column, justify="left" if column in ("model", "how") else "right")
    for row in results:
        limit = "" if row.limit is None else f"{row.limit:.2f}"
        style = None if row.holds else "bold red"
        table.add_row(row.model, row.how, f"{row.accuracy:.2f}", f"{row.drop:+.2f}", limit, style=style)
    Console(width=110).print(table)
    OUT.mkdir(exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in results], indent=2))
    return all(row.holds for row in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="a folder with labelled photographs, for EfficientNet-Lite0")
    parser.add_argument("--runtime", action="store_true", help="judge the exported files in ONNX Runtime")
    options = parser.parse_args()
    road = in_runtime if options.runtime else simulated
    x, y, test_x, test_y = fashion.data()
    results: list[Result] = []
    for kind, epochs, rate in ((fashion.DepthwiseNet, 3, 4e-3), (fashion.SmallViT, 4, 2e-3)):
        model = fashion.trained(kind, x, y, epochs, rate)

        def judge(run: Any) -> float:
            return fashion.accuracy(run, test_x, test_y)

        results += road(kind.__name__, model, list(x[:CALIBRATION].split(64)), judge)
        if kind is fashion.DepthwiseNet and not options.runtime:
            results += w4a4(kind.__name__, model, x, y, judge)
    if options.pictures:
        results += photographs(options.pictures, road)
    if options.runtime:
        results += reviews(road)
    return 0 if show(results, OUT / ("accuracy-runtime.json" if options.runtime else "accuracy.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
