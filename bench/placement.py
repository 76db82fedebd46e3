"""Speed, error and size of what deploy writes, next to quantize_static (ONNX Runtime) or NNCF (OpenVINO).

    python bench/placement.py [NETWORK .. | twelve | tiny] [--runtime onnxruntime | openvino] [--batches 1 8]
                              [--threads 1 2] [--rounds 30] [--again] [--tables NAME] [--lock FILE]

A network is deployed with a batch of one: placed by measurement; with --again a second time with what the first deploy
left in the user's cache; and with all layers in int8 if the measurement left any in float. The other tools get the same
calibration data:

    quantize_static  after its own preprocessing (shape inference, graph optimisation), per channel, without
                     reduce_range: from our float file by min-max, entropy and percentile, of which the file with the
                     most dB is timed, and from that of torch.onnx.export by min-max
    NNCF             with its defaults, and for accuracy (mixed preset, full bias correction); both are timed

All files of a network are timed interleaved in one process; medians; with one thread CPU time. Speeds are relative to
the faster of two float files, ours and that of torch.onnx.export. `--tables onnxruntime-avx2` forces the shipped table
of another CPU, as on a CPU that no table was made for, and adds what that table alone predicts. Results are merged into
out/placement.json by runtime, tables and network. YOLO networks and NNCF are taken from .bench-packages, made by

    pip install --no-deps --target .bench-packages nncf natsort pydot ultralytics opencv-python-headless py-cpuinfo
"""

import argparse
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from networks import SUBJECTS, Subject, liven, torchvision_models
from onnx_files import (
    CALIBRATION_METHODS,
    NNCF_PRESETS,
    arrays,
    nncf_quantize,
    preprocess,
    quantize_static,
    ran,
    run,
    size_of,
    sqnr,
)
from plain_models import UNet
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.support.cpu import describe_cpu
from scalepoint.targets import find_target

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "placement.json"
PACKAGES = ROOT / ".bench-packages"
ROUNDS, SECONDS = 30, 20  # of all files of a network, per batch size and number of threads


class C2f(nn.Module):
    """The block of newer YOLO networks: split, two residual branches, concatenation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = self.conv(inputs, outputs, 1), self.conv(2 * outputs, outputs, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(self.conv(half, half, 3), self.conv(half, half, 3)) for _ in range(2)
        )

    @staticmethod
    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for branch in self.branches:
            parts.append(parts[-1] + branch(parts[-1]))
        output: Tensor = self.last(torch.cat(parts, 1))
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x)[0])
        return output


def yolo_like() -> nn.Module:
    layers: list[nn.Module] = [C2f.conv(3, 16, 3, 2)]
    for inputs, outputs in ((16, 32), (32, 64), (64, 128)):
        layers += [C2f.conv(inputs, outputs, 3, 2), C2f(outputs, outputs)]
    return nn.Sequential(*layers, nn.Conv2d(128, 84, 1))


def random_subject(title: str, model: nn.Module, *shape: int) -> Subject:
    generator = torch.Generator().manual_seed(0)
    held_out, *calibration = (torch.randn(*shape, generator=generator) for _ in range(4))
    return Subject(title, model.eval(), held_out, calibration, held_out)


def ultralytics_yolo(name: str) -> Subject:
    """A detector of Ultralytics with random weights; the output is that of its ONNX export."""
    torchvision_models()  # which its modules import
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())
    from ultralytics.nn.tasks import DetectionModel  # noqa: PLC0415

    torch.manual_seed(0)
    model = DetectionModel(f"{name}.yaml", verbose=False).eval()
    liven(model)
    head = model.model[-1]
    head.export, head.format = True, "onnx"
    return random_subject(f"{name} @320", model, 1, 3, 320, 320)


class Gated(nn.Module):
    """A GRU and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x)[0])
        return output


def depthwise_cnn() -> nn.Module:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), depthwise, nn.ReLU6(), nn.Conv2d(8, 16, 1))


def tiny_cnn(size: int) -> nn.Module:
    body = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, size))


def make_encoder(width: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True), 2)


