"""One layer to be solved: its weight by groups, the grid of its codes, what was seen; and a solution of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity
from scalepoint.tuning.moments import Moments
from scalepoint.tuning.rows import Geometry


@dataclass(frozen=True)
class Solution:
    """Centred codes (groups, outputs, n), their scales (groups, outputs, blocks), and what they are to be near to."""

    target: Tensor
    codes: Tensor
    scale: Tensor

    @property
    def steps(self) -> Tensor:
        """The scale of every code."""
        return spread(self.scale, self.codes.shape[-1])

    @property
    def values(self) -> Tensor:
        return self.codes * self.steps


@dataclass(frozen=True)
class Problem:
    """What a step may know. `fit` is what it solves on, `judge` the held-out rows."""

    name: str
    weight: Tensor
    low: Tensor  # the ends of centred codes, as they broadcast against (groups, outputs, n)
    high: Tensor
    fit: Moments
    judge: Moments
    has_own_scales: bool  # whether every output has scales of its own, which may change
    has_intercept: bool
    notes: dict[str, Any] = field(default_factory=dict)  # what a step did, for the report

    def nearest(self, target: Tensor, scale: Tensor) -> Tensor:
        return (target / spread(scale, target.shape[-1])).round().clamp(self.low, self.high)

    def error(self, solution: Solution, moments: Moments | None = None) -> float:
        """The squared error of the outputs on held-out rows, over their energy; a bias takes up what the means of the
        fitted rows lack."""
        seen, values = self.judge if moments is None else moments, solution.values
        mismatch = seen.mismatch(self.weight, values)
        if self.has_intercept:
            mismatch = mismatch - self.fit.mismatch(self.weight, values)
        whole = float(seen.outputs.sum())
        return float(seen.error(self.weight, values, mismatch).sum()) / whole if whole > 0 else 0.0

    def damped(self, least: float = 0.01) -> Tensor:
        """H with a diagonal that grows with unknowns per row: rounding, too, fits noise when rows are few."""
        share = least + self.fit.size / max(self.fit.count, 1)
        mean = self.fit.noisy.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
        return self.fit.noisy + torch.diag_embed((share * mean)[:, None].expand(-1, self.fit.size))


def spread(scale: Tensor, size: int) -> Tensor:
    """One value an element from one value a block."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(size // scale.shape[-1], -1)


@dataclass(frozen=True)
class Shape:
    """Between a layer and the (groups, outputs, n) of its problem."""

    layer: QuantizedWeighted
    geometry: Geometry

    def weight(self) -> Tensor:
        weight, _ = self.layer.folded()
        return self.geometry.by_group(self.layer.canonical(weight).detach().to(torch.float64))

    def start(self, weight: Tensor) -> Solution:
        """What is deployed now."""
        codes = self.layer.deployed().codes
        scale = self._by_group(self.layer.weight_quant.qparams_for(codes).scale.to(torch.float64), codes)
        return Solution(weight, self.geometry.by_group(codes.to(torch.float64)) - self._zero(), scale)

    def limits(self) -> tuple[Tensor, Tensor]:
        """The ends of centred codes."""
        spec, zero = self.layer.weight_quant.spec, self._zero()
        return spec.quant_min - zero, spec.quant_max - zero

    def _zero(self) -> Tensor:
        """The zero point of every code; it stays as it is."""
        codes = self.layer.deployed().codes
        zero = self.layer.weight_quant.qparams_for(codes).zero_point
        size = self.geometry.by_group(codes).shape[-1]
        if zero is None:
            return torch.zeros(1, 1, 1, dtype=torch.float64)
        return spread(self._by_group(zero.to(torch.float64), codes), size)

    def _by_group(self, value: Tensor, codes: Tensor) -> Tensor:
        """A parameter as (groups, outputs, blocks)."""
        granularity = self.layer.weight_quant.calculator.granularity
        groups, outputs = self.geometry.by_group(codes).shape[:2]
        if isinstance(granularity, PerBlockGranularity):
            return value.reshape(groups, outputs, -1)
        if isinstance(granularity, PerChannelGranularity) and self.geometry.kind == "conv_transpose":
            return value.reshape(1, outputs, 1).expand(groups, -1, -1)
        if value.numel() > 1:
            return value.reshape(groups, outputs, 1)
        return value.reshape(1, 1, 1).expand(groups, outputs, 1)

    @property
    def has_own_scales(self) -> bool:
        granularity = self.layer.weight_quant.calculator.granularity
        is_shared = self.geometry.kind == "conv_transpose" and self.geometry.groups > 1
        return isinstance(granularity, PerChannelGranularity | PerBlockGranularity) and not is_shared

    def apply(self, solution: Solution, shift: Tensor | None) -> None:
        """Make a solution what the layer deploys."""
        quant = self.layer.weight_quant
        codes = self.layer.deployed().codes
        stored = self.geometry.as_stored((solution.codes + self._zero()).to(torch.float32), codes)
        scale = None
        if self.has_own_scales:
            own = quant.qparams_for(codes).scale
            scale = QParams(solution.scale.reshape(own.shape).to(torch.float32))
        self.layer.choose(stored, scale)
        if shift is not None:
            self.layer.shift_bias(shift.reshape(-1))


def noted(notes: Mapping[str, Any]) -> str:
    said = ((name, f"{value:.3g}" if isinstance(value, float) else str(value)) for name, value in notes.items())
    return ", ".join(f"{name} {value}" for name, value in said)
