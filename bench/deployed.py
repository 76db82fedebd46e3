"""Deployed files in ONNX Runtime and OpenVINO: what runs in int8, agreement, error against float, speed, size.

    python bench/deployed.py networks [resnet50 bert ..] [--runtime onnxruntime | openvino] [--quick]
    python bench/deployed.py small-cnns [NAME ..] [--runtime onnxruntime | openvino]

All files of a network are timed interleaved in one process, one thread, medians.
networks: one float file, ours as deploy makes it, and ONNX Runtime's own quantize_static on the same float file.
Without VNNI also the same placement with all 8 bits of the weights (which saturates), with 7-bit and with u8 weights.
Speeds are ratios to the faster of the float file and of what torch.onnx.export writes. Ours is also compared layer by
layer. In OpenVINO: ours, and NNCF's file if nncf is installed. Results are merged into out/deployed.json, or with VNNI
into out/deployed-vnni.json, so that a part can be run again.
small-cnns: CNNs of 10 thousand to 2 million parameters at 32 to 96 pixels, each quantized twice: everything, and only
what becomes faster, as deploy does. No deployed file may be slower than its float file. OpenVINO has no table of
kernels, so both files are the same there.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import scalepoint
from kernels import kernels_here
from measure import publish, run_part
from networks import SUBJECTS, Subject
from onnx_files import (
    ANSWERS,
    NAIVE,
    NNCF,
    OURS,
    OURS_VNNI,
    QUANTIZE_STATIC,
    File,
    arrays,
    nncf_quantize,
    quantize_static,
    ran,
    run,
    share,
    size_of,
    speeds,
    sqnr,
    with_weights,
)
from scalepoint.formats import ExportRequest
from scalepoint.formats.onnx import ONNX
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import QuantConfig, calibrate, coverage, insert_qdq, quantize
from scalepoint.targets import Target, onnxruntime_target, openvino_target
from scalepoint.verification import verify_layers
from scalepoint.verification.benchmarking import baseline_file

CPU = kernels_here()
OUT = Path(__file__).parent.parent / "out"
DEPLOYED_FILE = OUT / ("deployed.json" if CPU == "avx2" else "deployed-vnni.json")

console = Console(width=150)


@dataclass(frozen=True)
class Layers:
    """Every layer given the simulation's input for it; the worst tensor counts."""

    how: str
    tensors: int
    int8: str
    least_equal: float
    largest_codes: int
    largest_float_steps: float
    departing: int


def layer_by_layer(how: str, path: Path, quantized: fx.GraphModule, inputs: Any) -> Layers:
    layer_errors = verify_layers(path, quantized, inputs)
    numbers = (
        layer_errors.least_equal,
        layer_errors.largest_codes,
        layer_errors.largest_steps,
        len(layer_errors.departing),
    )
    return Layers(how, len(layer_errors.layers), share(layer_errors.low_precision, layer_errors.fallbacks), *numbers)


def in_onnxruntime(subject: Subject, folder: Path, *, quick: bool) -> dict[str, Any]:
    plain, paths, simulated, layers = folder / "float.onnx", {}, {}, []
    our_way = OURS if CPU == "avx2" else OURS_VNNI
    config, data = QuantConfig(speed_first=True, correct_bias=True), subject.calibration
    ours = quantize(subject.model, subject.inputs, config, forward_loop=data, target=onnxruntime_target(CPU))
    for how in (our_way, *(() if quick or CPU == "vnni" else ANSWERS)):
        path = paths[how] = folder / f"{len(paths)}.onnx"
        quantized = ours if how == our_way else with_weights(ours, ANSWERS[how], data)
        scalepoint.export(quantized, path, subject.inputs, float_path=plain if how == our_way else None)
        simulated[how] = run(quantized, subject.held_out)
        if how in (our_way, NAIVE):
            layers.append(asdict(layer_by_layer(how, path, quantized, subject.inputs)))
        console.print(f"  {how} is written")
    paths[QUANTIZE_STATIC] = folder / "theirs.onnx"
    quantize_static(plain, paths[QUANTIZE_STATIC], [arrays(subject.model, batch) for batch in subject.calibration])
    files = judge_files(subject, plain, paths, simulated, "onnxruntime")
    files[0]["left"] = sum(row.is_for_speed for row in coverage(ours).operations)
    return {"onnxruntime": files, "layers": layers}