SMALL: dict[str, Any] = {
    "unet": lambda: random_subject("UNet @128", UNet(), 1, 3, 128, 128),
    "yolo": lambda: random_subject("YOLO-like, SiLU, C2f @256", yolo_like(), 1, 3, 256, 256),
    "lstm": lambda: random_subject("LSTM 32-64, 20 steps", Recurrent(), 1, 20, 32),
    "mlp": lambda: random_subject(
        "MLP 16-32-32-4", nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), 1, 16
    ),
    "mlp256": lambda: random_subject(
        "MLP 256", nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), 1, 256
    ),
    "cnn28": lambda: random_subject("CNN @28", tiny_cnn(10), 1, 1, 28, 28),
    "cnn12": lambda: random_subject("CNN @12", tiny_cnn(4), 1, 1, 12, 12),
    "encoder32": lambda: random_subject("2-layer encoder, width 32", make_encoder(32), 2, 32, 32),
    "encoder64": lambda: random_subject("2-layer encoder, width 64", make_encoder(64), 1, 16, 64),
    "mlp64": lambda: random_subject(
        "MLP 64, 4 layers", nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))), 1, 64
    ),
    "depthwise": lambda: random_subject("depthwise CNN @16", depthwise_cnn(), 1, 3, 16, 16),
    "gru": lambda: random_subject("GRU 16-16, 10 steps", Gated(), 1, 10, 16),
    "conv1d": lambda: random_subject(
        "1-d CNN", nn.Sequential(nn.Conv1d(4, 16, 5), nn.ReLU(), nn.Conv1d(16, 8, 5)), 1, 4, 100
    ),
}
YOLOS = {name: lambda name=name: ultralytics_yolo(name) for name in ("yolov8n", "yolo11n")}
NETWORKS = {**YOLOS, **{name: lambda make=make: make(None) for name, make in SUBJECTS.items()}, **SMALL}
TWELVE = (
    "resnet18",
    "resnet50",
    "mobilenet",
    "lite0",
    "squeezenet",
    "unet",
    *YOLOS,
    "minilm",
    "bert",
    "small_vit",
    "lstm",
)
TINY = ("mlp", "mlp64", "mlp256", "cnn28", "cnn12", "depthwise", "encoder32", "encoder64", "conv1d", "gru")
GROUPS = {"twelve": TWELVE, "tiny": TINY}


def with_batch(batch: Any, size: int) -> Any:
    """Return a batch of this size: the samples of another batch, repeated."""
    if isinstance(batch, dict):
        return {name: with_batch(value, size) for name, value in batch.items()}
    return batch[torch.arange(size) % len(batch)]


