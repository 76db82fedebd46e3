"""Small models, and helpers that all tests of migrations use."""

import torch
import torch.nn.functional as F
from torch import nn

from scalepoint.quantize import (
    QuantConfig,
    TensorQuantConfig,
    disable_fake_quant,
    enable_fake_quant,
    quantize,
    record_of,
)


def seeded(build, *args, seed=0, **kwargs):
    """Real-looking batch norms: statistics and affine that differ by channel."""
    torch.manual_seed(seed)
    model = build(*args, **kwargs).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 2)
                if module.affine:
                    module.weight.uniform_(0.05, 3)
                    module.bias.normal_()
            if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
                module.weight.normal_(1, 0.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0, 0.3)
    return model


def pictures(count=2, size=8, batch=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, size, size, generator=generator) for _ in range(count)]


def rows(width=16, count=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 5, width, generator=generator) for _ in range(count)]


def migrated(model, data, *names, **fields):
    config = QuantConfig(
        **{
            "activation": TensorQuantConfig(),
            "weight": TensorQuantConfig(per_channel=True),
            "migrate": names,
            **fields,
        }
    )
    return quantize(model, data[0], config, forward_loop=data).eval()


def report(quantized):
    return record_of(quantized).migrated


def done(quantized):
    return [row.name for row in report(quantized).done]


def refusals(quantized):
    return {row.name: row.note for row in report(quantized).refused}


@torch.no_grad()
def float_change(model, quantized, data):
    """Relative difference of the float output from the model's, also on data that was not used."""
    disable_fake_quant(quantized)
    worst = 0.0
    for batch in data:
        expected = model(batch)
        worst = max(worst, float((quantized(batch) - expected).norm() / expected.norm()))
    enable_fake_quant(quantized)
    return worst


@torch.no_grad()
def error(model, quantized, data):
    expected, result = model(data[0]), quantized(data[0])
    return float((result - expected).norm() / expected.norm())


class Chain(nn.Sequential):
    """conv, batch norm, activation, depthwise, activation, grouped, pool, flatten, linear."""

    def __init__(self, activation=nn.ReLU):
        super().__init__(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            activation(),
            nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            activation(),
            nn.Conv2d(8, 12, 1, groups=4),
            activation(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12 * 16, 5),
        )


class Attention(nn.Module):
    """Pre-norm attention with grouped keys and values, as `heads` and `shared` say."""

    def __init__(self, norm, width, heads, shared, packed=False, bias=True):
        super().__init__()
        self.norm, self.heads, self.shared, self.packed = norm(width), heads, shared, packed
        self.d = width // heads
        if packed:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q = nn.Linear(width, width, bias=bias)
            self.k, self.v = (nn.Linear(width, shared * self.d, bias=bias) for _ in range(2))
        self.o = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        if self.packed:
            q, k, v = self.qkv(h).reshape(*h.shape[:2], 3, self.heads, self.d).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part(h).unflatten(-1, (-1, self.d)).transpose(1, 2) for part in (self.q, self.k, self.v))
            times = self.heads // self.shared
            k, v = (heads.repeat_interleave(times, dim=1) for heads in (k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, norm, width, gated=True, bias=True):
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)
        self.gate = nn.Linear(width, 2 * width, bias=bias) if gated else None

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h) if self.gate else F.gelu(self.up(h)))


class Language(nn.Module):
    """Embedding (and positions), pre-norm layers, a last norm and a head."""

    def __init__(self, norm=nn.RMSNorm, width=16, heads=2, shared=None, tied=False, positions=False, **more):
        super().__init__()
        bias = more.get("bias", True)
        self.table = nn.Embedding(20, width)
        self.positions = nn.Parameter(torch.randn(1, 6, width)) if positions else None
        self.attention = Attention(norm, width, heads, shared or heads, more.get("packed", False), bias)
        self.mlp = Mlp(norm, width, more.get("gated", True), bias)
        self.norm, self.head = norm(width), nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens) * 1.5
        x = x if self.positions is None else x + self.positions
        return self.head(self.norm(self.mlp(self.attention(x))))


def tokens(count=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20, (3, 6), generator=generator) for _ in range(count)]
