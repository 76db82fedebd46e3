"""Models as people write them by hand: graphs, scans, experts, spectra, branches, tied and computed weights, odd sizes.

Tiny, at random weights; each takes one thing that files, runtimes or captures are known to trip over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Inputs = tuple[Any, ...] | dict[str, Any]
MADE: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}


def made(name: str, *inputs: Any, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put a class on the list, with functions that give its inputs."""

    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        MADE[name] = lambda: (kind(**options), tuple(each() for each in inputs))
        return kind

    return keep


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, *shape)


def whole(*shape: int, high: int = 20) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, (2, *shape))


def plain(name: str, model: Callable[[], nn.Module], *inputs: Callable[[], Any]) -> None:
    MADE[name] = lambda: (model(), tuple(each() for each in inputs))


# sequences -------------------------------------------------------------------------------------------------------


@made("lstm_both_ways", normal(11, 12), kind=nn.LSTM, num_layers=2, bidirectional=True)
@made("lstm_projected", normal(11, 12), kind=nn.LSTM, proj_size=8)
@made("lstm_one_step", normal(1, 12), kind=nn.LSTM)
@made("gru_both_ways", normal(11, 12), kind=nn.GRU, num_layers=2, bidirectional=True)
@made("gru_without_bias", normal(7, 12), kind=nn.GRU, bias=False)
@made("rnn_relu", normal(7, 12), kind=nn.RNN, nonlinearity="relu", num_layers=2)
class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(12, 16, batch_first=True, **options)
        last = self.rnn.proj_size or 16
        self.head = nn.Linear(last * (2 if self.rnn.bidirectional else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@made("lstm_states_in_and_out", normal(7, 12), lambda: torch.randn(2, 16), lambda: torch.randn(2, 16))
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        y, (hidden, cell) = self.rnn(x, (hidden[None], cell[None]))
        return {"y": y, "hidden": hidden[0], "cell": cell[0]}


@made("lstm_packed", normal(7, 12), lambda: torch.tensor([7, 4]))
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


@made("lstm_cells", normal(5, 12), kind=nn.LSTMCell)
@made("gru_cells", normal(5, 12), kind=nn.GRUCell)
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


@made("selective_scan", normal(6, 16))
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
        state, found = u.new_zeros(u.shape[0], 32, 4), []
        for t in range(x.shape[1]):
            kept = torch.exp(-step[:, t, :, None] * self.decay)
            state = kept * state + step[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            found.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(found, 1) * functional.silu(gate))


@made("parallel_scan", normal(9, 16))
class CumulativeScan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        key = torch.exp(self.key(x))
        return self.out(torch.cumsum(key * self.value(x), 1) / torch.cumsum(key, 1))


@made("tcn", normal(12, 33))
class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(parametrizations.weight_norm(nn.Conv1d(12, 12, 3, dilation=2**i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + functional.elu(conv(functional.pad(x, (2 * conv.dilation[0], 0))))
        return x


# spectra ---------------------------------------------------------------------------------------------------------


@made("stft_front_end", normal(640))
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


@made("fourier_mixer", normal(16, 32))
class FourierMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.filter = nn.Parameter(torch.randn(9, 32, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        return self.second(functional.gelu(self.first(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))))


# graphs and gathers ----------------------------------------------------------------------------------------------


@made("graph_by_edges", normal(7, 16), whole(2, 12, high=7))
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


@made("graph_attention", normal(7, 16), lambda: torch.rand(2, 7, 7) > 0.5)
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, nodes: Tensor, linked: Tensor) -> Tensor:
        h = self.project(nodes)
        scores = functional.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        linked = linked | torch.eye(7, dtype=torch.bool, device=nodes.device)
        return torch.softmax(scores.masked_fill(~linked, float("-inf")), -1) @ h


@made("deformable", normal(8, 9, 9))
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


@made("top_tokens", normal(12, 16))
class TopTokens(nn.Module):
    """Keeps the best tokens and puts them back: topk, gather, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.work = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        best = self.score(x)[..., 0].topk(4, 1).indices[..., None].expand(-1, -1, 16)
        return x.scatter(1, best, self.work(x.gather(1, best)))


@made("mixture_dense", normal(6, 16))
class DenseMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        return torch.stack([share[..., i, None] * each(x) for i, each in enumerate(self.experts)]).sum(0)


@made("mixture_sparse", normal(16))
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


@made("mixture_by_einsum", normal(6, 16))
class EinsumMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) * 0.2), nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(torch.einsum("btd,edf->betf", x, self.up))
        return torch.einsum("betf,efd,bte->btd", h, self.down, torch.softmax(self.gate(x), -1))


# arithmetic ------------------------------------------------------------------------------------------------------


@made("kan", normal(7), sizes=(7, 13, 3))
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
            found = ((x[..., None] >= self.knots[:-1]) & (x[..., None] < self.knots[1:])).to(x.dtype)
            for k in (1, 2, 3):
                left = (x[..., None] - self.knots[: -k - 1]) / (self.knots[k:-1] - self.knots[: -k - 1])
                right = (self.knots[k + 1 :] - x[..., None]) / (self.knots[k + 1 :] - self.knots[1:-k])
                found = left * found[..., :-1] + right * found[..., 1:]
            x = base(functional.silu(x)) + functional.linear(found.flatten(1), spline.flatten(1))
        return x


@made("einsum_attention", normal(9, 4, 8))
class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(4, 8, 4, 8) * 0.2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("blhd,hdge->blge", x, each) for each in (self.q, self.k, self.v))
        scores = torch.softmax(torch.einsum("blhd,bmhd->bhlm", q, k) / 8**0.5, -1)
        return torch.einsum("bhlm,bmhd->blhd", scores, v)


@made("bilinear", normal(12), normal(10))
class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Bilinear(12, 10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x, y)))


@made("hypernetwork", normal(16), normal(8))
class Hyper(nn.Module):
    """Weights that another network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(8, 16 * 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return self.head(torch.relu(torch.bmm(self.maker(task).view(-1, 16, 16), x[..., None])[..., 0]))


@made("rrelu", normal(3, 9, 9), kind=nn.RReLU)
@made("glu", normal(3, 9, 9), kind=partial(nn.GLU, dim=1))
@made("softshrink", normal(3, 9, 9), kind=nn.Softshrink)
@made("hardshrink", normal(3, 9, 9), kind=nn.Hardshrink)
@made("tanhshrink", normal(3, 9, 9), kind=nn.Tanhshrink)
@made("logsigmoid", normal(3, 9, 9), kind=nn.LogSigmoid)
@made("threshold", normal(3, 9, 9), kind=partial(nn.Threshold, 0.1, -0.2))
@made("softmin", normal(3, 9, 9), kind=partial(nn.Softmin, dim=1))
@made("softsign", normal(3, 9, 9), kind=nn.Softsign)
@made("local_response", normal(3, 9, 9), kind=partial(nn.LocalResponseNorm, 3))
@made("lp_pool", normal(3, 9, 9), kind=partial(nn.LPPool2d, 2, 3))
@made("fractional_pool", normal(3, 9, 9), kind=partial(nn.FractionalMaxPool2d, 2, output_size=4))
@made("replication_pad", normal(3, 9, 9), kind=partial(nn.ReplicationPad2d, (1, 2, 0, 3)))
@made("circular_pad", normal(3, 9, 9), kind=partial(nn.CircularPad2d, 2))
@made("pixel_unshuffle", normal(3, 9, 9), kind=partial(nn.PixelUnshuffle, 1))
@made("channel_shuffle", normal(3, 9, 9), kind=partial(nn.ChannelShuffle, 4))
@made("upsample_bicubic", normal(3, 9, 9), kind=partial(nn.Upsample, scale_factor=1.5, mode="bicubic"))
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


@made("dataclass_and_none", normal(3, 17, 17))
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.head(torch.relu(self.conv(x)).mean((2, 3))), None)


@made("vae", normal(1, 28, 28), lambda: torch.randn(2, 4))
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
