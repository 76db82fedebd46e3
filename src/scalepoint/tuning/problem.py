"""One layer to be solved: its weight by groups, the grid of its codes, what was seen; and a solution of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.numerics import Format, QParams, round_to_float
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, RangeCalculatorBase
from scalepoint.spec.pair_safe import MAX_PAIR_SUM
from scalepoint.tuning.moments import ErrorAroundWeight, Moments, float32_covariance, split_outputs
from scalepoint.tuning.rows import Geometry

Ridge = float | str  # a share of the mean diagonal, or "auto": chosen on held-out rows
MAX_SAMPLED_OUTPUTS = 128  # outputs
# Beside it a number keeps no fraction; as tensors, which need no conversion at every call.
ROUNDING_OFFSETS = {
    kind: torch.tensor(1.5 * 2.0**bits, dtype=kind) for kind, bits in ((torch.float32, 23), (torch.float64, 52))
}
LowHigh = tuple[Any, Any]  # the least and the largest that a code may be


@dataclass(frozen=True)
class Solution:
    """Centred codes (groups, outputs, n) in float32, which holds any of them, their scales (groups, outputs, blocks),
    and what they are to be near to."""

    target: Tensor
    codes: Tensor
    scale: Tensor

    @property
    def steps(self) -> Tensor:
        """The scale of every code."""
        return expand_scale(self.scale, self.codes.shape[-1])

    @property
    def values(self) -> Tensor:
        return self.codes * self.steps

    def of(self, outputs: slice) -> "Solution":
        """That of some of the outputs."""
        return Solution(*(each[:, outputs] for each in (self.target, self.codes, self.scale)))


@dataclass(frozen=True)
class CodeGrid:
    """What codes may be: whole numbers, or values of a float format, from low to high; with `partners` the sum of two
    of one sign is limited, as in kernels that add products in pairs of 16 bits."""

    low: Tensor  # as they broadcast against (groups, outputs, n)
    high: Tensor
    floats: Format | None = None
    partners: Tensor | None = None  # (kinds of pairs, n): the other column of each, or its own where it has none

    def of(self, outputs: slice) -> "CodeGrid":
        """Those of some of the outputs."""
        low, high = (each if each.shape[1] == 1 else each[:, outputs] for each in (self.low, self.high))
        return replace(self, low=low, high=high)

    def round_(self, x: Tensor) -> Tensor:
        """In place the nearest of the grid to values within its limits. Whole numbers, half to even, by a sum that has
        no more digits: torch's round wakes all threads for some thousand values, and every column calls this."""
        if self.floats is None:
            whole = ROUNDING_OFFSETS[x.dtype]
            return x.add_(whole).sub_(whole)
        return x.copy_(round_to_float(x.to(torch.float32), self.floats))

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest codes; of a pair that is too large both give way."""
        codes = self.round_(x.clamp(*self.within))
        for row in () if self.partners is None else self.partners:
            other = codes[..., row]
            is_pair = (row != torch.arange(len(row))) & (codes.sign() == other.sign())
            excess = torch.where(is_pair, (codes.abs() + other.abs() - MAX_PAIR_SUM).clamp(min=0), 0)
            first = row > torch.arange(len(row))
            codes = codes - codes.sign() * torch.where(first, (excess / 2).ceil(), (excess / 2).floor())
        return codes

    @cached_property
    def within(self) -> LowHigh:
        """The low and the high: as numbers where they are one for all, which is five times as fast to clamp to."""
        is_one = self.low.numel() == self.high.numel() == 1
        return (float(self.low), float(self.high)) if is_one else (self.low, self.high)

    def ends(self, size: int) -> Sequence[LowHigh]:
        """The low and the high of each column, as numbers or (groups, outputs), whatever the partners are."""
        if isinstance(self.within[0], float):
            return [self.within] * size
        lows, highs = (_split_columns(each, size) for each in (self.low, self.high))
        return list(zip(lows, highs, strict=True))

    def limits(self, codes: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Between what a code may be, given the others."""
        low, high = (
            each[..., min(column, each.shape[-1] - 1)] for each in map(torch.atleast_1d, (self.low, self.high))
        )
        for row in () if self.partners is None else self.partners:
            if int(row[column]) != column:
                other = codes[..., int(row[column])]
                high = torch.minimum(high, MAX_PAIR_SUM - other.clamp(min=0))
                low = torch.maximum(low, -MAX_PAIR_SUM - other.clamp(max=0))
        return low, high