def in_openvino(subject: Subject, folder: Path, *, quick: bool) -> dict[str, Any]:
    our_way = OURS if CPU == "avx2" else OURS_VNNI
    plain, paths = folder / "float.onnx", {our_way: folder / "openvino.onnx"}
    config, target = QuantConfig(correct_bias=True), openvino_target(CPU)
    quantized = quantize(subject.model, subject.inputs, config, forward_loop=subject.calibration, target=target)
    scalepoint.export(quantized, paths[our_way], subject.inputs, float_path=plain)
    if find_spec("nncf") and not quick:
        paths[NNCF] = folder / "nncf.xml"
        batches = [arrays(subject.model, batch) for batch in subject.calibration]
        nncf_quantize(plain, paths[NNCF], batches, is_transformer=subject.is_transformer)
    return {"openvino": judge_files(subject, plain, paths, {our_way: run(quantized, subject.held_out)}, "openvino")}


def judge_files(
    subject: Subject, plain: Path, paths: Mapping[str, Path], simulated: Mapping[str, Tensor], runtime: str
) -> list[dict[str, Any]]:
    """What each file gives in its runtime, and how fast."""
    expected, feeds = run(subject.model, subject.held_out), arrays(subject.model, subject.held_out)
    with baseline_file(subject.model, ONNX, ExportRequest(as_inputs(subject.inputs, None), None)) as other:
        plains = [plain, *([other] if other else [])]
        medians = speeds([*plains, *paths.values()], arrays(subject.model, subject.inputs), runtime)
    ratios = [median / max(medians[: len(plains)]) for median in medians[len(plains) :]]
    files = []
    for (how, path), ratio in zip(paths.items(), ratios, strict=True):
        output, int8 = ran(path, feeds, runtime)
        agreement = sqnr(simulated[how], output) if how in simulated else None
        size = size_of(path) / size_of(plain)
        files.append(asdict(File(how, int8, sqnr(expected, output), agreement, ratio, size)))
    return files


RUNTIMES = {"onnxruntime": in_onnxruntime, "openvino": in_openvino}


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def show(title: str, measured: Mapping[str, Any]) -> None:
    for runtime in RUNTIMES:
        if runtime not in measured:
            continue
        table = Table(
            "how", "int8", "dB against float", "dB to simulation", "speed", "size", title=f"{title} in {runtime}"
        )
        for row in measured[runtime]:
            numbers = (number(row["against_float"], ".1f"), number(row["agreement"], ".1f"))
            table.add_row(row["how"], row["int8"], *numbers, f"{row['speed']:.2f}x", f"{row['size']:.2f}x")
        console.print(table)
    if "layers" in measured:
        table = Table(
            "how", "tensors", "int8", "equal codes", "largest", "float32 steps", "depart", title="layer by layer"
        )
        for row in measured["layers"]:
            codes = (f"{row['least_equal']:.4%}", str(row["largest_codes"]), f"{row['largest_float_steps']:.3g}")
            table.add_row(row["how"], str(row["tensors"]), row["int8"], *codes, str(row["departing"]))
        console.print(table)


def keep(name: str, subject: Subject, measured: Mapping[str, Any]) -> None:
    """Merge into what other runs found."""
    stored = json.loads(DEPLOYED_FILE.read_text()) if DEPLOYED_FILE.exists() else {}
    about = {"title": subject.title, "is_transformer": subject.is_transformer}
    stored[name] = {**stored.get(name, {}), **about, **measured}
    DEPLOYED_FILE.parent.mkdir(exist_ok=True)
    DEPLOYED_FILE.write_text(json.dumps({title: stored[title] for title in SUBJECTS if title in stored}, indent=2))


