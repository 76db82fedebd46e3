"""Means and second moments of a layer's rows: all that the closed-form steps read of the data.

    y = W x + d      the target outputs: x the float stream, d what the other operand of a residual add lacks
    H = cov(x~, x~),  P = cov(y, x~),  m~ = E[x~],  E[y],  var(y)                     x~ the quantized stream
    error of V x~ + shift against y  =  var(y) - 2 <P, V> + <V H, V> + (mean mismatch)^2

Products of some thousand rows are computed in float32 around the mean of the first rows, and added up in float64. Rows
may have weights: all of these are weighted means then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed

COLUMNS_PER_PRODUCT = 256  # columns of H per matrix product
MIN_ROWS_PER_PRODUCT = 2048  # smaller batches are collected until there are this many


@dataclass(frozen=True)
class Moments:
    """Moments of the rows of one layer. Shapes: n inputs of an output, o outputs per group, g groups."""

    count: int  # rows that are not all zero
    mean: Tensor  # (g, n), of the quantized stream
    hessian: Tensor  # H, (g, n, n)
    cross: Tensor  # P, (g, o, n)
    mean_target: Tensor  # E[y], (g, o)
    target_variance: Tensor  # var(y), (g, o)
    # Computed from H alone (factors, a float32 copy), so layers with the same inputs share one cache.
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Unknowns per output."""
        return int(self.hessian.shape[-1])

    def error(self, values: Tensor, mismatch: Tensor | None = None) -> Tensor:
        """Return the mean squared error of each output if `values` are the weight.

        Pass the mismatch of the means if no bias takes it up.
        """
        energy = ((values @ self.hessian.to(values.dtype)) * values).sum(-1)
        error = (self.target_variance - 2 * (self.cross * values).sum(-1) + energy).clamp(min=0)
        return error if mismatch is None else error + mismatch.square()

    def mean_mismatch(self, values: Tensor) -> Tensor:
        """Return E[y] - V m~: what the mean of each output lacks."""
        return self.mean_target - torch.einsum("gon,gn->go", values, self.mean)

    def around_zero(self) -> "Moments":
        """Return the moments around zero. In a layer without a bias the means are part of the error."""
        if "around zero" not in self.cache:
            self.cache["around zero"] = _second_moment(self.hessian, self.mean), {}
        hessian, cache = self.cache["around zero"]
        return Moments(
            self.count,
            torch.zeros_like(self.mean),
            hessian,
            self.cross + torch.einsum("go,gn->gon", self.mean_target, self.mean),
            torch.zeros_like(self.mean_target),
            self.target_variance + self.mean_target.square(),
            cache,
        )

    def in_float32(self) -> "Moments":
        """Return the moments with H in float32, which the steps read. H of a wide layer takes most of the memory."""
        return replace(self, hessian=float32_hessian(self))

    def select_outputs(self, outputs: slice) -> "Moments":
        """Return the moments of some outputs. H and the mean do not depend on the outputs."""
        return replace(
            self,
            cross=self.cross[:, outputs],
            mean_target=self.mean_target[:, outputs],
            target_variance=self.target_variance[:, outputs],
        )


