"""What closed forms read of the data: means and second moments of a layer's rows in both streams. They add up.

    H = E[x~ x~'],  G = E[x x~'],  m = E[x],  m~ = E[x~]         x float, x~ quantized; H and G centred
    error of W on x against V + shift on x~  =  var(W x) - 2 <W G, V> + <V H, V> + (mean mismatch)^2

Products of a batch are made in float32 around the mean of the first batch, and added up in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of the rows of one layer; (groups, n) and (groups, n, n), of the outputs (groups, outputs)."""

    count: int
    mean: Tensor
    mean_noisy: Tensor
    noisy: Tensor  # H
    cross: Tensor  # G
    outputs: Tensor  # the variance of W x

    @property
    def size(self) -> int:
        """Unknowns of an output."""
        return int(self.noisy.shape[-1])

    def error(self, weight: Tensor, values: Tensor, mismatch: Tensor | None = None) -> Tensor:
        """The mean squared error of each output when `values` multiply the quantized stream; with a mismatch of the
        means where the bias does not take it up."""
        both = torch.einsum("gon,gnm,gom->go", weight, self.cross, values)
        own = torch.einsum("gon,gnm,gom->go", values, self.noisy, values)
        found = (self.outputs - 2 * both + own).clamp(min=0)
        return found if mismatch is None else found + mismatch.square()

    def mismatch(self, weight: Tensor, values: Tensor) -> Tensor:
        """What the mean of each output lacks: W m - V m~."""
        return torch.einsum("gon,gn->go", weight, self.mean) - torch.einsum("gon,gn->go", values, self.mean_noisy)


class Sums:
    """Moments while they are added up."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.to(torch.float32)
        self.count = 0
        self.around: tuple[Tensor, Tensor] | None = None

    def add(self, exact: Tensor, noisy: Tensor) -> None:
        """Rows (r, groups, n) of both streams."""
        if not exact.shape[0]:
            return
        if self.around is None:
            self.around = exact.mean(0), noisy.mean(0)
            groups, size = noisy.shape[1:]
            self.sums = [_zeros(groups, size) for _ in range(2)]
            self.products = [_zeros(groups, size, size) for _ in range(2)]
            self.energy = [_zeros(*self.weight.shape[:2]) for _ in range(2)]
        x, z = exact - self.around[0], noisy - self.around[1]
        y = torch.einsum("rgn,gon->rgo", x, self.weight)
        self.sums[0] += x.sum(0)
        self.sums[1] += z.sum(0)
        self.products[0] += torch.einsum("rgn,rgm->gnm", z, z)
        self.products[1] += torch.einsum("rgn,rgm->gnm", x, z)
        self.energy[0] += y.sum(0)
        self.energy[1] += y.square().sum(0)
        self.count += exact.shape[0]

    def moments(self) -> Moments | None:
        """None when nothing was seen."""
        if self.around is None:
            return None
        count, x, z = self.count, self.sums[0] / self.count, self.sums[1] / self.count
        y = self.energy[0] / count
        return Moments(
            count,
            x + self.around[0].to(torch.float64),
            z + self.around[1].to(torch.float64),
            self.products[0] / count - torch.einsum("gn,gm->gnm", z, z),
            self.products[1] / count - torch.einsum("gn,gm->gnm", x, z),
            (self.energy[1] / count - y.square()).clamp(min=0),
        )


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