def networks() -> int:
    parser = argparse.ArgumentParser(description="Deployed files of well-known networks")
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(SUBJECTS)}; all when none is named")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), help="both unless given")
    parser.add_argument(
        "--pictures", type=Path, help="a folder with photographs for EfficientNet-Lite0; else it has 20"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the other answers to saturation, and NNCF")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: one of {', '.join(SUBJECTS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.models or SUBJECTS:
        subject = SUBJECTS[name](options.pictures)
        console.print(f"[bold]{subject.title}")
        with tempfile.TemporaryDirectory() as folder:
            for runtime, measure in RUNTIMES.items():
                if options.runtime in (None, runtime):
                    keep(name, subject, measured := measure(subject, Path(folder), quick=options.quick))
                    show(subject.title, measured)
    return 0


REPEATS = 2000  # a run takes a fraction of a millisecond: medians of 60 moved by 6 %


def conv(
    source: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(source, channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    def __init__(self, source: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(source, channels, 3, stride), conv(channels, channels, act=None))
        self.skip = nn.Identity() if source == channels and stride == 1 else conv(source, channels, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Inverted(nn.Module):
    def __init__(self, source: int, channels: int, stride: int = 1, expand: int = 4, act: type = nn.ReLU6) -> None:
        super().__init__()
        inner = source * expand
        self.body = nn.Sequential(
            conv(source, inner, 1, act=act),
            conv(inner, inner, 3, stride, groups=inner, act=act),
            conv(inner, channels, 1, act=None),
        )
        self.adds = source == channels and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


class Fire(nn.Module):
    def __init__(self, source: int, squeezed: int, channels: int) -> None:
        super().__init__()
        self.squeeze = conv(source, squeezed, 1)
        self.one, self.three = conv(squeezed, channels, 1), conv(squeezed, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(x)
        return torch.cat([self.one(y), self.three(y)], 1)


def head(channels: int, classes: int = 10) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def separable(source: int, channels: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(conv(source, source, 3, stride, groups=source), conv(source, channels, 1))


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def vgg() -> nn.Module:
    return nn.Sequential(
        *(conv(3, 32), conv(32, 32), nn.MaxPool2d(2), conv(32, 64), conv(64, 64), nn.MaxPool2d(2)),
        *(conv(64, 128), conv(128, 128), *head(128)),
    )


def resnet(width: int, blocks: int) -> nn.Module:
    layers: list[nn.Module] = [conv(3, width)]
    for stage in range(3):
        channels = width * 2**stage
        source = channels if stage == 0 else channels // 2
        layers += [
            Residual(source, channels, 1 if stage == 0 else 2),
            *(Residual(channels, channels) for _ in range(blocks - 1)),
        ]
    return nn.Sequential(*layers, *head(4 * width))


def mobilenet() -> nn.Module:
    return nn.Sequential(
        *(
            conv(3, 16, 3, 2, act=nn.ReLU6),
            Inverted(16, 24, 2),
            Inverted(24, 24),
            Inverted(24, 40, 2),
            Inverted(40, 40),
        ),
        *(Inverted(40, 80, 2), Inverted(80, 80), conv(80, 320, 1, act=nn.ReLU6), *head(320)),
    )


def keywords() -> nn.Module:
    return nn.Sequential(conv(3, 64, 3, 2), *(separable(64, 64) for _ in range(4)), *head(64, 12))


def wakewords() -> nn.Module:
    widths = (16, 32, 32, 64, 64, 128, 128)
    steps = (1, 2, 1, 2, 1, 2)
    chain = [separable(a, b, s) for a, b, s in zip(widths, widths[1:], steps, strict=False)]
    return nn.Sequential(conv(3, 16, 3, 2), *chain, *head(128, 2))


def silu() -> nn.Module:
    return nn.Sequential(
        conv(3, 24, 3, 2, act=nn.SiLU), Inverted(24, 32, 2, act=nn.SiLU), Inverted(32, 32, act=nn.SiLU),
        Inverted(32, 64, 2, act=nn.SiLU), Inverted(64, 64, act=nn.SiLU), *head(64),
    )  # fmt: skip


def squeeze() -> nn.Module:
    return nn.Sequential(
        *(conv(3, 32, 3, 2), nn.MaxPool2d(2), Fire(32, 16, 32), Fire(64, 16, 32), nn.MaxPool2d(2)),
        *(Fire(64, 32, 64), Fire(128, 32, 64), *head(128)),
    )


def autoencoder() -> nn.Module:
    return nn.Sequential(
        *(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 32)),
        *(nn.Upsample(scale_factor=2), conv(32, 16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, padding=1)),
    )


SMALL_NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LeNet": (lenet, 32),
    "ResNet-8": (lambda: resnet(16, 1), 32),
    "ResNet-20": (lambda: resnet(16, 3), 32),
    "VGG, 6 convolutions": (vgg, 32),
    "wide ResNet": (lambda: resnet(32, 2), 64),
    "MobileNetV2, small": (mobilenet, 96),
    "keyword spotting, depthwise": (keywords, 48),
    "wake word, depthwise": (wakewords, 96),
    "MobileNet with SiLU": (silu, 64),
    "SqueezeNet, small": (squeeze, 64),
    "autoencoder": (autoencoder, 64),
}


def with_norm_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)  # type: ignore[union-attr, operator]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    return model.eval()


@dataclass(frozen=True)
class SmallRow:
    """One network: speed and size against the float file."""

    name: str
    parameters: int
    size: int
    everything: float  # speed with all that can be quantized
    speed: float  # with what wins alone
    smaller: float
    left: int
    layers: int

    @property
    def holds(self) -> bool:
        return self.speed >= 0.98  # two in a hundred are noise


def measure_small(name: str, target: Target) -> SmallRow:
    torch.manual_seed(0)
    make, pixels = SMALL_NETWORKS[name]
    model, data = with_norm_statistics(make()), [torch.randn(4, 3, pixels, pixels) for _ in range(2)]
    one = data[0][:1]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        paths = [folder / "float.onnx"]
        files = {}
        for first in (False, True):
            result = scalepoint.transform(model, one, target=target)
            files[first] = insert_qdq(result.model, result.matches, QuantConfig(speed_first=first), copy=False)
            calibrate(files[first], data, freeze_weights=True, progress=False)
            paths.append(folder / f"{len(paths)}.onnx")
            scalepoint.export(files[first], paths[-1], one, float_path=paths[0])
        _, everything, speed = speeds(paths, arrays(model, one), target.runtime or "", REPEATS)
        rows = coverage(files[True]).operations
        float_layers, smaller = sum(row.is_for_speed for row in rows), size_of(paths[0]) / size_of(paths[2])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return SmallRow(name, parameters, pixels, everything, speed, smaller, float_layers, len(rows))


TARGETS = {"onnxruntime": onnxruntime_target, "openvino": openvino_target}


def small_cnns() -> int:
    parser = argparse.ArgumentParser(description="Deployed files of small CNNs")
    parser.add_argument("name", nargs="*", help="all unless named")
    parser.add_argument("--runtime", choices=TARGETS, default="onnxruntime")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [measure_small(name, TARGETS[options.runtime](CPU)) for name in options.name or SMALL_NETWORKS]
    table = Table(title=f"Small CNNs in {options.runtime}, {CPU}, batch 1, against the float file")
    for column in (
        "network",
        "parameters",
        "pixels",
        "all quantized",
        "speed first",
        "smaller",
        "left float for speed",
    ):
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        speeds_ = (f"{row.everything:.2f}x", f"{row.speed:.2f}x", f"{row.smaller:.2f}x")
        style = None if row.holds else "bold red"
        float_share = f"{row.left} of {row.layers}"
        table.add_row(row.name, f"{row.parameters:,}", str(row.size), *speeds_, float_share, style=style)
    runtime = "" if options.runtime == "onnxruntime" else f"-{options.runtime}"
    return 0 if publish(table, rows, OUT / f"small_cnns{runtime}-{CPU}.json") else 1


PARTS = {"networks": networks, "small-cnns": small_cnns}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