def _split_columns(values: Tensor, size: int) -> tuple[Tensor, ...]:
    wide = values if values.ndim else values.reshape(1, 1, 1)
    return wide.expand(-1, -1, size).unbind(-1)


@dataclass(frozen=True)
class Problem:
    """What a step may know. `fit` is what it solves on, `judge` the held-out rows. Outputs do not depend on each other:
    ranks may share those of a layer, and what is decided by a sum over outputs is decided by `added`."""

    name: str
    weight: Tensor
    codes: CodeGrid
    fit: Moments
    judge: Moments
    has_own_scales: bool  # whether every output has scales of its own, which may change
    has_intercept: bool
    ridge: Ridge = "auto"
    notes: dict[str, Any] = field(default_factory=dict)  # what a step did, for the report
    is_part: bool = False  # the other outputs are with other ranks
    _near: dict[int, ErrorAroundWeight] = field(default_factory=dict)

    def of(self, outputs: slice) -> "Problem":
        """Some of the outputs, where other ranks have the others."""
        fit = self.fit.of(outputs)
        judge = fit if self.judge is self.fit else self.judge.of(outputs)
        weight, codes = self.weight[:, outputs], self.codes.of(outputs)
        return replace(self, weight=weight, codes=codes, fit=fit, judge=judge, is_part=True, _near={})

    def added(self, *sums: float) -> list[float]:
        """Sums over outputs: over all of them, also those of other ranks."""
        if not self.is_part:
            return list(sums)
        parts = distributed.gather_values(f"solving {self.name}", sums)
        return [sum(values) for values in zip(*parts, strict=True)]

    def near(self, moments: Moments) -> ErrorAroundWeight:
        """Errors of values near the float weight, what they share made once."""
        if id(moments) not in self._near:
            self._near[id(moments)] = moments.near(self.weight)
        return self._near[id(moments)]

    def nearest(self, target: Tensor, scale: Tensor) -> Tensor:
        return self.codes.nearest(target / expand_scale(scale, target.shape[-1])).to(torch.float32)

    def error(self, solution: Solution, moments: Moments | None = None, outputs: slice = slice(None)) -> float:
        """The squared error of the outputs, or of some, on held-out rows, over their energy; a bias takes up what the
        means of the fitted rows lack."""
        seen, apart = self.judge if moments is None else moments, 0.0
        for part in split_outputs(outputs, self.weight.shape[1]):
            values = solution.of(part).values
            mismatch = seen.of(part).mismatch(values)
            if self.has_intercept:
                mismatch = mismatch - self.fit.of(part).mismatch(values)
            apart += float((self.near(seen).error(values, part) + mismatch.square()).sum())
        apart, whole = self.added(apart, float(seen.wanted[:, outputs].sum()))
        return apart / whole if whole > 0 else 0.0

    @property
    def some(self) -> slice:
        """Outputs that are enough to tell by, where all would take long."""
        return slice(None, None, max(1, -(-self.weight.shape[1] // MAX_SAMPLED_OUTPUTS)))

    def damped(self, least: float = 0.01) -> Tensor:
        """H with a diagonal that grows with unknowns per row: rounding, too, fits noise when rows are few. In float32,
        which is enough for a matrix so far from singular."""
        return with_ridge(float32_covariance(self.fit), least + self.fit.size / max(self.fit.count, 1))


def with_ridge(hessian: Tensor, share: float) -> Tensor:
    """H with a share of its mean diagonal added to the diagonal."""
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    found = hessian.clone()
    found.diagonal(dim1=-2, dim2=-1).add_(share * mean[:, None])
    return found


def expand_scale(scale: Tensor, size: int) -> Tensor:
    """One value an element from one value a block."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(size // scale.shape[-1], -1)


@dataclass(frozen=True)
class GroupedLayer:
    """Between a layer and the (groups, outputs, n) of its problem."""

    layer: QuantizedLayer
    geometry: Geometry

    def weight(self) -> Tensor:
        weight, _ = self.layer.fold_norm()
        return self.geometry.by_group(self.layer.to_output_first(weight).detach().to(torch.float64))

    @property
    def size(self) -> tuple[int, int, int]:
        """Groups, outputs of each, unknowns of an output."""
        found = self.geometry.by_group(self.layer.to_output_first(self.layer.weight))
        return found.shape[0], found.shape[1], found.shape[2]

    def start(self, weight: Tensor) -> Solution:
        """What is deployed now."""
        codes = self.layer.get_deployed().codes
        scale = self._by_group(self.layer.weight_quant.broadcast_qparams(codes).scale.to(torch.float64), codes)
        centred = self.geometry.by_group(codes.to(torch.float32)) - self._zero().to(torch.float32)
        return Solution(weight, centred, scale)

    def codes(self) -> CodeGrid:
        """What centred codes may be."""
        quant, zero = self.layer.weight_quant, self._zero()
        fmt = quant.quantizer.grid.format
        is_paired = RangeCalculatorBase.key_of(quant.spec.range_calculator_cls) == "pair_safe"
        partners = self._partners() if is_paired else None
        low, high = quant.spec.quant_min - zero, quant.spec.quant_max - zero
        if quant.mask is not None:  # what was pruned stays zero
            kept = self.geometry.by_group(quant.mask)
            low, high = (torch.where(kept, end, 0.0) for end in (low, high))
        return CodeGrid(low, high, fmt if fmt.is_float else None, partners)

    def _partners(self) -> Tensor:
        """The columns whose products the kernel adds in pairs: neighbours along (positions, channels), and within each
        position where channels are odd."""
        channels = int(self.layer.get_deployed().codes.shape[1])
        size = self.size[2]
        positions = size // channels
        along = torch.arange(size).view(channels, positions).T.reshape(-1)  # as the kernel has them
        rows = [_pair_neighbours(along)]
        if channels % 2 and positions > 1:
            rows.append(torch.cat([_pair_neighbours(part) for part in along.view(positions, channels)]))
        orders = [along] * len(rows)
        return torch.stack([torch.empty_like(row).scatter_(0, by, row) for by, row in zip(orders, rows, strict=True)])

    def _zero(self) -> Tensor:
        """The zero point of every code; it stays as it is."""
        codes = self.layer.get_deployed().codes
        zero = self.layer.weight_quant.broadcast_qparams(codes).zero_point
        size = self.geometry.by_group(codes).shape[-1]
        if zero is None or bool((zero == zero.flatten()[0]).all()):
            first = 0 if zero is None else zero.flatten()[0]
            return torch.as_tensor(first, dtype=torch.float64).reshape(1, 1, 1)
        return expand_scale(self._by_group(zero.to(torch.float64), codes), size)

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
        spec = self.layer.weight_quant.spec
        granularity = self.layer.weight_quant.calculator.granularity
        is_shared = self.geometry.kind == "conv_transpose" and self.geometry.groups > 1
        is_free = spec.scale_dtype is None or spec.scale_dtype == torch.float32
        return isinstance(granularity, PerChannelGranularity | PerBlockGranularity) and not is_shared and is_free

    def apply(self, solution: Solution) -> None:
        """Make a solution what the layer deploys; an output whose bias would not fit stays as it is."""
        quant = self.layer.weight_quant
        codes, solution = self.layer.get_deployed().codes, self._fitting(solution)
        stored = self.geometry.as_stored((solution.codes + self._zero()).to(torch.float32), codes)
        scale = None
        if self.has_own_scales:
            own = quant.broadcast_qparams(codes).scale
            scale = QParams(solution.scale.reshape(own.shape).to(torch.float32))
        self.layer.set_codes(stored, scale)

    def _fitting(self, solution: Solution) -> Solution:
        """Scales below what keeps a bias within int32 go back, with their codes."""
        least = self.layer.min_scale()
        if least is None or not self.has_own_scales or least.numel() != solution.scale.numel():
            return solution
        floor = least.detach().to(solution.scale.dtype).reshape(solution.scale.shape)
        start = self.start(solution.target)
        is_low = (solution.scale < floor) & (solution.scale < start.scale)
        codes = torch.where(is_low, start.codes.to(solution.codes.dtype), solution.codes)
        return Solution(solution.target, codes, torch.where(is_low, start.scale.to(floor.dtype), solution.scale))


def _pair_neighbours(columns: Tensor) -> Tensor:
    """For each of a line of columns the one it is paired with; the last of an odd line with itself."""
    count = len(columns) // 2 * 2
    pairs = columns[:count].view(-1, 2).flip(1).reshape(-1)
    return torch.cat([pairs, columns[count:]])


def format_notes(notes: Mapping[str, Any]) -> str:
    said = ((name, f"{value:.3g}" if isinstance(value, float) else str(value)) for name, value in notes.items())
    return ", ".join(f"{name} {value}" for name, value in said)
