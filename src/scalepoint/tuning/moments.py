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
            other_cache: dict[Any, Any] = {}  # of the other H, for all layers that share it
            self.cache["around zero"] = _second_moment(self.hessian, self.mean), other_cache
        hessian, cache = self.cache["around zero"]
        return Moments(
            count=self.count,
            mean=torch.zeros_like(self.mean),
            hessian=hessian,
            cross=self.cross + torch.einsum("go,gn->gon", self.mean_target, self.mean),
            mean_target=torch.zeros_like(self.mean_target),
            target_variance=self.target_variance + self.mean_target.square(),
            cache=cache,
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

    All sums are taken around `center`, in float64. z and y are a row of the quantized stream and its target, minus the
    center.

    Attributes:
        weight: W; None if the `targets` of `add` are the outputs.
        count: Rows that are not all zero.
        total: Sum of the row weights.
        center: The means of z and y in the first rows; None before any rows were added.
        z_sum, y_sum: Sums of z (g, n) and of y (g, o).
        zz_sum: Sums of z z', (g, n, n); only the blocks on the diagonal and right of it are filled.
        yz_sum: Sums of y z', (g, o, n).
        yy_sum: Sums of y^2, (g, o); with `weight` of y y', filled like `zz_sum`.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight
        self.count, self.total = 0, 0.0
        self.center: tuple[Tensor, Tensor] | None = None
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
            row_weights = torch.cat([_weights_or_ones(weights, rows) for rows, _, weights in pending])
        if self.center is None:
            self._allocate(noisy.mean(0), targets.mean(0))
        assert self.center is not None  # noqa: S101  # set by _allocate
        # Only rows whose first value is zero can be all zero, so the other rows need not be searched.
        zero_rows = noisy[noisy[:, 0, 0] == 0].flatten(1).eq(0).all(1)
        self.count += noisy.shape[0] - int(zero_rows.sum())
        z, y = noisy.sub_(self.center[0]), targets.sub_(self.center[1])  # torch.cat made copies: they may be changed
        weighted_z = z if row_weights is None else z * row_weights[:, None, None]
        weighted_y = y if row_weights is None else y * row_weights[:, None, None]
        self.z_sum.add_(weighted_z.sum(0))
        self.y_sum.add_(weighted_y.sum(0))
        weighted_z_by_group = weighted_z.transpose(0, 1)
        _add_upper_product_(self.zz_sum, z.transpose(0, 1), weighted_z_by_group)
        self.yz_sum.add_(y.transpose(0, 1).mT @ weighted_z_by_group)
        if self.weight is None:
            self.yy_sum.add_((y * weighted_y).sum(0))
        else:
            _add_upper_product_(self.yy_sum, y.transpose(0, 1), weighted_y.transpose(0, 1))
        self.total += noisy.shape[0] if row_weights is None else float(row_weights.sum(dtype=torch.float64))

    def _allocate(self, noisy: Tensor, target: Tensor) -> None:
        """Start with empty sums around a point."""
        self.center = noisy, target
        (groups, size), outputs = noisy.shape, target.shape[-1]
        self.z_sum, self.y_sum = _zeros(groups, size), _zeros(groups, outputs)
        self.zz_sum, self.yz_sum = _zeros(groups, size, size), _zeros(groups, outputs, size)
        self.yy_sum = _zeros(groups, outputs) if self.weight is None else _zeros(groups, size, size)

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
        sums = [merged.z_sum, merged.y_sum, merged.zz_sum, merged.yz_sum, merged.yy_sum]
        distributed.all_reduce_sum([counts, *sums], "moments")
        merged.count, merged.total = int(counts[0]), float(counts[1])
        return merged

    def _moved_to(self, noisy: Tensor, target: Tensor) -> "MomentSums":
        """Return the sums around another center. z grows by dz = old center - new center, and y by dy."""
        moved = MomentSums(self.weight)
        moved._allocate(noisy, target)
        if self.center is None:
            return moved
        dz, dy = self.center[0].double() - noisy.double(), self.center[1].double() - target.double()
        n = self.total
        moved.z_sum, moved.y_sum = self.z_sum + n * dz, self.y_sum + n * dy
        moved.zz_sum = self.zz_sum + _change_of_products(self.z_sum, dz, self.z_sum, dz, n)
        moved.yz_sum = self.yz_sum + _change_of_products(self.y_sum, dy, self.z_sum, dz, n)
        if self.weight is None:
            moved.yy_sum = self.yy_sum + (2 * dy * self.y_sum + n * dy.square())
        else:
            moved.yy_sum = self.yy_sum + _change_of_products(self.y_sum, dy, self.y_sum, dy, n)
        return moved

    def to_moments(self, *, is_done: bool = False) -> Moments | None:
        """Compute the moments; None if no rows, or only zeros, were added.

        With `is_done` H is computed in the memory of the sums, which cannot be used afterwards.
        """
        self.flush()
        if self.center is None or not self.count:
            return None
        z_mean, y_mean = self.z_sum / self.total, self.y_sum / self.total
        mean, mean_target = z_mean + self.center[0].to(torch.float64), y_mean + self.center[1].to(torch.float64)
        # cov(z, z) = E[z z'] - E[z] E[z]'
        hessian = _mirror_upper_(self.zz_sum if is_done else self.zz_sum.clone())
        hessian.div_(self.total).baddbmm_(z_mean[:, :, None], z_mean[:, None], alpha=-1)
        cross = self.yz_sum / self.total - torch.einsum("go,gn->gon", y_mean, z_mean)
        if self.weight is None:
            variance = self.yy_sum / self.total - y_mean.square()
        else:  # y is the float input x so far: multiply by W
            x_covariance = _mirror_upper_(self.yy_sum.clone()).div_(self.total)
            x_covariance.baddbmm_(y_mean[:, :, None], y_mean[:, None], alpha=-1)
            # One product gives both W cov(x, x~) and W cov(x, x).
            products = self.weight @ torch.cat([cross, x_covariance], -1).to(torch.float32)
            cross = products[..., : cross.shape[-1]].to(torch.float64)
            variance = (products[..., cross.shape[-1] :] * self.weight).sum(-1, dtype=torch.float64)
            mean_target = torch.einsum("gon,gn->go", self.weight.to(torch.float64), mean_target)
        return Moments(self.count, mean, hessian, cross, mean_target, variance.clamp(min=0))


def _change_of_products(y_sum: Tensor, dy: Tensor, z_sum: Tensor, dz: Tensor, n: float) -> Tensor:
    """Return how sum y z' over n rows changes if y grows by dy and z by dz.

    sum (y + dy)(z + dz)' - sum y z' = dy (sum z + n dz)' + (sum y) dz'
    """
    return dy[:, :, None] * (z_sum + n * dz)[:, None] + y_sum[:, :, None] * dz[:, None]


def _second_moment(covariance: Tensor, mean: Tensor) -> Tensor:
    """Compute H + m m' in float32, some rows at a time."""
    moment = torch.empty_like(covariance, dtype=torch.float32)
    for start in range(0, covariance.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        moment[:, rows] = torch.baddbmm(covariance[:, rows], mean[:, rows, None], mean[:, None])
    return moment


def _weights_or_ones(row_weights: Tensor | None, rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.float32) if row_weights is None else row_weights


def _mirror_upper_(upper: Tensor) -> Tensor:
    """Fill the lower triangle of a symmetric matrix from its upper one, block by block and in place."""
    for start in range(0, upper.shape[-1], COLUMNS_PER_PRODUCT):
        rows, right_of_block = slice(start, start + COLUMNS_PER_PRODUCT), slice(start + COLUMNS_PER_PRODUCT, None)
        block = upper[:, rows, rows]
        block.copy_(block.triu().add_(block.triu(1).mT))
        upper[:, right_of_block, rows] = upper[:, rows, right_of_block].mT
    return upper


def _add_upper_product_(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left' @ right, which is symmetric, in place: only the blocks on the diagonal and right of it."""
    for start in range(0, into.shape[-1], COLUMNS_PER_PRODUCT):
        rows = slice(start, start + COLUMNS_PER_PRODUCT)
        into[:, rows, start:].add_(left[..., rows].mT @ right[..., start:])


class ResidualSums:
    """Mean and energy of the residual y - V x~ at the present codes V: a bias can correct its mean.

    Attributes:
        count: Number of rows.
        total: Sum of the row weights.
        sums: Sums of the residual, its square, the target and its square, stacked; None before any rows were added.
    """

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.sums: Tensor | None = None

    def add(self, outputs: Tensor, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """Add the outputs (r, g, o) of the quantized layer, and what they should be."""
        if not outputs.shape[0]:
            return
        residual = targets - outputs
        counts = 1.0 if row_weights is None else row_weights[:, None, None]
        terms = (residual, residual.square(), targets, targets.square())
        sums = torch.stack([(term * counts).sum(0) for term in terms]).to(torch.float64)
        self.sums = sums if self.sums is None else self.sums.add_(sums)
        self.count += outputs.shape[0]
        self.total += outputs.shape[0] if row_weights is None else float(row_weights.sum(dtype=torch.float64))

    def merge_ranks(self) -> "ResidualSums":
        """Add up the sums of all ranks in rank order, so that every rank gets the same bits."""
        if distributed.world_size() == 1:
            return self
        tensors = {} if self.sums is None else {"sums": self.sums}
        counts = torch.tensor([self.count, self.total], dtype=torch.float64)
        gathered = distributed.gather_tensors(tensors | {"counts": counts}, "residuals")
        parts = [part for part in gathered if len(part) > 1]  # ranks that saw rows
        merged = ResidualSums()
        if parts:
            merged.count = int(sum(float(part["counts"][0]) for part in parts))
            merged.total = float(sum(part["counts"][1] for part in parts))
            merged.sums = torch.stack([part["sums"] for part in parts]).sum(0)
        return merged

    @property
    def mean(self) -> Tensor:
        assert self.sums is not None  # noqa: S101  # read only if rows were added
        return self.sums[0] / self.total

    def error(self, shift: Tensor | None = None) -> float:
        """Return the squared error of the outputs over their energy, after a shift of the bias."""
        assert self.sums is not None  # noqa: S101  # as above
        residual, residual_square, target, target_square = self.sums / self.total  # means over the rows
        target_variance = float((target_square - target.square()).clamp(min=0).sum())
        remaining = residual_square
        if shift is not None:  # E[(r - shift)^2]
            remaining = residual_square - 2 * shift * residual + shift.square()
        return float(remaining.clamp(min=0).sum()) / target_variance if target_variance > 0 else 0.0


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