def time_files(paths: dict[str, Path], feeds: Any, runtime: str, threads: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each file, medians of the calmer rounds; all files run in turns. Equal files run once."""
    names: dict[bytes, str] = {}
    same = {name: names.setdefault(digest(path), name) for name, path in paths.items()}
    with exchange_files(feeds) as files:
        request = {
            "task": "benchmark",
            "paths": [str(paths[name]) for name in names.values()],
            "options": {"threads": threads},
        }
        limits = {"repeats": rounds, "seconds": SECONDS}
        result = run_task(find_runtime(runtime), {**request, **files.paths, **limits}, seconds=900)
    if result.data is None:
        raise SystemExit(f"{runtime} could not run the files: {result.message}")
    medians = dict(zip(names.values(), result.data["medians"], strict=True))
    return {name: medians[other] for name, other in same.items()}


def digest(path: Path) -> bytes:
    """The content of a file and of its weights."""
    content = hashlib.sha256(path.read_bytes())
    if (weights := path.with_suffix(".bin")).exists():
        content.update(weights.read_bytes())
    return content.digest()


def ask_other_tool(
    subject: Subject, floats: dict[str, Path], runtime: str, folder: Path, judge: Callable[[Path], float]
) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Quantize with the runtime's own tool. Returns the files to time, and a row for every setting that was tried."""
    batches = [arrays(subject.model, batch) for batch in subject.calibration]
    paths: dict[str, Path] = {}
    rows: dict[str, dict[str, Any]] = {}

    def attempt(name: str, path: Path, write: Callable[[Path], None]) -> None:
        start = time.process_time()
        try:
            write(path)
            rows[name] = {"dB": judge(path), "CPU seconds": time.process_time() - start}
            paths[name] = path
        except Exception as error:  # their tool may refuse a network or a setting: the row then says so
            rows[name] = {"refused": f"{type(error).__name__}: {str(error)[:100]}"}

    if runtime == "openvino":
        for preset in NNCF_PRESETS:
            write = partial(nncf_quantize, floats["float"], batches=batches, preset=preset)
            attempt(
                f"NNCF, {preset}", folder / f"nncf-{preset}.xml", partial(write, is_transformer=subject.is_transformer)
            )
        return paths, rows
    for source, float_path in floats.items():
        prepared = preprocess(float_path, folder / f"prepared-{source.replace(' ', '-')}.onnx")
        names = []
        for method in CALIBRATION_METHODS if source == "float" else CALIBRATION_METHODS[:1]:
            names.append(f"quantize_static, {method}, {source}")
            write = partial(quantize_static, prepared, batches=batches, method=method)
            attempt(names[-1], folder / f"{source.replace(' ', '-')}-{method}.onnx", write)
        best = max(names, key=lambda name: rows[name].get("dB", -math.inf))
        for name in names:  # the kernels of all methods are the same
            if name != best:
                paths.pop(name, None)
    return paths, rows


def measure(subject: Subject, runtime: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Deploy a network in every way and time the files."""
    os.environ["SCALEPOINT_CACHE"] = str(folder / "cache")
    target = find_target(runtime)
    if options.tables is not None:
        target = replace(target, kernel_tables=(options.tables,))
    rows: dict[str, dict[str, Any]] = {}
    paths: dict[str, Path] = {}
    floats: dict[str, Path] = {}
    expected = run(subject.model, subject.held_out)
    held_out = arrays(subject.model, subject.held_out)

    def judge(path: Path) -> float:
        return sqnr(expected, ran(path, held_out, runtime)[0])

    again = ("measured again",) if options.again else ()
    for name in ("measured", *again, "int8", *(("predicted",) if options.tables else ())):
        if name == "int8" and not rows["measured"]["float for speed"]:
            continue  # the same file
        before = sum(os.times()[:4])
        done = scalepoint.deploy(
            subject.model, with_batch(subject.inputs, 1), subject.calibration, target=target, threads=1,
            output=folder / name.replace(" ", "-"), placement=name.split()[0], progress=False, allow_departure=True,
        )  # fmt: skip
        seconds = sum(os.times()[:4]) - before
        paths[name] = done.path
        float_layers = sum(row.is_for_speed for row in done.coverage.operations)
        rows[name] = {
            "dB": judge(done.path),
            "float for speed": float_layers,
            "files": len(done.trials),
            "CPU seconds": seconds,
        }
        assert done.float_path is not None
        floats = {"float": done.float_path}
        if (plain := done.float_path.with_name("float_plain.onnx")).is_file():
            floats["plain float"] = plain
    if not options.tables:
        their_paths, their_rows = ask_other_tool(subject, floats, runtime, folder, judge)
        paths, rows = {**paths, **their_paths}, {**rows, **their_rows}
    for batch, threads in product(options.batches, options.threads):
        feeds = arrays(subject.model, with_batch(subject.inputs, batch))
        with nullcontext() if options.lock is None else FileLock(options.lock):
            seconds_by_name = time_files({**floats, **paths}, feeds, runtime, threads, options.rounds)
        fastest = min(seconds_by_name[name] for name in floats)
        for name in paths:
            rows[name][f"batch {batch}, {threads} threads"] = fastest / seconds_by_name[name]
    float_size = size_of(floats["float"])
    for name, path in paths.items():
        rows[name]["size"] = size_of(path) / float_size
    return [{"file": name, **row} for name, row in rows.items()]


def describe_commit() -> str:
    """The commit of this checkout; with "+" if files of the package differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=10", "HEAD"], check=True, text=True, capture_output=True
    ).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "src"], check=True, text=True, capture_output=True).stdout
    return commit.strip() + ("+" if changed.strip() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["twelve", "tiny"], help="names, or a group: twelve, tiny")
    parser.add_argument("--runtime", choices=("onnxruntime", "openvino"), default="onnxruntime")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="tiny networks need 1500: they run for microseconds")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--lock", type=Path, help="a file that is locked while files are timed")
    parser.add_argument("--tables")
    options = parser.parse_args()
    names = [name for group in options.networks for name in GROUPS.get(group, (group,))]
    if unknown := [name for name in names if name not in NETWORKS]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join((*GROUPS, *NETWORKS))}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.path.append(str(PACKAGES))
    for name in names:
        subject = NETWORKS[name]()
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(subject, options.runtime, options, Path(folder))
        key = "/".join(filter(None, (options.runtime, options.tables, name)))
        settings = {"runtime": options.runtime, "version": version(options.runtime), "tables": options.tables}
        origin = {"cpu": describe_cpu(), "commit": describe_commit()}
        store(key, {"network": subject.title, **settings, **origin, "rows": rows})
        print_rows(subject.title, options.runtime, rows)


def store(key: str, result: dict[str, Any]) -> None:
    """Add a result to the file, which several runs may write."""
    OUT.parent.mkdir(exist_ok=True)
    with FileLock(OUT.with_suffix(".lock")):
        results = json.loads(OUT.read_text()) if OUT.is_file() else {}
        OUT.write_text(json.dumps({**results, key: result}, indent=1))


def print_rows(title: str, runtime: str, rows: list[dict[str, Any]]) -> None:
    """Print the results of a network."""
    columns = dict.fromkeys(key for row in rows for key in row)
    table = Table(title=f"{title}, {runtime}, {describe_cpu()}")
    for column in columns:
        table.add_column(column)
    for row in rows:
        values = [row.get(column, "") for column in columns]
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