class ErrorAroundWeight:
    """Errors of values near one weight W, in float32.

    E(V) = E(W) + 2 <W H - P, D> + <D H, D>,  D = V - W

    E(V) itself is a small difference of large numbers, which float32 would lose. E(W) is computed once in float64; the
    rest is small where D is.
    """

    def __init__(self, moments: Moments, weight: Tensor) -> None:
        hessian = float32_hessian(moments)
        if "upper" not in moments.cache:  # twice what is above the diagonal of H, and the diagonal once
            upper = hessian.triu().mul_(2)
            upper.diagonal(dim1=-2, dim2=-1).div_(2)
            moments.cache["upper"] = upper
        self.weight, self.upper = weight, moments.cache["upper"]
        self.slope = weight.to(torch.float32) @ hessian - moments.cross.to(torch.float32)
        # E(W) = var(y) + <W H - P, W> - <P, W>, in float64
        base = torch.empty_like(moments.target_variance)
        for part in split_outputs(slice(None), weight.shape[1]):
            gradient = self.slope[:, part].to(torch.float64).sub_(moments.cross[:, part])
            base[:, part] = gradient.mul_(weight[:, part]).sum(-1)
        self.base = base.add_(moments.target_variance).clamp_(min=0)

    def error(self, values: Tensor, outputs: slice = slice(None)) -> Tensor:
        """Return the mean squared error of each of the outputs, if a bias corrects the means."""
        difference = (values - self.weight[:, outputs]).to(torch.float32)
        added = (difference * 2 * self.slope[:, outputs]).sum(-1, dtype=torch.float64)
        for start in range(0, difference.shape[-1], COLUMNS_PER_PRODUCT):  # D H D' from the upper triangle of H
            columns = slice(start, start + COLUMNS_PER_PRODUCT)
            product = difference[..., : columns.stop] @ self.upper[:, : columns.stop, columns]
            added += (difference[..., columns] * product).sum(-1)
        return (self.base[:, outputs] + added).clamp(min=0)


def split_outputs(outputs: slice, count: int) -> Iterator[slice]:
    """Split a slice of `count` outputs: all outputs of a wide layer in float64 would take much memory."""
    start, stop, step = outputs.indices(count)
    for first in range(start, stop, step * COLUMNS_PER_PRODUCT):
        yield slice(first, min(first + step * COLUMNS_PER_PRODUCT, stop), step)


def float32_hessian(moments: Moments) -> Tensor:
    """Return H in float32, converted once."""
    if "float32" not in moments.cache:
        moments.cache["float32"] = moments.hessian.to(torch.float32)
    hessian: Tensor = moments.cache["float32"]
    return hessian


