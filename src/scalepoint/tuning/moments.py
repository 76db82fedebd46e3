"""What closed forms read of the data: means and second moments of a layer's rows. They add up.

    y = W x + d      what the outputs should be: x the float stream, d what the other side of a residual add lacks
    H = cov(x~, x~),  P = cov(y, x~),  m~ = E[x~],  E[y],  var(y)                          x~ the quantized stream
    error of V x~ + shift against y  =  var(y) - 2 <P, V> + <V H, V> + (mean mismatch)^2

Products of a batch are made in float32 around the mean of the first batch, and added up in float64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of the rows of one layer; (groups, n), (groups, n, n), of the outputs (groups, outputs) and (.., outputs, n)."""

    count: int
    mean: Tensor  # of the quantized stream
    noisy: Tensor  # H
    cross: Tensor  # P
    mean_wanted: Tensor
    wanted: Tensor  # the variance of y

    @property
    def size(self) -> int:
        """Unknowns of an output."""
        return int(self.noisy.shape[-1])

    def error(self, values: Tensor, mismatch: Tensor | None = None) -> Tensor:
        """The mean squared error of each output when `values` multiply the quantized stream; with a mismatch of the
        means where the bias does not take it up."""
        own = ((values @ self.noisy) * values).sum(-1)
        found = (self.wanted - 2 * (self.cross * values).sum(-1) + own).clamp(min=0)
        return found if mismatch is None else found + mismatch.square()

    def mismatch(self, values: Tensor) -> Tensor:
        """What the mean of each output lacks: E[y] - V m~."""
        return self.mean_wanted - torch.einsum("gon,gn->go", values, self.mean)

    def of(self, outputs: slice) -> "Moments":
        """Those of some of the outputs: layers that read one value share the rest."""
        return replace(
            self,
            cross=self.cross[:, outputs],
            mean_wanted=self.mean_wanted[:, outputs],
            wanted=self.wanted[:, outputs],
        )


class Sums:
    """Moments while they are added up."""

    def __init__(self) -> None:
        self.count = 0
        self.around: tuple[Tensor, Tensor] | None = None

    def add(self, noisy: Tensor, wanted: Tensor) -> None:
        """Rows (r, groups, n) of the quantized stream, and what the outputs should be, (r, groups, outputs)."""
        if not noisy.shape[0]:
            return
        if self.around is None:
            self.around = noisy.mean(0), wanted.mean(0)
            (groups, size), outputs = noisy.shape[1:], wanted.shape[-1]
            self.sums = _zeros(groups, size), _zeros(groups, outputs)
            self.products = _zeros(groups, size, size), _zeros(groups, outputs, size)
            self.energy = _zeros(groups, outputs)
        z, y = noisy - self.around[0], wanted - self.around[1]
        self.sums[0].add_(z.sum(0))
        self.sums[1].add_(y.sum(0))
        by_group = z.transpose(0, 1)
        self.products[0].add_(by_group.mT @ by_group)
        self.products[1].add_(y.transpose(0, 1).mT @ by_group)
        self.energy.add_(y.square().sum(0))
        self.count += noisy.shape[0]

    def moments(self) -> Moments | None:
        """None when nothing was seen."""
        if self.around is None:
            return None
        z, y = self.sums[0] / self.count, self.sums[1] / self.count
        return Moments(
            self.count,
            z + self.around[0].to(torch.float64),
            self.products[0] / self.count - torch.einsum("gn,gm->gnm", z, z),
            self.products[1] / self.count - torch.einsum("go,gn->gon", y, z),
            y + self.around[1].to(torch.float64),
            (self.energy / self.count - y.square()).clamp(min=0),
        )


class Residuals:
    """What a bias alone can take up: the mean of y - V x~ at the codes as they are, and its energy. No products."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Outputs (r, groups, outputs) as they are, and as they should be."""
        if not found.shape[0]:
            return
        apart = wanted - found
        parts = apart.sum(0), apart.square().sum(0), wanted.sum(0), wanted.square().sum(0)
        if self.sums is None:
            self.sums = tuple(torch.zeros_like(each, dtype=torch.float64) for each in parts)  # type: ignore[assignment]
        assert self.sums is not None  # noqa: S101  # just made
        for total, part in zip(self.sums, parts, strict=True):
            total.add_(part)
        self.count += found.shape[0]

    @property
    def mean(self) -> Tensor:
        assert self.sums is not None  # noqa: S101  # asked only where rows were seen
        return self.sums[0] / self.count

    def error(self, shift: Tensor | None = None) -> float:
        """The squared error of the outputs over their energy, after a shift of the bias."""
        assert self.sums is not None  # noqa: S101  # as above
        apart, square, wanted, energy = (each / self.count for each in self.sums)
        whole = float((energy - wanted.square()).clamp(min=0).sum())
        left = square if shift is None else square - 2 * shift * apart + shift.square()
        return float(left.clamp(min=0).sum()) / whole if whole > 0 else 0.0


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
