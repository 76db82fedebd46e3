"""Convolutional networks, and a small transformer, that name pictures."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import lite0 as lite0_network
import resnet8 as resnet8_network
from pictures import labels, pictures
from tuned import vit as vit_network
from tuned.rows import BALANCED, BEST, GPTQ_INTERCEPT, NEAREST, Limit
from tuned.subject import Subject, right

BATCH, CALIBRATION = 64, 256
MEAN, SPREAD = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
OF_TRANSFORMERS = (
    Limit("decibels", 6.0, NEAREST),
    Limit("decibels", 0.0, GPTQ_INTERCEPT),
    Limit("score", -0.5, "float"),
)


def zipped(images: Tensor, answers: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(images.split(250), answers.split(250), strict=True)


def resnet8() -> Subject:
    limits = {
        "W4A8": (Limit("score", 81.6),),
        "W3A8": (Limit("score", 79.0),),
        "W4A4": (Limit("score", 78.0),),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    judging = partial(zipped, pictures("test_batch"), labels())
    calibration = pictures("data_batch_1", CALIBRATION).split(BATCH)
    network = resnet8_network.trained().eval()
    return Subject("ResNet-8", network, calibration, judging, right, limits, best=("W4A8", "W3A8", "W4A4"))


def vit() -> Subject:
    judging = partial(zipped, pictures("test_batch"), labels())
    calibration = pictures("data_batch_1", 2 * CALIBRATION).split(BATCH)
    limits = {
        "W4A8": OF_TRANSFORMERS,
        "W3A8": OF_TRANSFORMERS,
        "W4A4": (),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    return Subject("ViT, CIFAR-10", vit_network.trained(), calibration, judging, right, limits, best=("W3A8",))


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
            inputs = [widths[stage - 1], *[widths[stage]] * (blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(*(CifarBlock(each, widths[stage]) for each in inputs)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.linear(x.mean((2, 3)))
        return result


def cifar(folder: Path, depth: int) -> Subject:
    def normal(sheet: Tensor) -> Tensor:
        return ((sheet * 128 + 128) / 255 - MEAN) / SPREAD

    model = CifarResNet((depth - 2) // 6)
    model.load_state_dict(load_file(folder / f"cifar_resnet{depth}.safetensors"), strict=False)
    calibration = normal(pictures("data_batch_1", CALIBRATION)).split(BATCH)
    limits = {
        "W4A8": (Limit("score", -0.3, "float"),),
        "W3A8": (Limit("score", -1.5, "float"),),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    judging = partial(zipped, normal(pictures("test_batch")), labels())
    return Subject(f"CIFAR ResNet-{depth}", model.eval(), calibration, judging, right, limits)


def lite0(folder: Path) -> Subject:
    rows = list(csv.DictReader((folder / "labels.csv").open()))

    def batches(chosen: Sequence[dict[str, str]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            pixels = [np.asarray(Image.open(folder / row["file"]).convert("RGB")).astype(np.float32) for row in part]
            images = torch.from_numpy(((np.stack(pixels) - 127) / 128).transpose(0, 3, 1, 2).copy())
            yield images, torch.tensor([int(row["label"]) for row in part])

    model = lite0_network.trained()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    limits = {
        "W4A8": (
            Limit("score", -4.0, "float", BALANCED),
            Limit("seconds", 120.0, how=BALANCED),
            Limit("score", -2.5, "float", BEST),
        ),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    return Subject(
        "EfficientNet-Lite0",
        model,
        [images for images, _ in batches(rows[:128], 16)],
        partial(batches, rows[128:], 32),
        right,
        limits,
        {names[0]: 8, names[-1]: 8},
        (NEAREST, BALANCED),
        best=("W4A8",),
    )
