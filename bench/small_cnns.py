"""Ten small CNNs (10 thousand to 2 million parameters, 32 to 96 pixels): no deployed file is slower than its float one.

Each is quantized for the runtime twice: with all that can be, and with what wins alone, as deploy does; for OpenVINO,
which has no table of kernels, both are the same. Both files and the float one are timed in turns in one process, one
thread, medians. The rows are of the kernels that the runtime takes here, with VNNI or without.

    python bench/small_cnns.py [--runtime onnxruntime | openvino] [name ..]
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from kernels import kernels_here
from measure import publish
from onnx_files import arrays, size_of, speeds
from scalepoint.quantize import QuantConfig, calibrate, coverage, insert_qdq
from scalepoint.targets import Target, onnxruntime_target, openvino_target

OUT = Path(__file__).parent.parent / "out"
REPEATS = 2000  # a run takes a fraction of a millisecond: medians of 60 moved by 6 %


def conv(
    source: int, made: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(source, made, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(made),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    def __init__(self, source: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(source, made, 3, stride), conv(made, made, act=None))
        self.skip = nn.Identity() if source == made and stride == 1 else conv(source, made, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Inverted(nn.Module):
    def __init__(self, source: int, made: int, stride: int = 1, expand: int = 4, act: type = nn.ReLU6) -> None:
        super().__init__()
        inner = source * expand
        self.body = nn.Sequential(
            conv(source, inner, 1, act=act),
            conv(inner, inner, 3, stride, groups=inner, act=act),
            conv(inner, made, 1, act=None),
        )
        self.adds = source == made and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


class Fire(nn.Module):
    def __init__(self, source: int, squeezed: int, made: int) -> None:
        super().__init__()
        self.squeeze = conv(source, squeezed, 1)
        self.one, self.three = conv(squeezed, made, 1), conv(squeezed, made, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(x)
        return torch.cat([self.one(y), self.three(y)], 1)


def head(channels: int, classes: int = 10) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def separable(source: int, made: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(conv(source, source, 3, stride, groups=source), conv(source, made, 1))


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
        made = width * 2**stage
        source = made if stage == 0 else made // 2
        layers += [Residual(source, made, 1 if stage == 0 else 2), *(Residual(made, made) for _ in range(blocks - 1))]
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


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
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


def settled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)  # type: ignore[union-attr, operator]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    return model.eval()


@dataclass(frozen=True)
class Row:
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


def measured(name: str, target: Target) -> Row:
    torch.manual_seed(0)
    make, pixels = NETS[name]
    model, data = settled(make()), [torch.randn(4, 3, pixels, pixels) for _ in range(2)]
    one = data[0][:1]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        paths = [folder / "float.onnx"]
        made = {}
        for first in (False, True):
            result = scalepoint.transform(model, one, target=target)
            made[first] = insert_qdq(result.model, result.matches, QuantConfig(speed_first=first), copy=False)
            calibrate(made[first], data, freeze_weights=True, progress=False)
            paths.append(folder / f"{len(paths)}.onnx")
            scalepoint.export(made[first], paths[-1], one, float_path=paths[0])
        _, everything, speed = speeds(paths, arrays(model, one), target.runtime or "", REPEATS)
        rows = coverage(made[True]).operations
        left, smaller = sum(row.is_for_speed for row in rows), size_of(paths[0]) / size_of(paths[2])
        parameters = sum(each.numel() for each in model.parameters())
        return Row(name, parameters, pixels, everything, speed, smaller, left, len(rows))


TARGETS = {"onnxruntime": onnxruntime_target, "openvino": openvino_target}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="all unless named")
    parser.add_argument("--runtime", choices=TARGETS, default="onnxruntime")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cpu = kernels_here()
    rows = [measured(name, TARGETS[given.runtime](cpu)) for name in given.name or NETS]
    table = Table(title=f"Small CNNs in {given.runtime}, {cpu}, batch 1, against the float file")
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
        left = f"{row.left} of {row.layers}"
        table.add_row(row.name, f"{row.parameters:,}", str(row.size), *speeds_, left, style=style)
    runtime = "" if given.runtime == "onnxruntime" else f"-{given.runtime}"
    return 0 if publish(table, rows, OUT / f"small_cnns{runtime}-{cpu}.json") else 1


if __name__ == "__main__":
    sys.exit(main())