class MomentSums:
    """Sums over rows, from which `Moments` are computed.

    A layer with more outputs than inputs whose target is W x alone passes `weight`: then the float inputs x are added
    up instead of the outputs, and

        P = W cov(x, x~),  var(y) = diag(W cov(x, x) W').
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight  # W; None: `targets` of `add` are the outputs
        self.count, self.total = 0, 0.0  # rows that are not all zero; sum of the row weights
        self.center: tuple[Tensor, Tensor] | None = None  # the point that sums are taken around
        self.pending: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(self, noisy: Tensor, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            noisy: Rows (r, g, n) of the quantized stream.
            targets: What the outputs should be, (r, g, o); with `weight`, the rows of the float stream.
            row_weights: The weight of each row; 1 if None.
        """
        self.pending.append((noisy, targets, row_weights))
        if sum(rows.shape[0] for rows, *_ in self.pending) >= MIN_ROWS_PER_PRODUCT:
            self.flush()

    def flush(self) -> None:
        """Add the pending rows to the sums."""
        pending, self.pending = self.pending, []
        if not any(rows.shape[0] for rows, *_ in pending):
            return
        noisy = torch.cat([rows for rows, _, _ in pending])
        targets = torch.cat([rows for _, rows, _ in pending])
        row_weights = None
        if any(weights is not None for *_, weights in pending):
            row_weights = torch.cat(
                [
                    torch.ones(len(rows), dtype=torch.float32) if weights is None else weights
                    for rows, _, weights in pending
                ]
            )
        if self.center is None:
            self._allocate(noisy.mean(0), targets.mean(0))
        assert self.center is not None  # noqa: S101  # set by _allocate
        # Only rows whose first value is zero can be all zero, so the other rows need not be searched.
        zero_rows = noisy[noisy[:, 0, 0] == 0].flatten(1).eq(0).all(1)
        self.count += noisy.shape[0] - int(zero_rows.sum())
        z, y = noisy.sub_(self.center[0]), targets.sub_(self.center[1])  # torch.cat made copies: they may be changed
        weighted_z = z if row_weights is None else z * row_weights[:, None, None]
        weighted_y = y if row_weights is None else y * row_weights[:, None, None]
        self.sums[0].add_(weighted_z.sum(0))
        self.sums[1].add_(weighted_y.sum(0))
        by_group = weighted_z.transpose(0, 1)
        _add_upper_product_(self.products[0], z.transpose(0, 1), by_group)
        self.products[1].add_(y.transpose(0, 1).mT @ by_group)
        if self.weight is None:
            self.energy.add_((y * weighted_y).sum(0))
        else:
            _add_upper_product_(self.energy, y.transpose(0, 1), weighted_y.transpose(0, 1))
        self.total += noisy.shape[0] if row_weights is None else float(row_weights.sum(dtype=torch.float64))

    def _allocate(self, noisy: Tensor, target: Tensor) -> None:
        """Start with empty sums around a point."""
        self.center = noisy, target
        (groups, size), outputs = noisy.shape, target.shape[-1]
        self.sums = _zeros(groups, size), _zeros(groups, outputs)
        self.products = _zeros(groups, size, size), _zeros(groups, outputs, size)
        self.energy = _zeros(groups, outputs) if self.weight is None else _zeros(groups, size, size)

    def merge_ranks(self) -> "MomentSums":
        """Add up the sums of all ranks, moved to one center."""
        self.flush()
        if distributed.world_size() == 1:
            return self
        center = {} if self.center is None else {"noisy": self.center[0], "target": self.center[1]}
        centers = [part for part in distributed.gather_tensors(center, "moments") if part]
        if not centers:
            return self
        merged = self._moved_to(centers[0]["noisy"], centers[0]["target"])
        counts = torch.tensor([self.count, self.total], dtype=torch.float64)
        distributed.all_reduce_sum([counts, *merged.sums, *merged.products, merged.energy], "moments")
        merged.count, merged.total = int(counts[0]), float(counts[1])
        return merged

    def _moved_to(self, noisy: Tensor, target: Tensor) -> "MomentSums":
        """Return the sums around another center at distance d: sum (z + d)(z + d)' = sum zz' + d s' + s d' + n dd'."""
        moved = MomentSums(self.weight)
        moved._allocate(noisy, target)
        if self.center is None:
            return moved
        d, e = (self.center[0].double() - noisy.double()), (self.center[1].double() - target.double())
        (z, y), n = self.sums, self.total
        moved.sums = z + n * d, y + n * e
        moved.products = (
            self.products[0] + _shifted_product(d, z, d, z, n),
            (self.products[1] + _shifted_product(e, y, d, z, n)),
        )
        added_energy = 2 * e * y + n * e.square() if self.weight is None else _shifted_product(e, y, e, y, n)
        moved.energy = self.energy + added_energy
        return moved

    def to_moments(self, *, is_done: bool = False) -> Moments | None:
        """Compute the moments; None if no rows, or only zeros, were added.

        With `is_done` H is computed in the memory of the sums, which cannot be used afterwards.
        """
        self.flush()
        if self.center is None or not self.count:
            return None
        z, y = self.sums[0] / self.total, self.sums[1] / self.total
        mean, mean_target = z + self.center[0].to(torch.float64), y + self.center[1].to(torch.float64)
        hessian = _mirror_upper_(self.products[0] if is_done else self.products[0].clone())
        hessian.div_(self.total).baddbmm_(z[:, :, None], z[:, None], alpha=-1)
        cross = self.products[1] / self.total - torch.einsum("go,gn->gon", y, z)
        if self.weight is None:
            variance = self.energy / self.total - y.square()
        else:
            exact = _mirror_upper_(self.energy.clone()).div_(self.total).baddbmm_(y[:, :, None], y[:, None], alpha=-1)
            products = self.weight @ torch.cat([cross, exact], -1).to(torch.float32)
            cross = products[..., : cross.shape[-1]].to(torch.float64)
            variance = (products[..., cross.shape[-1] :] * self.weight).sum(-1, dtype=torch.float64)
            mean_target = torch.einsum("gon,gn->go", self.weight.to(torch.float64), mean_target)
        return Moments(self.count, mean, hessian, cross, mean_target, variance.clamp(min=0))


