"""Models written by hand: recurrent layers, graphs, scans, experts, spectra, branches, tied weights, wrappers.

Tiny, with random weights. Each uses one construct that captures, file formats or runtimes are known to fail on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Inputs = tuple[Any, ...] | dict[str, Any]
MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}


def register(name: str, *inputs: Any, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put a class on the list, with functions that give its inputs."""

    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        MODELS[name] = lambda: (kind(**options), tuple(make_input() for make_input in inputs))
        return kind

    return keep


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, *shape)


def token_ids(*shape: int, high: int = 20) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, (2, *shape))


def plain(name: str, model: Callable[[], nn.Module], *inputs: Callable[[], Any]) -> None:
    MODELS[name] = lambda: (model(), tuple(make_input() for make_input in inputs))


# sequences -------------------------------------------------------------------------------------------------------


@register("lstm_both_ways", normal(11, 12), kind=nn.LSTM, num_layers=2, bidirectional=True)
@register("lstm_projected", normal(11, 12), kind=nn.LSTM, proj_size=8)
@register("lstm_one_step", normal(1, 12), kind=nn.LSTM)
@register("gru_both_ways", normal(11, 12), kind=nn.GRU, num_layers=2, bidirectional=True)
@register("gru_without_bias", normal(7, 12), kind=nn.GRU, bias=False)
@register("rnn_relu", normal(7, 12), kind=nn.RNN, nonlinearity="relu", num_layers=2)
class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(12, 16, batch_first=True, **options)
        last = self.rnn.proj_size or 16
        self.head = nn.Linear(last * (2 if self.rnn.bidirectional else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@register("lstm_states_in_and_out", normal(7, 12), lambda: torch.randn(2, 16), lambda: torch.randn(2, 16))
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        y, (hidden, cell) = self.rnn(x, (hidden[None], cell[None]))
        return {"y": y, "hidden": hidden[0], "cell": cell[0]}


@register("lstm_packed", normal(7, 12), lambda: torch.tensor([7, 4]))
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


@register("lstm_cells", normal(5, 12), kind=nn.LSTMCell)
@register("gru_cells", normal(5, 12), kind=nn.GRUCell)
class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(12, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs, 1))


@register("selective_scan", normal(6, 16))
class Scan(nn.Module):
    """A state-space model: h = exp(-d a) h + d B x, y = C h."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 64), nn.Linear(32, 16)
        self.conv = nn.Conv1d(32, 32, 4, groups=32, padding=3)
        self.select, self.decay = nn.Linear(32, 32 + 8), nn.Parameter(torch.rand(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(x).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(u).split([32, 4, 4], -1)
        step = functional.softplus(step)
        state, outputs = u.new_zeros(u.shape[0], 32, 4), []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.decay)
            state = decay * state + step[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            outputs.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(outputs, 1) * functional.silu(gate))


@register("parallel_scan", normal(9, 16))
class CumulativeScan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        key = torch.exp(self.key(x))
        return self.out(torch.cumsum(key * self.value(x), 1) / torch.cumsum(key, 1))


@register("tcn", normal(12, 33))
class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(parametrizations.weight_norm(nn.Conv1d(12, 12, 3, dilation=2**i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + functional.elu(conv(functional.pad(x, (2 * conv.dilation[0], 0))))
        return x


# spectra ---------------------------------------------------------------------------------------------------------


@register("stft_front_end", normal(640))
class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("mel", torch.rand(33, 16))
        self.conv, self.head = nn.Conv1d(16, 16, 3), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        bins = torch.stft(x, 64, 32, window=self.window, return_complex=True).abs() ** 2
        mel = torch.log(bins.transpose(1, 2) @ self.mel + 1e-3)
        return self.head(self.conv(mel.transpose(1, 2)).mean(-1))


@register("fourier_mixer", normal(16, 32))
class FourierMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.filter = nn.Parameter(torch.randn(9, 32, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        return self.second(functional.gelu(self.first(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))))


# graphs and gathers ----------------------------------------------------------------------------------------------


@register("graph_by_edges", normal(7, 16), token_ids(2, 12, high=7))
class GraphNet(nn.Module):
    """Messages along edges, added up by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges[:, 0, :, None].expand(-1, -1, 16), edges[:, 1, :, None].expand(-1, -1, 16)
        pairs = torch.cat([nodes.gather(1, sender), nodes.gather(1, receiver)], -1)
        total = torch.zeros_like(nodes).scatter_add(1, receiver, functional.relu(self.message(pairs)))
        return self.update(torch.cat([nodes, total], -1))


@register("graph_attention", normal(7, 16), lambda: torch.rand(2, 7, 7) > 0.5)
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, nodes: Tensor, linked: Tensor) -> Tensor:
        h = self.project(nodes)
        scores = functional.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        linked = linked | torch.eye(7, dtype=torch.bool, device=nodes.device)
        return torch.softmax(scores.masked_fill(~linked, float("-inf")), -1) @ h


