"""What closed forms read of the data: means and second moments of a layer's rows. They add up.

    y = W x + d      what the outputs should be: x the float stream, d what the other side of a residual add lacks
    H = cov(x~, x~),  P = cov(y, x~),  m~ = E[x~],  E[y],  var(y)                          x~ the quantized stream
    error of V x~ + shift against y  =  var(y) - 2 <P, V> + <V H, V> + (mean mismatch)^2

Products of some thousand rows are made in float32 around the mean of the first, and added up in float64. Rows may have
weights: then all of these are weighted means.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed

COLUMNS_PER_PRODUCT = 256  # columns of H that are made together
MIN_ROWS_PER_PRODUCT = 2048  # rows that a product is made of, at least


@dataclass(frozen=True)
class Moments:
    """Of the rows of one layer; (groups, n), (groups, n, n), of the outputs (groups, outputs) and (.., outputs, n)."""

    count: int  # of rows that are not zeros alone
    mean: Tensor  # of the quantized stream
    noisy: Tensor  # H
    cross: Tensor  # P
    mean_wanted: Tensor
    wanted: Tensor  # the variance of y
    made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # from H alone: layers share it

    @property
    def size(self) -> int:
        """Unknowns of an output."""
        return int(self.noisy.shape[-1])

    def error(self, values: Tensor, mismatch: Tensor | None = None) -> Tensor:
        """The mean squared error of each output when `values` multiply the quantized stream; with a mismatch of the
        means where the bias does not take it up."""
        own = ((values @ self.noisy.to(values.dtype)) * values).sum(-1)
        found = (self.wanted - 2 * (self.cross * values).sum(-1) + own).clamp(min=0)
        return found if mismatch is None else found + mismatch.square()

    def near(self, weight: Tensor) -> "ErrorAroundWeight":
        """Errors of values near a weight."""
        return ErrorAroundWeight(self, weight)

    def mismatch(self, values: Tensor) -> Tensor:
        """What the mean of each output lacks: E[y] - V m~."""
        return self.mean_wanted - torch.einsum("gon,gn->go", values, self.mean)

    def raw(self) -> "Moments":
        """Around zero instead of the means: where no bias takes up what the means lack, they are part of the error.
        H is in float32, as the steps read it."""
        if "raw" not in self.made:
            self.made["raw"] = _second_moment(self.noisy, self.mean), {}
        noisy, made = self.made["raw"]
        return Moments(
            self.count,
            torch.zeros_like(self.mean),
            noisy,
            self.cross + torch.einsum("go,gn->gon", self.mean_wanted, self.mean),
            torch.zeros_like(self.mean_wanted),
            self.wanted + self.mean_wanted.square(),
            made,
        )

    def settled(self) -> "Moments":
        """With H in float32 alone, which is what the steps read of it: of a wide layer it is most of the memory."""
        return replace(self, noisy=float32_covariance(self))

    def of(self, outputs: slice) -> "Moments":
        """Those of some of the outputs: layers that read one value share the rest."""
        return replace(
            self,
            cross=self.cross[:, outputs],
            mean_wanted=self.mean_wanted[:, outputs],
            wanted=self.wanted[:, outputs],
        )


class ErrorAroundWeight:
    """Errors of values near one weight W, in float32 without loss: what all of them share is taken out.

    E(V) = E(W) + 2 <W H - P, D> + <D H, D>,  D = V - W
    """

    def __init__(self, moments: Moments, weight: Tensor) -> None:
        hessian = float32_covariance(moments)
        if "above" not in moments.made:
            moments.made["above"] = above = hessian.triu().mul_(2)
            above.diagonal(dim1=-2, dim2=-1).div_(2)
        self.weight, self.above = weight, moments.made["above"]
        self.slope = weight.to(torch.float32) @ hessian - moments.cross.to(torch.float32)
        own = torch.empty_like(moments.wanted)
        for part in split_outputs(slice(None), weight.shape[1]):
            apart = self.slope[:, part].to(torch.float64).sub_(moments.cross[:, part])
            own[:, part] = apart.mul_(weight[:, part]).sum(-1)
        self.base = own.add_(moments.wanted).clamp_(min=0)

    def error(self, values: Tensor, outputs: slice = slice(None)) -> Tensor:
        """The mean squared error of each output, or of some, a bias taking up the means."""
        off = (values - self.weight[:, outputs]).to(torch.float32)
        more = (off * 2 * self.slope[:, outputs]).sum(-1, dtype=torch.float64)
        for start in range(0, off.shape[-1], COLUMNS_PER_PRODUCT):  # D H D' from the diagonal of H and what is above it
            part = slice(start, start + COLUMNS_PER_PRODUCT)
            more += (off[..., part] * (off[..., : part.stop] @ self.above[:, : part.stop, part])).sum(-1)
        return (self.base[:, outputs] + more).clamp(min=0)


def split_outputs(outputs: slice, count: int) -> Iterator[slice]:
    """Some of so many outputs, a few at a time: in float64 all of a wide layer would be much memory."""
    start, stop, step = outputs.indices(count)
    for first in range(start, stop, step * COLUMNS_PER_PRODUCT):
        yield slice(first, min(first + step * COLUMNS_PER_PRODUCT, stop), step)


def float32_covariance(moments: Moments) -> Tensor:
    """H in float32, made once."""
    if "single" not in moments.made:
        moments.made["single"] = moments.noisy.to(torch.float32)
    found: Tensor = moments.made["single"]
    return found


class MomentSums:
    """Moments while they are added up.

    Where there are more outputs than inputs, and y is W x alone, the inputs are added up instead of the outputs:
    P = W cov(x, x~),  var(y) = diag(W cov(x, x) W').
    """

    def __init__(self, through: Tensor | None = None) -> None:
        self.through = through  # W; None: the outputs are given
        self.count, self.total = 0, 0.0
        self.around: tuple[Tensor, Tensor] | None = None
        self.waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(self, noisy: Tensor, wanted: Tensor, weight: Tensor | None = None) -> None:
        """Rows (r, groups, n) of the quantized stream, and what the outputs should be, (r, groups, outputs): or the
        rows of the float stream that they are made of. Small batches wait until a product is worth its while."""
        self.waiting.append((noisy, wanted, weight))
        if sum(each.shape[0] for each, *_ in self.waiting) >= MIN_ROWS_PER_PRODUCT:
            self.flush()

    def flush(self) -> None:
        """Add what waits."""
        waiting, self.waiting = self.waiting, []
        if not any(noisy.shape[0] for noisy, *_ in waiting):
            return
        noisy, wanted = torch.cat([each for each, _, _ in waiting]), torch.cat([each for _, each, _ in waiting])
        weight = None
        if any(each is not None for *_, each in waiting):
            weight = torch.cat(
                [torch.ones(len(rows), dtype=torch.float32) if each is None else each for rows, _, each in waiting]
            )
        if self.around is None:
            self._begin(noisy.mean(0), wanted.mean(0))
        assert self.around is not None  # noqa: S101  # just made
        self.count += noisy.shape[0] - int(noisy[noisy[:, 0, 0] == 0].flatten(1).eq(0).all(1).sum())
        z, y = noisy.sub_(self.around[0]), wanted.sub_(self.around[1])  # theirs alone: just put together
        weighted = z if weight is None else z * weight[:, None, None]
        self.sums[0].add_(weighted.sum(0))
        wanted = y if weight is None else y * weight[:, None, None]
        self.sums[1].add_(wanted.sum(0))
        by_group = weighted.transpose(0, 1)
        _add_upper_product_(self.products[0], z.transpose(0, 1), by_group)
        self.products[1].add_(y.transpose(0, 1).mT @ by_group)
        if self.through is None:
            self.energy.add_((y * wanted).sum(0))
        else:
            _add_upper_product_(self.energy, y.transpose(0, 1), wanted.transpose(0, 1))
        self.total += noisy.shape[0] if weight is None else float(weight.sum(dtype=torch.float64))

    def _begin(self, noisy: Tensor, wanted: Tensor) -> None:
        self.around = noisy, wanted
        (groups, size), outputs = noisy.shape, wanted.shape[-1]
        self.sums = _zeros(groups, size), _zeros(groups, outputs)
        self.products = _zeros(groups, size, size), _zeros(groups, outputs, size)
        self.energy = _zeros(groups, outputs) if self.through is None else _zeros(groups, size, size)

    def merged(self) -> "MomentSums":
        """Those of all ranks: around one point, then added up."""
        self.flush()
        if distributed.world_size() == 1:
            return self
        own = {} if self.around is None else {"noisy": self.around[0], "wanted": self.around[1]}
        points = [part for part in distributed.gather_tensors(own, "moments") if part]
        if not points:
            return self
        found = self._moved(points[0]["noisy"], points[0]["wanted"])
        counts = torch.tensor([self.count, self.total], dtype=torch.float64)
        distributed.all_reduce_sum([counts, *found.sums, *found.products, found.energy], "moments")
        found.count, found.total = int(counts[0]), float(counts[1])
        return found

    def _moved(self, noisy: Tensor, wanted: Tensor) -> "MomentSums":
        """The same rows around another point, d apart: sum (z + d)(z + d)' = sum zz' + d s' + s d' + n dd'."""
        found = MomentSums(self.through)
        found._begin(noisy, wanted)
        if self.around is None:
            return found
        d, e = (self.around[0].double() - noisy.double()), (self.around[1].double() - wanted.double())
        (z, y), n = self.sums, self.total
        found.sums = z + n * d, y + n * e
        found.products = (
            self.products[0] + _shifted_product(d, z, d, z, n),
            self.products[1] + _shifted_product(e, y, d, z, n),
        )
        found.energy = self.energy + (
            2 * e * y + n * e.square() if self.through is None else _shifted_product(e, y, e, y, n)
        )
        return found

    def moments(self, *, is_done: bool = False) -> Moments | None:
        """None when nothing was seen, or only zeros. Sums that are done with become the moments, without a copy."""
        self.flush()
        if self.around is None or not self.count:
            return None
        z, y = self.sums[0] / self.total, self.sums[1] / self.total
        mean, mean_wanted = z + self.around[0].to(torch.float64), y + self.around[1].to(torch.float64)
        noisy = _mirror_upper_(self.products[0] if is_done else self.products[0].clone())
        noisy.div_(self.total).baddbmm_(z[:, :, None], z[:, None], alpha=-1)
        cross = self.products[1] / self.total - torch.einsum("go,gn->gon", y, z)
        if self.through is None:
            energy = self.energy / self.total - y.square()
        else:
            exact = _mirror_upper_(self.energy.clone()).div_(self.total).baddbmm_(y[:, :, None], y[:, None], alpha=-1)
            made = self.through @ torch.cat([cross, exact], -1).to(torch.float32)
            cross = made[..., : cross.shape[-1]].to(torch.float64)
            energy = (made[..., cross.shape[-1] :] * self.through).sum(-1, dtype=torch.float64)
            mean_wanted = torch.einsum("gon,gn->go", self.through.to(torch.float64), mean_wanted)
        return Moments(self.count, mean, noisy, cross, mean_wanted, energy.clamp(min=0))


def _shifted_product(e: Tensor, y: Tensor, d: Tensor, z: Tensor, n: float) -> Tensor:
    """What sum (y + e)(z + d)' has more than sum yz', with the sums of y and z: e z' + y d' + n e d'."""
    return e[:, :, None] * (z + n * d)[:, None] + y[:, :, None] * d[:, None]


def _second_moment(noisy: Tensor, mean: Tensor) -> Tensor:
    """H + m m' in float32, some rows at a time."""
    found = torch.empty_like(noisy, dtype=torch.float32)
    for start in range(0, noisy.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        found[:, rows] = torch.baddbmm(noisy[:, rows], mean[:, rows, None], mean[:, None])
    return found


def _mirror_upper_(upper: Tensor) -> Tensor:
    """A symmetric matrix whose left is filled, in place, from what is right of its diagonal."""
    for start in range(0, upper.shape[-1], COLUMNS_PER_PRODUCT):
        rows, rest = slice(start, start + COLUMNS_PER_PRODUCT), slice(start + COLUMNS_PER_PRODUCT, None)
        own = upper[:, rows, rows]
        own.copy_(own.triu().add_(own.triu(1).mT))
        upper[:, rest, rows] = upper[:, rows, rest].mT
    return upper


def _add_upper_product_(into: Tensor, one: Tensor, other: Tensor) -> None:
    """One' times other, which is symmetric, from its diagonal to the right."""
    for start in range(0, into.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        into[:, rows, start:].add_(one[..., rows].mT @ other[..., start:])


class ResidualSums:
    """What a bias alone can take up: the mean of y - V x~ at the codes as they are, and its energy. No products."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, found: Tensor, wanted: Tensor, weight: Tensor | None = None) -> None:
        """Outputs (r, groups, outputs) as they are, and as they should be."""
        if not found.shape[0]:
            return
        apart, counted = wanted - found, 1.0 if weight is None else weight[:, None, None]
        parts = tuple((each * counted).sum(0) for each in (apart, apart.square(), wanted, wanted.square()))
        if self.sums is None:
            self.sums = tuple(torch.zeros_like(each, dtype=torch.float64) for each in parts)  # type: ignore[assignment]
        assert self.sums is not None  # noqa: S101  # just made
        for total, part in zip(self.sums, parts, strict=True):
            total.add_(part)
        self.count += found.shape[0]
        self.total += found.shape[0] if weight is None else float(weight.sum(dtype=torch.float64))

    def merged(self) -> "ResidualSums":
        """Those of all ranks, added up in their order."""
        if distributed.world_size() == 1:
            return self
        own = {} if self.sums is None else {str(index): each for index, each in enumerate(self.sums)}
        counts = torch.tensor([self.count, self.total], dtype=torch.float64)
        parts = [part for part in distributed.gather_tensors(own | {"counts": counts}, "residuals") if len(part) > 1]
        found = ResidualSums()
        if parts:
            found.count, found.total = (float(sum(part["counts"][at] for part in parts)) for at in (0, 1))  # type: ignore[assignment]
            found.count = int(found.count)
            totals = [torch.stack([part[str(index)] for part in parts]).sum(0) for index in range(4)]
            found.sums = tuple(totals)  # type: ignore[assignment]  # four of them
        return found

    @property
    def mean(self) -> Tensor:
        assert self.sums is not None  # noqa: S101  # asked only where rows were seen
        return self.sums[0] / self.total

    def error(self, shift: Tensor | None = None) -> float:
        """The squared error of the outputs over their energy, after a shift of the bias."""
        assert self.sums is not None  # noqa: S101  # as above
        apart, square, wanted, energy = (each / self.total for each in self.sums)
        whole = float((energy - wanted.square()).clamp(min=0).sum())
        left = square if shift is None else square - 2 * shift * apart + shift.square()
        return float(left.clamp(min=0).sum()) / whole if whole > 0 else 0.0


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
