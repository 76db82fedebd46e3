"""How long kernels take, from a table of measured ones: what a target knows of speed before anything runs.

    seconds = multiply-accumulates x the time of one, interpolated between the measured layers of the nearest shapes

`bench/kernels.py` makes the tables, one a runtime and instruction set. They tell which of two kernels is the faster on
machines of their kind, not how long one takes on another.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log, log2
from typing import Any

NEAREST = 4
CALL = 1e-6  # seconds of the smallest operation


@dataclass(frozen=True)
class ProductShape:
    """What a product is made of; pixels are positions of the output, rows of a linear layer."""

    kind: str  # conv or linear
    inputs: int
    outputs: int
    pixels: int
    kernel: int = 1
    groups: int = 1
    rank: int = 2  # axes that a convolution goes over: sound has one, pictures two, films three

    @property
    def macs(self) -> int:
        return self.pixels * self.inputs * self.outputs * int(self.kernel**self.rank) // self.groups

    @property
    def family(self) -> str:
        """Which kernels it is like."""
        if self.kind != "conv":
            return self.kind
        if self.groups > 1:
            kind = "depthwise"
        else:
            kind = "stem" if self.inputs < 4 else "pointwise" if self.kernel == 1 else "dense"
        return kind if self.rank == 2 else f"{kind} {self.rank}d"

    def distance(self, other: "ProductShape") -> float:
        """In doublings; channels tell more than positions."""
        apart = [(self.inputs, other.inputs, 2.0), (self.outputs, other.outputs, 2.0)]
        apart += [(self.pixels, other.pixels, 1.0), (self.kernel, other.kernel, 4.0)]
        return sum(weight * log2(one / two) ** 2 for one, two, weight in apart)


class KernelTimes:
    """One table."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.products: dict[str, list[tuple[ProductShape, tuple[float, float]]]] = {}
        self.moves: dict[str, list[tuple[int, float]]] = {}
        self.cached: dict[ProductShape, tuple[float, float] | None] = {}  # layers of a network are few shapes
        for row in rows:
            if row["kind"] not in ("conv", "linear"):
                self.moves.setdefault(row["kind"], []).append((row["elements"], row["int8"] * 1e-6))
            elif row["float"] and row["int8"]:
                further = {key: row[key] for key in ("kernel", "groups", "rank") if key in row}
                shape = ProductShape(row["kind"], row["in"], row["out"], row["pixels"], **further)
                self.products.setdefault(shape.family, []).append((shape, (row["float"] * 1e-6, row["int8"] * 1e-6)))

    def product_seconds(self, shape: ProductShape) -> tuple[float, float] | None:
        """Seconds in float and in int8; None for what the table has nothing like."""
        if shape not in self.cached:
            self.cached[shape] = self._between(shape)
        return self.cached[shape]

    def _between(self, shape: ProductShape) -> tuple[float, float] | None:
        known = self.products.get(shape.family)
        if not known or shape.macs <= 0:
            return None
        near = sorted((shape.distance(other), index) for index, (other, _) in enumerate(known))[:NEAREST]
        weights = [1 / (apart + 0.05) for apart, _ in near]
        candidates = []
        for place in (0, 1):
            rates = [log(known[index][1][place] / known[index][0].macs) for _, index in near]
            mean = sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / sum(weights)
            candidates.append(max(exp(mean) * shape.macs, CALL))
        return candidates[0], candidates[1]

    def move_seconds(self, kind: str, elements: int) -> float:
        """Seconds of a conversion, or of another pass over so many values."""
        rows = self.moves.get(kind) or self.moves.get("quantize")
        if not rows:
            return CALL
        largest = max(rows)
        return max(CALL, largest[1] * elements / largest[0]) + CALL


@cache
def load_kernel_times(name: str) -> KernelTimes:
    """A table by its name."""
    text = files("scalepoint.targets").joinpath("measured", f"{name}.json").read_text(encoding="utf-8")
    return KernelTimes(json.loads(text))
