"""Estimate how long kernels take from tables of measured kernels, before anything runs.

    seconds = MACs * seconds per MAC, interpolated between the measured layers with the nearest shapes

`bench/kernels.py` measures the tables, one for each runtime and instruction set. They predict whether float or int8 is
faster on a CPU of that kind, not the absolute time on another machine.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log, log2
from typing import Any, NamedTuple

NEIGHBOURS = 4  # number of measured layers between which is interpolated
MIN_DISTANCE = 0.05  # added to distances, so that a measured shape does not have an infinite weight
MIN_CALL_SECONDS = 1e-6  # time of the smallest operation


@dataclass(frozen=True)
class ProductShape:
    """The shape of a convolution or linear layer."""

    kind: str  # "conv" or "linear"
    inputs: int  # input channels
    outputs: int  # output channels
    pixels: int  # output positions of a convolution, rows of a linear layer
    kernel: int = 1  # kernel size along one axis
    groups: int = 1
    rank: int = 2  # number of spatial axes of a convolution

    @property
    def macs(self) -> int:
        return self.pixels * self.inputs * self.outputs * int(self.kernel**self.rank) // self.groups

    @property
    def family(self) -> str:
        """The group of kernels that it is compared with, such as "depthwise" or "pointwise 1d"."""
        if self.kind != "conv":
            return self.kind
        if self.groups > 1:
            kind = "depthwise"
        elif self.inputs < 4:
            kind = "stem"
        else:
            kind = "pointwise" if self.kernel == 1 else "dense"
        return kind if self.rank == 2 else f"{kind} {self.rank}d"

    def distance(self, other: "ProductShape") -> float:
        """Weighted sum of the squared log2 ratios of the sizes. Channels weigh more than positions."""
        weighted_pairs = [
            (self.inputs, other.inputs, 2.0),
            (self.outputs, other.outputs, 2.0),
            (self.pixels, other.pixels, 1.0),
            (self.kernel, other.kernel, 4.0),
        ]
        return sum(weight * log2(size / other_size) ** 2 for size, other_size, weight in weighted_pairs)


class MeasuredProduct(NamedTuple):
    """A measured convolution or linear layer."""

    shape: ProductShape
    float_seconds: float
    int8_seconds: float


class KernelTimes:
    """One table of measured kernels.

    Args:
        rows: Measurements in microseconds: products with "float" and "int8" times, other kernels with an "int8" time.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.products: dict[str, list[MeasuredProduct]] = {}  # by family
        self.moves: dict[str, list[tuple[int, float]]] = {}  # kind -> (elements, seconds) of each measurement
        self._cache: dict[ProductShape, tuple[float, float] | None] = {}
        for row in rows:
            if row["kind"] not in ("conv", "linear"):
                self.moves.setdefault(row["kind"], []).append((row["elements"], row["int8"] * 1e-6))
            elif row["float"] and row["int8"]:
                options = {key: row[key] for key in ("kernel", "groups", "rank") if key in row}
                shape = ProductShape(row["kind"], row["in"], row["out"], row["pixels"], **options)
                product = MeasuredProduct(shape, row["float"] * 1e-6, row["int8"] * 1e-6)
                self.products.setdefault(shape.family, []).append(product)

    def product_seconds(self, shape: ProductShape) -> tuple[float, float] | None:
        """Return the seconds in float and in int8; None if the table has no kernel of this family."""
        if shape not in self._cache:
            self._cache[shape] = self._interpolate(shape)
        return self._cache[shape]

    def _interpolate(self, shape: ProductShape) -> tuple[float, float] | None:
        measured = self.products.get(shape.family)
        if not measured or shape.macs <= 0:
            return None
        nearest = sorted(measured, key=lambda product: shape.distance(product.shape))[:NEIGHBOURS]
        weights = [1 / (shape.distance(product.shape) + MIN_DISTANCE) for product in nearest]

        def interpolate(seconds_per_mac: list[float]) -> float:
            weighted = [weight * log(rate) for weight, rate in zip(weights, seconds_per_mac, strict=True)]
            return max(exp(sum(weighted) / sum(weights)) * shape.macs, MIN_CALL_SECONDS)

        float_seconds = interpolate([product.float_seconds / product.shape.macs for product in nearest])
        return float_seconds, interpolate([product.int8_seconds / product.shape.macs for product in nearest])

    def move_seconds(self, kind: str, elements: int) -> float:
        """Return the seconds of a conversion or another elementwise pass over this number of values."""
        rows = self.moves.get(kind) or self.moves.get("quantize")
        if not rows:
            return MIN_CALL_SECONDS
        largest = max(rows)
        return max(MIN_CALL_SECONDS, largest[1] * elements / largest[0]) + MIN_CALL_SECONDS


@cache
def load_kernel_times(name: str) -> KernelTimes:
    """Load the table with this name."""
    text = files("scalepoint.targets").joinpath("measured", f"{name}.json").read_text(encoding="utf-8")
    return KernelTimes(json.loads(text))
