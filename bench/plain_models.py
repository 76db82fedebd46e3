"""Networks in plain torch with random weights. Only BERT needs another package, transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        same = stride == 1 and inputs == outputs
        self.downsample = (
            None if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 128, 256, 512)
        blocks = []
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            blocks += [ResNetBlock(inputs, outputs, 1 if stage == 0 else 2), ResNetBlock(outputs, outputs, 1)]
        self.layers = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def resnet18(seed: int = 0) -> ResNet18:
    """Random weights; the statistics of the batch norms are those of random inputs."""
    torch.manual_seed(seed)
    model = ResNet18().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain average of the batches below
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, 96, 96))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model.eval()


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    mlp: int = 512
    layers: int = 2
    heads: int = 4
    groups: int = 2  # of queries that share a key and a value
    words: int = 256
    is_tied: bool = False  # the head multiplies by the table of the embedding
    base: float = 10000.0  # of the angles
    eps: float | None = None  # of the norms

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """x at each position turned by angles that grow with the position: cos x + sin x', halves of x swapped."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies
    cos, sin = (torch.cat((values, values), -1) for values in (angles.cos(), angles.sin()))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, shared = sizes, sizes.hidden // sizes.groups
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(sizes.hidden, shared, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(projection, self.sizes.base) for projection in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(sizes.hidden, sizes.mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(sizes.hidden, sizes.eps) for _ in range(2))
        self.attention, self.mlp = Attention(sizes), MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Llama(nn.Module):
    """Numbers of words in, scores of the next word out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden, sizes.eps), nn.Linear(sizes.hidden, sizes.words, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def llama(sizes: Sizes) -> Llama:
    torch.manual_seed(0)
    return Llama(sizes).eval()


class UNet(nn.Module):
    """Three levels of 16 to 128 channels, nearest upsampling."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self.block(3, width), self.block(width, 2 * width), self.block(2 * width, 4 * width)]
        )
        self.middle = self.block(4 * width, 8 * width)
        inputs = ((12, 4), (6, 2), (3, 1))
        self.up = nn.ModuleList(self.block(first * width, second * width) for first, second in inputs)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        norms = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        output: Tensor = self.head(x)
        return output


class InvertedResidual(nn.Module):
    """The block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        expand = [] if expansion == 1 else conv_norm_relu6(inputs, inner, 1)
        depthwise = conv_norm_relu6(inner, inner, 3, stride, inner)
        self.body = nn.Sequential(
            *expand, *depthwise, nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.has_skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return x + output if self.has_skip else output


def conv_norm_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6()]


def mobilenet_v2() -> nn.Module:
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers, inputs = conv_norm_relu6(3, 32, 3, 2), 32
    for expansion, outputs, repeats, stride in rows:
        for index in range(repeats):
            layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expansion))
            inputs = outputs
    layers += [*conv_norm_relu6(inputs, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers)


class Bert(nn.Module):
    """6 layers of width 384 from transformers, with a pooled classifier."""

    def __init__(self) -> None:
        super().__init__()
        import transformers  # noqa: PLC0415

        transformers.logging.set_verbosity_error()
        sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
        self.bert = transformers.BertModel(transformers.BertConfig(**sizes))
        self.head = nn.Linear(384, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.bert(input_ids).pooler_output)
        return output


FIRST_FILE_MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "unet": lambda: (UNet().eval(), (1, 3, 128, 128)),
    "resnet18": lambda: (resnet18(), (1, 3, 224, 224)),
    "mobilenetv2": lambda: (mobilenet_v2().eval(), (1, 3, 224, 224)),
    "bert6": lambda: (Bert().eval(), (1, 64)),
}