@register("deformable", normal(8, 9, 9))
class Deformable(nn.Module):
    """Samples where a convolution says, as deformable convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.conv = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        line = torch.linspace(-1, 1, 9, device=x.device)
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
        where = grid + torch.tanh(self.offset(x)).permute(0, 2, 3, 1)
        return self.conv(functional.grid_sample(x, where, align_corners=True))


@register("top_tokens", normal(12, 16))
class TopTokens(nn.Module):
    """Keeps the best tokens and puts them back: topk, gather, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.work = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        best = self.score(x)[..., 0].topk(4, 1).indices[..., None].expand(-1, -1, 16)
        return x.scatter(1, best, self.work(x.gather(1, best)))


@register("mixture_dense", normal(6, 16))
class DenseMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        return torch.stack([share[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]).sum(0)


@register("mixture_sparse", normal(16))
class SparseMixture(nn.Module):
    """Runs an expert over the rows that chose it alone: their number depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_copy(0, rows, expert(x[rows]))
        return out


@register("mixture_by_einsum", normal(6, 16))
class EinsumMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) * 0.2), nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(torch.einsum("btd,edf->betf", x, self.up))
        return torch.einsum("betf,efd,bte->btd", h, self.down, torch.softmax(self.gate(x), -1))


# arithmetic ------------------------------------------------------------------------------------------------------


@register("kan", normal(7), sizes=(7, 13, 3))
class Splines(nn.Module):
    """A Kolmogorov-Arnold network: a spline on every edge."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2.5, 2.5, 11))
        pairs = list(pairwise(sizes))
        self.base = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.spline = nn.ParameterList(nn.Parameter(torch.randn(out, into, 7) * 0.3) for into, out in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for base, spline in zip(self.base, self.spline, strict=True):
            basis = ((x[..., None] >= self.knots[:-1]) & (x[..., None] < self.knots[1:])).to(x.dtype)
            for k in (1, 2, 3):
                left = (x[..., None] - self.knots[: -k - 1]) / (self.knots[k:-1] - self.knots[: -k - 1])
                right = (self.knots[k + 1 :] - x[..., None]) / (self.knots[k + 1 :] - self.knots[1:-k])
                basis = left * basis[..., :-1] + right * basis[..., 1:]
            x = base(functional.silu(x)) + functional.linear(basis.flatten(1), spline.flatten(1))
        return x


@register("einsum_attention", normal(9, 4, 8))
class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(4, 8, 4, 8) * 0.2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("blhd,hdge->blge", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.softmax(torch.einsum("blhd,bmhd->bhlm", q, k) / 8**0.5, -1)
        return torch.einsum("bhlm,bmhd->blhd", scores, v)


@register("bilinear", normal(12), normal(10))
class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Bilinear(12, 10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x, y)))


@register("hypernetwork", normal(16), normal(8))
class Hyper(nn.Module):
    """Weights that another network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(8, 16 * 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return self.head(torch.relu(torch.bmm(self.maker(task).view(-1, 16, 16), x[..., None])[..., 0]))


@register("rrelu", normal(3, 9, 9), kind=nn.RReLU)
@register("glu", normal(3, 9, 9), kind=partial(nn.GLU, dim=1))
@register("softshrink", normal(3, 9, 9), kind=nn.Softshrink)
@register("hardshrink", normal(3, 9, 9), kind=nn.Hardshrink)
@register("tanhshrink", normal(3, 9, 9), kind=nn.Tanhshrink)
@register("logsigmoid", normal(3, 9, 9), kind=nn.LogSigmoid)
@register("threshold", normal(3, 9, 9), kind=partial(nn.Threshold, 0.1, -0.2))
@register("softmin", normal(3, 9, 9), kind=partial(nn.Softmin, dim=1))
@register("softsign", normal(3, 9, 9), kind=nn.Softsign)
@register("local_response", normal(3, 9, 9), kind=partial(nn.LocalResponseNorm, 3))
@register("lp_pool", normal(3, 9, 9), kind=partial(nn.LPPool2d, 2, 3))
@register("fractional_pool", normal(3, 9, 9), kind=partial(nn.FractionalMaxPool2d, 2, output_size=4))
@register("replication_pad", normal(3, 9, 9), kind=partial(nn.ReplicationPad2d, (1, 2, 0, 3)))
@register("circular_pad", normal(3, 9, 9), kind=partial(nn.CircularPad2d, 2))
@register("pixel_unshuffle", normal(3, 9, 9), kind=partial(nn.PixelUnshuffle, 1))
@register("channel_shuffle", normal(3, 9, 9), kind=partial(nn.ChannelShuffle, 4))
@register("upsample_bicubic", normal(3, 9, 9), kind=partial(nn.Upsample, scale_factor=1.5, mode="bicubic"))
class Between(nn.Module):
    """A rare layer between two convolutions."""

    def __init__(self, kind: Callable[[], nn.Module], into: int = 8) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, into, 3, padding=1), kind().eval()
        self.last = nn.Conv2d(self.between(torch.zeros(2, into, 9, 9)).shape[1], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@dataclass
class Parts:
    mean: Tensor
    spread: Tensor | None
    note: str = "a vae"


@register("dataclass_and_none", normal(3, 17, 17))
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.head(torch.relu(self.conv(x)).mean((2, 3))), None)


@register("vae", normal(1, 28, 28), lambda: torch.randn(2, 4))
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU())
        self.to_mean, self.to_spread, self.grow = nn.Linear(784, 4), nn.Linear(784, 4), nn.Linear(4, 784)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(x).flatten(1)
        mean, spread = self.to_mean(h), self.to_spread(h)
        z = mean + torch.exp(spread / 2) * noise
        return self.decode(self.grow(z).view(-1, 16, 7, 7)), mean, spread


class Rounded(torch.autograd.Function):
    """A straight-through step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@register("custom_autograd", normal(12))
class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Rounded.apply(torch.tanh(self.first(x))))