def _shifted_product(e: Tensor, y: Tensor, d: Tensor, z: Tensor, n: float) -> Tensor:
    """sum (y + e)(z + d)' - sum yz' = e z' + y d' + n e d', with y and z the sums."""
    return e[:, :, None] * (z + n * d)[:, None] + y[:, :, None] * d[:, None]


def _second_moment(covariance: Tensor, mean: Tensor) -> Tensor:
    """Compute H + m m' in float32, some rows at a time."""
    moment = torch.empty_like(covariance, dtype=torch.float32)
    for start in range(0, covariance.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        moment[:, rows] = torch.baddbmm(covariance[:, rows], mean[:, rows, None], mean[:, None])
    return moment


def _mirror_upper_(upper: Tensor) -> Tensor:
    """Fill the lower triangle of a symmetric matrix from its upper one, in place."""
    for start in range(0, upper.shape[-1], COLUMNS_PER_PRODUCT):
        rows, rest = slice(start, start + COLUMNS_PER_PRODUCT), slice(start + COLUMNS_PER_PRODUCT, None)
        block = upper[:, rows, rows]
        block.copy_(block.triu().add_(block.triu(1).mT))
        upper[:, rest, rows] = upper[:, rows, rest].mT
    return upper


def _add_upper_product_(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left' @ right, which is symmetric, in place: only the blocks on the diagonal and right of it."""
    for start in range(0, into.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        into[:, rows, start:].add_(left[..., rows].mT @ right[..., start:])


class ResidualSums:
    """Mean and energy of y - V x~ at the present codes V: all that a bias can correct. No products are needed."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0  # rows; sum of the row weights
        self.sums: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # of r, r^2, y, y^2 with r the residual

    def add(self, outputs: Tensor, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """Add the outputs (r, g, o) of the quantized layer, and what they should be."""
        if not outputs.shape[0]:
            return
        residual = targets - outputs
        counts = 1.0 if row_weights is None else row_weights[:, None, None]
        terms = (residual, residual.square(), targets, targets.square())
        parts = tuple((term * counts).sum(0) for term in terms)
        if self.sums is None:
            self.sums = tuple(torch.zeros_like(part, dtype=torch.float64) for part in parts)  # type: ignore[assignment]
        assert self.sums is not None  # noqa: S101  # set above
        for total, part in zip(self.sums, parts, strict=True):
            total.add_(part)
        self.count += outputs.shape[0]
        self.total += outputs.shape[0] if row_weights is None else float(row_weights.sum(dtype=torch.float64))

    def merge_ranks(self) -> "ResidualSums":
        """Add up the sums of all ranks in rank order, so that every rank gets the same bits."""
        if distributed.world_size() == 1:
            return self
        tensors = {} if self.sums is None else {str(index): total for index, total in enumerate(self.sums)}
        counts = torch.tensor([self.count, self.total], dtype=torch.float64)
        gathered = distributed.gather_tensors(tensors | {"counts": counts}, "residuals")
        parts = [part for part in gathered if len(part) > 1]  # ranks that saw rows
        merged = ResidualSums()
        if parts:
            merged.count = int(sum(float(part["counts"][0]) for part in parts))
            merged.total = float(sum(part["counts"][1] for part in parts))
            totals = [torch.stack([part[str(index)] for part in parts]).sum(0) for index in range(4)]
            merged.sums = tuple(totals)  # type: ignore[assignment]  # four tensors
        return merged

    @property
    def mean(self) -> Tensor:
        assert self.sums is not None  # noqa: S101  # read only if rows were added
        return self.sums[0] / self.total

    def error(self, shift: Tensor | None = None) -> float:
        """Return the squared error of the outputs over their energy, after a shift of the bias."""
        assert self.sums is not None  # noqa: S101  # as above
        residual, square, target, energy = (total / self.total for total in self.sums)
        target_variance = float((energy - target.square()).clamp(min=0).sum())
        remaining = square if shift is None else square - 2 * shift * residual + shift.square()
        return float(remaining.clamp(min=0).sum()) / target_variance if target_variance > 0 else 0.0


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
