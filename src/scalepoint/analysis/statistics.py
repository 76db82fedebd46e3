"""Running sums that compare two streams of tensors, or count how values use a range. Sums of ranks can be merged."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree


def float_tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the float tensors of a nested output."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def energy(tensor: Tensor) -> float:
    """Return sum x^2, added up in float64."""
    return float(tensor.detach().to(torch.float32).square().sum(dtype=torch.float64))


def error_energy(reference: Any, value: Any) -> float:
    """Return sum (x - y)^2 over the float tensors of two outputs."""
    pairs = zip(float_tensors(reference), float_tensors(value), strict=True)
    return sum(energy(x.to(torch.float32) - y.to(torch.float32)) for x, y in pairs if x is not y)


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): inf without noise, -inf for noise without signal, NaN if one is NaN."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0 or signal == 0:
        return math.inf if noise == 0 else -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


def finite_or_none(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class ErrorSums:
    """Sums over the values x of a reference and y of a model.

    Attributes:
        signal: sum x^2
        other: sum y^2
        product: sum x y
        noise: sum (x - y)^2
        count: Number of values.
    """

    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    count: int = 0

    def add(self, reference: Any, value: Any) -> None:
        """Add two outputs of the same structure."""
        for x, y in zip(float_tensors(reference), float_tensors(value), strict=True):
            self.signal += energy(x)
            self.other += energy(y)
            self.product += float((x.to(torch.float32) * y.to(torch.float32)).sum(dtype=torch.float64))
            self.noise += error_energy(x, y)
            self.count += x.numel()

    def merge(self, sums: "ErrorSums") -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(sums, name))

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum x^2 / sum (x - y)^2)"""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """sum x y / sqrt(sum x^2 sum y^2); 1 if both are all zero."""
        if not self.signal or not self.other:
            return 1.0 if self.signal == self.other else 0.0
        return self.product / math.sqrt(self.signal) / math.sqrt(self.other)


@dataclass
class RangeUsage:
    """How the values that reach an activation quantizer use its range.

    Attributes:
        low, high: The range.
        step: Distance of two codes; 0 for a float format.
        count: Number of values.
        clipped: Values beyond the range.
        at_ends: Values on the lowest or the highest code.
        least, most: Smallest and largest value.
    """

    low: float
    high: float
    step: float
    count: int = 0
    clipped: int = 0
    at_ends: int = 0
    least: float = math.inf
    most: float = -math.inf

    def add(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        x = tensor.detach()
        half_step = self.step / 2
        self.count += x.numel()
        self.clipped += int(((x < self.low - half_step) | (x > self.high + half_step)).sum())
        self.at_ends += int(((x <= self.low + half_step) | (x >= self.high - half_step)).sum())
        least, most = torch.aminmax(x)
        self.least, self.most = min(self.least, float(least)), max(self.most, float(most))

    def merge(self, usage: "RangeUsage") -> None:
        self.count += usage.count
        self.clipped += usage.clipped
        self.at_ends += usage.at_ends
        self.least, self.most = min(self.least, usage.least), max(self.most, usage.most)

    @property
    def saturation(self) -> float:
        """The share of values that are more than half a step beyond the range."""
        return self.clipped / self.count if self.count else 0.0

    @property
    def end_share(self) -> float:
        """The share of values on the lowest or the highest code. The zeros after a ReLU are on the lowest."""
        return self.at_ends / self.count if self.count else 0.0

    @property
    def used(self) -> float:
        """The part of the range between the smallest and the largest value; NaN if all values were NaN."""
        if not self.count or self.high <= self.low:
            return 0.0
        if self.least > self.most:
            return math.nan
        used_width = min(self.most, self.high) - max(self.least, self.low)
        return max(0.0, used_width) / (self.high - self.low)


def merge_over_ranks(sums: Sequence["ErrorSums | RangeUsage"]) -> None:
    """Replace all sums by those of all ranks, merged in rank order, so that every rank gets the same bits."""
    parts = distributed.gather_values("merging sums", [list(vars(rank_sums).values()) for rank_sums in sums])
    for index, own_sums in enumerate(sums):
        merged, *remaining = (type(own_sums)(*part[index]) for part in parts)
        for rank_sums in remaining:
            merged.merge(rank_sums)  # type: ignore[arg-type]  # of the same type
        vars(own_sums).update(vars(merged))
