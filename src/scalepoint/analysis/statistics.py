"""Running sums that compare two streams of tensors, and those that say how a range is used. Both merge."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree


def float_tensors(value: Any) -> Iterator[Tensor]:
    """The float tensors of an output, however nested."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def energy(tensor: Tensor) -> float:
    """sum x^2, added up in float64"""
    return float(tensor.detach().to(torch.float32).square().sum(dtype=torch.float64))


def error_energy(one: Any, other: Any) -> float:
    """sum (x - y)^2 over the float tensors of two outputs"""
    pairs = zip(float_tensors(one), float_tensors(other), strict=True)
    return sum(0.0 if x is y else energy(x.to(torch.float32) - y.to(torch.float32)) for x, y in pairs)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise): inf without any noise, -inf for noise without a signal, NaN when one is NaN."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0 or signal == 0:
        return math.inf if noise == 0 else -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


@dataclass
class ErrorSums:
    """Of x, the reference, and y: sum x^2, sum y^2, sum x y, sum (x - y)^2."""

    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    count: int = 0

    def add(self, reference: Any, found: Any) -> None:
        """Take in two outputs of the same structure."""
        for x, y in zip(float_tensors(reference), float_tensors(found), strict=True):
            self.signal += energy(x)
            self.other += energy(y)
            self.product += float((x.to(torch.float32) * y.to(torch.float32)).sum(dtype=torch.float64))
            self.noise += error_energy(x, y)
            self.count += x.numel()

    def merge(self, other: "ErrorSums") -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum x^2 / sum (x - y)^2)"""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """sum x y / sqrt(sum x^2 sum y^2); two that are all zero agree."""
        if not self.signal or not self.other:
            return 1.0 if self.signal == self.other else 0.0
        return self.product / math.sqrt(self.signal) / math.sqrt(self.other)


@dataclass
class RangeUsage:
    """How the values that reach a stub fill its range [low, high], whose codes lie `step` apart (0: a float format)."""

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
        half = self.step / 2
        self.count += x.numel()
        self.clipped += int(((x < self.low - half) | (x > self.high + half)).sum())
        self.at_ends += int(((x <= self.low + half) | (x >= self.high - half)).sum())
        least, most = torch.aminmax(x)
        self.least, self.most = min(self.least, float(least)), max(self.most, float(most))

    def merge(self, other: "RangeUsage") -> None:
        self.count += other.count
        self.clipped += other.clipped
        self.at_ends += other.at_ends
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    @property
    def saturation(self) -> float:
        """The share of values that lie beyond the range, by more than rounding mends."""
        return self.clipped / self.count if self.count else 0.0

    @property
    def end_share(self) -> float:
        """The share of values on the lowest or the highest code; the zeros after a ReLU are on the lowest."""
        return self.at_ends / self.count if self.count else 0.0

    @property
    def used(self) -> float:
        """The part of the range between the smallest and the largest value; the rest is dead. NaN: only NaN came."""
        if not self.count or self.high <= self.low:
            return 0.0
        if self.least > self.most:
            return math.nan
        inside = min(self.most, self.high) - max(self.least, self.low)
        return max(0.0, inside) / (self.high - self.low)


def merge_over_ranks(sums: Sequence["ErrorSums | RangeUsage"]) -> None:
    """Make each that of all ranks, merged in their order: the same bits everywhere."""
    parts = distributed.gather_values("merging sums", [list(vars(each).values()) for each in sums])
    for index, each in enumerate(sums):
        first, *others = (type(each)(*part[index]) for part in parts)
        for other in others:
            first.merge(other)  # type: ignore[arg-type]  # of the same type
        vars(each).update(vars(first))
