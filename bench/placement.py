"""Speed of the three placements of deploy in a runtime, next to ONNX Runtime's quantize_static (or NNCF in OpenVINO).

    python bench/placement.py [NETWORK ..] [--runtime onnxruntime | openvino] [--threads 1] [--tables NAME]

All files of a network are timed interleaved in one process; medians; speeds are relative to the faster of two float
files, ours and that of torch.onnx.export. `--tables onnxruntime-avx2` forces the shipped table of another CPU, as on a
CPU that no table was made for. The first measured deploy starts without any local times; the
second has those of the first. Results go to out/placement.json.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from networks import SUBJECTS, Subject
from onnx_files import arrays, nncf_quantize, quantize_static, ran, run, sqnr
from plain_models import UNet
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.support.cpu import describe_cpu
from scalepoint.targets import find_target

OUT = Path(__file__).parent.parent / "out"
ROUNDS = 60


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
    "conv1d": lambda: random_subject(
        "1-d CNN", nn.Sequential(nn.Conv1d(4, 16, 5), nn.ReLU(), nn.Conv1d(16, 8, 5)), 1, 4, 100
    ),
}
NETWORKS = {**{name: lambda make=make: make(None) for name, make in SUBJECTS.items()}, **SMALL}


def time_files(paths: dict[str, Path], feeds: Any, runtime: str, threads: int) -> dict[str, float]:
    """Return the median seconds of each file; all files run in turns in one process."""
    with exchange_files(feeds) as files:
        request = {
            "task": "benchmark",
            "paths": [str(path) for path in paths.values()],
            "options": {"threads": threads},
        }
        limits = {"repeats": ROUNDS, "seconds": 40}
        result = run_task(find_runtime(runtime), {**request, **files.paths, **limits}, seconds=900)
    if result.data is None:
        raise SystemExit(f"{runtime} could not run the files: {result.message}")
    return {name: quartiles[1] for name, quartiles in zip(paths, result.data["quartiles"], strict=True)}


def measure(subject: Subject, runtime: str, threads: int, tables: str | None, folder: Path) -> list[dict[str, Any]]:
    """Deploy a network in every way and time the files."""
    os.environ["SCALEPOINT_CACHE"] = str(folder / "cache")
    target = find_target(runtime)
    if tables is not None:
        target = replace(target, kernel_tables=(tables,))
    rows: dict[str, dict[str, Any]] = {}
    paths: dict[str, Path] = {}
    expected = run(subject.model, subject.held_out)
    for name in ("predicted", "int8", "measured", "measured again"):
        start = time.process_time()
        done = scalepoint.deploy(
            subject.model, subject.inputs, subject.calibration, target=target, output=folder / name.replace(" ", "-"),
            placement=name.split()[0], threads=threads, progress=False, allow_departure=True,
        )  # fmt: skip
        paths[name] = done.path
        decibels = sqnr(expected, ran(done.path, arrays(subject.model, subject.held_out), runtime)[0])
        float_layers = sum(row.is_for_speed for row in done.coverage.operations)
        rows[name] = {"dB": decibels, "float for speed": float_layers, "files": len(done.trials)}
        rows[name]["CPU seconds"] = time.process_time() - start
        assert done.float_path is not None
        paths["float"] = done.float_path
        if (plain := done.float_path.with_name("float_plain.onnx")).is_file():
            paths["plain float"] = plain
    paths["their tool"] = folder / "theirs.onnx"
    batches = [arrays(subject.model, batch) for batch in subject.calibration]
    try:
        if runtime == "onnxruntime":
            quantize_static(paths["float"], paths["their tool"], batches)
        elif find_spec("nncf"):
            paths["their tool"] = folder / "theirs.xml"
            nncf_quantize(paths["float"], paths["their tool"], batches, is_transformer=subject.is_transformer)
        else:
            del paths["their tool"]
    except Exception as error:  # their tool may refuse a network: the row then says so
        Console().print(f"their tool refuses {subject.title}: {type(error).__name__}: {str(error)[:100]}")
        del paths["their tool"]
    if "their tool" in paths:
        output = ran(paths["their tool"], arrays(subject.model, subject.held_out), runtime)[0]
        rows["their tool"] = {"dB": sqnr(expected, output)}
    seconds = time_files(paths, arrays(subject.model, subject.inputs), runtime, threads)
    fastest = min(seconds[name] for name in ("float", "plain float") if name in seconds)
    for name in [name for name in paths if "float" not in name]:
        rows.setdefault(name, {})["speed"] = fastest / seconds[name]
    return [{"network": subject.title, "file": name, **row} for name, row in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], help="all if not given")
    parser.add_argument("--runtime", choices=("onnxruntime", "openvino"), default="onnxruntime")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table(title=f"{options.runtime}, {options.threads} thread(s), {describe_cpu()}, tables: {options.tables}")
    columns = ("network", "file", "speed", "dB", "float for speed", "files", "CPU seconds")
    for column in columns:
        table.add_column(column)
    results: list[dict[str, Any]] = []
    for name in options.networks or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(NETWORKS[name](), options.runtime, options.threads, options.tables, Path(folder))
        results += rows
        for row in rows:
            values = [row.get(column, "") for column in columns]
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
            print(
                *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values), sep=" | ", flush=True
            )
    Console(width=120).print(table)
    OUT.mkdir(exist_ok=True)
    settings = {"runtime": options.runtime, "threads": options.threads, "tables": options.tables, "cpu": describe_cpu()}
    (OUT / "placement.json").write_text(json.dumps({**settings, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
