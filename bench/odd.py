"""More models by hand: how people wrap, tie, cast and branch, and sizes that nobody thinks of."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from handmade import made, normal, plain, whole


class Rounded(torch.autograd.Function):
    """A straight-through step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@made("custom_autograd", normal(12))
class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Rounded.apply(torch.tanh(self.first(x))))


@made("cond", normal(12), lambda: torch.tensor(True))
class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor, is_yes: Tensor) -> Tensor:
        return torch.cond(is_yes, lambda x: self.yes(x) + 0, lambda x: self.no(x) * 2, (torch.relu(self.first(x)),))


@made("autocast", normal(3, 9, 9))
class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.relu(self.conv(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float().mean((2, 3)))


@made("no_grad_inside", normal(12))
class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 16).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.relu(self.body(x))
        return self.head(x.detach())


@made("inference_mode_inside", normal(12))
class Inferred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.head(torch.relu(self.body(x)))


@made("tied_transposed", whole(9))
class Tied(nn.Module):
    """The head multiplies by the table, and a bias goes around twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight, self.again.bias = nn.Parameter(self.body.weight), self.body.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return torch.relu(self.again(torch.relu(self.body(x)))) @ self.table.weight.T


@made("shared_module", normal(8, 9, 9))
class Repeated(nn.Module):
    """One convolution at four depths and two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(self.conv(x)))) + x
            found.append(x)
            x = functional.avg_pool2d(x, 2)
        return found


class Low(nn.Module):
    """LoRA around a layer, as a wrapper makes it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


plain("lora", lambda: nn.Sequential(Low(nn.Linear(16, 32)), nn.GELU(), Low(nn.Linear(32, 8))), normal(16))
plain(
    "spectral_norm",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.2), nn.Flatten()),
    normal(3, 9, 9),
)
plain("orthogonal", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.ReLU()), normal(16))
plain(
    "old_weight_norm",
    lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Conv1d(4, 8, 3)), nn.ReLU(), nn.Conv1d(8, 4, 1)),
    normal(4, 17),
)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _symmetric() -> nn.Module:
    layer = nn.Linear(12, 12)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(12, 3))


plain("own_parametrization", _symmetric, normal(12))


@made("counts_calls", normal(12))
class Counting(nn.Module):
    """Writes to its buffers in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.head(x - self.mean)


@made(
    "many_inputs", normal(12), whole(5), lambda: torch.rand(2, 5) > 0.3, lambda: torch.rand(2, 1, dtype=torch.float64)
)
class Several(nn.Module):
    """Floats, numbers, a mask, a double."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, scale: Tensor) -> dict[str, Any]:
        pooled = (self.table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        logits = self.head(x + pooled) * scale.float()
        return {"logits": logits, "best": logits.argmax(-1), "kept": mask, "nested": {"pooled": pooled, "none": None}}


@made("pixels_as_bytes", lambda: torch.randint(0, 256, (2, 9, 9, 3), dtype=torch.uint8))
class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv((x.permute(0, 3, 1, 2).float() - 127.5) / 58).amax((2, 3))


@made("slice_assignment", normal(8, 9, 9))
class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[:, :4] = torch.relu(y[:, :4])
        y[..., 1:-1, 1:-1] *= 0.5
        y[y > 3] = 3.0
        return self.last(y)


class Grown(nn.Module):
    """A U-Net of a diffusion model: time, attention, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.into = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.attention = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(8, device=x.device) * -1.0)
        angles = t[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None]
        skip = functional.silu(self.into(x)) + time
        h = functional.silu(self.norm(self.down(skip)))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.out(torch.cat([self.up(tokens.transpose(1, 2).reshape(h.shape)), skip], 1))


plain("diffusion_unet", Grown, normal(3, 16, 16), lambda: torch.randint(0, 100, (2,)))
plain(
    "gan_generator",
    lambda: nn.Sequential(
        nn.Unflatten(1, (16, 1, 1)),
        nn.ConvTranspose2d(16, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, output_padding=1, groups=1),
        nn.Tanh(),
    ),
    normal(16),
)
plain("volume", lambda: nn.Sequential(nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
                                      nn.ConvTranspose3d(8, 4, 2, 2)), normal(1, 9, 9, 9))  # fmt: skip
plain("one_pixel", lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1)), normal(1, 1, 1))
plain("one_number", lambda: nn.Linear(1, 1), normal(1))
plain("prime_sizes", lambda: nn.Sequential(nn.Conv2d(7, 13, 3, 2), nn.ReLU(), nn.Conv2d(13, 11, (5, 1), groups=1),
                                           nn.AdaptiveAvgPool2d((3, 5))), normal(7, 31, 37))  # fmt: skip
plain("nothing_to_quantize", lambda: nn.Sequential(nn.LayerNorm(12), nn.Softmax(-1)), normal(12))
plain("no_parameters", lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), normal(3, 8, 8))
plain("identity", nn.Identity, normal(5))
plain("float64", lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).double(),
      lambda: torch.randn(2, 12, dtype=torch.float64))  # fmt: skip
plain("half", lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).half(),
      lambda: torch.randn(2, 12).half())  # fmt: skip
plain("bfloat16", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).bfloat16(),
      lambda: torch.randn(2, 3, 9, 9).bfloat16())  # fmt: skip
plain("channels_last", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6()).to(
      memory_format=torch.channels_last),
      lambda: torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last))  # fmt: skip
plain("transformer_layer", lambda: nn.TransformerEncoder(
      nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), normal(7, 16))  # fmt: skip
plain("transformer_whole", lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), normal(7, 16), normal(5, 16))


@made("embedding_bags", whole(6))
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


@made("metric", normal(3, 12))
class Metric(nn.Module):
    """Distances, normalised products, sorts: what heads of retrieval do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.centres = nn.Linear(12, 16), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = functional.normalize(self.embed(x), dim=-1)
        near = torch.cdist(h, self.centres.expand(x.shape[0], -1, -1))
        return near, functional.cosine_similarity(h[:, :, None], self.centres, -1), near.sort(-1).values


@made("unfolded", normal(4, 9, 9))
class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(36, 36)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 3, stride=3).transpose(1, 2)
        return functional.fold(self.work(patches).transpose(1, 2), (9, 9), 3, stride=3)


@made("three_of_a_kind", normal(12), normal(12), normal(12))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.body(each) for each in (anchor, near, far))