@register("cond", normal(12), lambda: torch.tensor(True))
class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor, is_yes: Tensor) -> Tensor:
        return torch.cond(is_yes, lambda x: self.yes(x) + 0, lambda x: self.no(x) * 2, (torch.relu(self.first(x)),))


@register("autocast", normal(3, 9, 9))
class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.relu(self.conv(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float().mean((2, 3)))


@register("no_grad_inside", normal(12))
class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 16).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.relu(self.body(x))
        return self.head(x.detach())


@register("inference_mode_inside", normal(12))
class Inferred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.head(torch.relu(self.body(x)))


@register("tied_transposed", token_ids(9))
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


@register("shared_module", normal(8, 9, 9))
class Repeated(nn.Module):
    """One convolution at four depths and two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(self.conv(x)))) + x
            outputs.append(x)
            x = functional.avg_pool2d(x, 2)
        return outputs


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


@register("counts_calls", normal(12))
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


@register(
    "many_inputs",
    normal(12),
    token_ids(5),
    lambda: torch.rand(2, 5) > 0.3,
    lambda: torch.rand(2, 1, dtype=torch.float64),
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


@register("pixels_as_bytes", lambda: torch.randint(0, 256, (2, 9, 9, 3), dtype=torch.uint8))
class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv((x.permute(0, 3, 1, 2).float() - 127.5) / 58).amax((2, 3))


@register("slice_assignment", normal(8, 9, 9))
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


@register("embedding_bags", token_ids(6))
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


@register("metric", normal(3, 12))
class Metric(nn.Module):
    """Distances, normalised products, sorts: what heads of retrieval do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.centres = nn.Linear(12, 16), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = functional.normalize(self.embed(x), dim=-1)
        near = torch.cdist(h, self.centres.expand(x.shape[0], -1, -1))
        return near, functional.cosine_similarity(h[:, :, None], self.centres, -1), near.sort(-1).values


@register("unfolded", normal(4, 9, 9))
class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(36, 36)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 3, stride=3).transpose(1, 2)
        return functional.fold(self.work(patches).transpose(1, 2), (9, 9), 3, stride=3)


@register("three_of_a_kind", normal(12), normal(12), normal(12))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.body(picture) for picture in (anchor, near, far))
