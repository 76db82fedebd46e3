"""One layer to be solved: its weight in groups, the grid of its codes, its moments; and a solution.

Weights, targets and codes have the shape (groups, outputs, n), with n the inputs of one output. `GroupedLayer`
translates between a layer of the model and this shape. A column is one of the n inputs; a step of the solver changes
target, codes or scales; pairs of columns ("partners") are those whose products a kernel adds in 16 bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.errors import UsageError
from scalepoint.numerics import Format, QParams, round_to_float
from scalepoint.numerics.palette import make_tables, make_vector_tables
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import (
    PaletteQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerGroupedChannelGranularity,
    RangeCalculatorBase,
)
from scalepoint.spec.pair_safe import MAX_PAIR_SUM
from scalepoint.spec.palette import is_palette
from scalepoint.tuning.moments import ErrorAroundWeight, Moments, float32_hessian, split_outputs
from scalepoint.tuning.rows import Geometry

Ridge = float | str  # a share of the mean diagonal, or "auto": chosen on held-out rows
MAX_SAMPLED_OUTPUTS = 128  # outputs on which steps compare settings
VECTOR_COLUMNS = 64  # columns of vector palettes that are rounded at once
# x + offset - offset rounds x to a whole number: near the offset a float has no fraction bits. As tensors, because a
# Python number is converted at every call.
ROUNDING_OFFSETS = {
    dtype: torch.tensor(1.5 * 2.0**bits, dtype=dtype) for dtype, bits in ((torch.float32, 23), (torch.float64, 52))
}
LowHigh = tuple[Any, Any]  # smallest and largest code: numbers or tensors


@dataclass(frozen=True)
class Solution:
    """Codes and scales of a layer, and the target weight that they approximate.

    Attributes:
        target: The weight to approximate, (groups, outputs, n).
        codes: Codes minus their zero point, (groups, outputs, n), in float32, which represents all of them exactly.
        scale: (groups, outputs, blocks).
        tables: Tables of a palette, if they are not those of the problem. Codes are then entries of the tables.
    """

    target: Tensor
    codes: Tensor
    scale: Tensor
    tables: Tensor | None = None

    @property
    def scale_per_code(self) -> Tensor:
        return expand_scale(self.scale, self.codes.shape[-1])

    @property
    def values(self) -> Tensor:
        return self.codes * self.scale_per_code

    def select_outputs(self, outputs: slice) -> "Solution":
        return Solution(self.target[:, outputs], self.codes[:, outputs], self.scale[:, outputs])


@dataclass(frozen=True)
class CodeGrid:
    """The values that codes may have: whole numbers between `low` and `high`, or values of a float format.

    Attributes:
        low, high: Limits; they broadcast to (groups, outputs, n).
        float_format: The format, if codes are floats.
        partners: (pairings, n): the column that each column is paired with; a column without one is its own partner.
            The kernel adds the products of a pair in 16 bits, so the sum of two codes of one sign is limited.
    """

    low: Tensor
    high: Tensor
    float_format: Format | None = None
    partners: Tensor | None = None

    def with_tables(self, tables: Tensor) -> "CodeGrid":
        """Return this grid with other tables. Only palettes have tables."""
        raise UsageError("a solution with tables is for a palette")

    def select_outputs(self, outputs: slice) -> "CodeGrid":
        low, high = (limit if limit.shape[1] == 1 else limit[:, outputs] for limit in (self.low, self.high))
        return replace(self, low=low, high=high)

    def round_(self, x: Tensor) -> Tensor:
        """Round values within the limits to the grid, in place; whole numbers round half to even."""
        if self.float_format is None:
            # torch.round wakes all threads even for some thousand values, and the steps call this for every column.
            offset = ROUNDING_OFFSETS[x.dtype]
            return x.add_(offset).sub_(offset)
        return x.copy_(round_to_float(x.to(torch.float32), self.float_format))

    def nearest_codes(self, x: Tensor) -> Tensor:
        """Return the nearest codes. If the sum of a pair is too large, both move towards zero by half of the excess."""
        codes = self.round_(x.clamp(*self.limits))
        for partner in self.pairings:
            partner_codes = codes[..., partner]
            columns = torch.arange(len(partner))
            is_pair = (partner != columns) & (codes.sign() == partner_codes.sign())
            excess = torch.where(is_pair, (codes.abs() + partner_codes.abs() - MAX_PAIR_SUM).clamp(min=0), 0)
            # If the excess is odd, the first of the two columns takes the larger half.
            is_first = partner > columns
            codes = codes - codes.sign() * torch.where(is_first, (excess / 2).ceil(), (excess / 2).floor())
        return codes

    @property
    def pairings(self) -> Sequence[Tensor]:
        """The rows of `partners`; empty if pairs are not limited."""
        return () if self.partners is None else self.partners.unbind()

    @cached_property
    def limits(self) -> LowHigh:
        """Low and high: as numbers if all codes have the same, because clamping to numbers is five times as fast."""
        is_uniform = self.low.numel() == self.high.numel() == 1
        return (float(self.low), float(self.high)) if is_uniform else (self.low, self.high)

    def column_limits(self, size: int) -> Sequence[LowHigh]:
        """Return low and high of each of `size` columns, as numbers or (groups, outputs). Partners are ignored."""
        if isinstance(self.limits[0], float):  # one limit for all codes
            return [self.limits] * size
        lows, highs = (_split_columns(limit, size) for limit in (self.low, self.high))
        return list(zip(lows, highs, strict=True))

    def paired_limits(self, codes: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Return low and high of a column, given the codes of its partners."""
        low, high = _select_column(self.low, column), _select_column(self.high, column)
        for partner in self.pairings:
            partner_column = int(partner[column])
            if partner_column != column:
                partner_codes = codes[..., partner_column]
                high = torch.minimum(high, MAX_PAIR_SUM - partner_codes.clamp(min=0))
                low = torch.maximum(low, -MAX_PAIR_SUM - partner_codes.clamp(max=0))
        return low, high


def _select_column(limit: Tensor, column: int) -> Tensor:
    """Return a limit of one column. A limit that is one number, or has one column, is that of all columns."""
    if not limit.ndim:
        return limit
    return limit[..., 0] if limit.shape[-1] == 1 else limit[..., column]


def _split_columns(values: Tensor, size: int) -> tuple[Tensor, ...]:
    values = values if values.ndim else values.reshape(1, 1, 1)
    return values.expand(-1, -1, size).unbind(-1)


def _to_output_vectors(x: Tensor, dim: int) -> Tensor:
    """Arrange (groups, outputs, n) as (groups, outputs / dim, dim, n), in float32."""
    return x.to(torch.float32).reshape(x.shape[0], -1, dim, x.shape[-1])


def _keep(tables: Tensor) -> Tensor:
    return tables


@dataclass(frozen=True)
class PaletteGrid(CodeGrid):
    """Codes of a palette: entries of tables. `dim` neighbouring outputs share an index, so they are rounded together.

    Attributes:
        tables: (tables, entries, dim), in float32; ascending if dim is 1.
        table_index: The table of each vector of outputs, (groups, outputs / dim).
        round_tables: Rounds tables to what a file can store.
    """

    tables: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1))
    table_index: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))
    round_tables: Callable[[Tensor], Tensor] = _keep

    @property
    def dim(self) -> int:
        return self.tables.shape[-1]

    @cached_property
    def _output_tables(self) -> Tensor:
        """The table of each vector of outputs: (groups, outputs / dim, entries, dim)."""
        return self.tables[self.table_index]

    @cached_property
    def _midpoints(self) -> Tensor:
        tables = self._output_tables[..., 0]
        return ((tables[..., 1:] + tables[..., :-1]) / 2).contiguous()

    def with_tables(self, tables: Tensor) -> "PaletteGrid":
        return replace(self, tables=tables)

    def find_indices(self, x: Tensor) -> Tensor:
        """Return the index of the nearest entry: (groups, outputs / dim, n) for values (groups, outputs, n)."""
        if self.dim == 1:
            return torch.searchsorted(self._midpoints, x.to(torch.float32).contiguous())
        vectors = _to_output_vectors(x, self.dim)
        squares = self._output_tables.square().sum(-1)[..., None]
        parts = [
            (squares - 2 * (self._output_tables @ part)).argmin(2) for part in torch.split(vectors, VECTOR_COLUMNS, -1)
        ]
        return torch.cat(parts, -1)

    def look_up(self, index: Tensor) -> Tensor:
        """Return the entries (groups, outputs, n) of indices (groups, outputs / dim, n)."""
        shape = (*index.shape, self.dim)
        entries = self._output_tables.gather(2, index[..., None].expand(shape))
        return entries.transpose(-1, -2).flatten(1, 2)

    def round_(self, x: Tensor) -> Tensor:
        columns = x[..., None] if x.ndim == 2 else x  # one column, or all of them
        return x.copy_(self.look_up(self.find_indices(columns)).reshape(x.shape))

    def make_tables(self, target: Tensor, weights: Tensor) -> Tensor:
        """Return the tables of k-means, with these importances of the values of `target` (groups, outputs, n)."""
        count, entries, dim = self.tables.shape
        by_vector = [_to_output_vectors(part, dim) for part in (target, weights.expand_as(target))]
        tables = []
        for table in range(count):
            is_member = self.table_index == table
            values, importance = (part[is_member].mT.reshape(1, -1, dim) for part in by_vector)
            if dim == 1:
                tables.append(make_tables(values[..., 0], entries, importance[..., 0])[..., None])
            else:
                tables.append(make_vector_tables(values, entries, importance))
        return self.round_tables(torch.cat(tables))


@dataclass(frozen=True)
class LayerProblem:
    """One layer as the steps of the solver see it.

    Outputs do not depend on each other, so ranks may share the outputs of a layer. A step that decides something for
    all outputs must compare sums that went through `sum_over_ranks`, or ranks would decide differently.

    Attributes:
        name: Name of the layer.
        weight: The float weight, (groups, outputs, n).
        grid: The values that codes may have.
        fit: Moments of the fitted rows.
        holdout: Moments of the rows on which solutions are compared; `fit` itself if there are too few rows to split.
        can_change_scales: Whether every output has its own scales, and these may change.
        has_intercept: Whether a shift of the bias will correct a mismatch of the means.
        ridge: Regularization of the target.
        notes: Texts and numbers of the steps for the report, by name.
        is_part: Whether other ranks solve the other outputs.
    """

    name: str
    weight: Tensor
    grid: CodeGrid
    fit: Moments
    holdout: Moments
    can_change_scales: bool
    has_intercept: bool
    ridge: Ridge = "auto"
    notes: dict[str, Any] = field(default_factory=dict)
    is_part: bool = False
    _errors: dict[int, ErrorAroundWeight] = field(default_factory=dict)  # by id of the moments

    def select_outputs(self, outputs: slice) -> "LayerProblem":
        """Return the problem of this rank, if other ranks solve the other outputs."""
        fit = self.fit.select_outputs(outputs)
        return replace(
            self,
            weight=self.weight[:, outputs],
            grid=self.grid.select_outputs(outputs),
            fit=fit,
            holdout=fit if self.holdout is self.fit else self.holdout.select_outputs(outputs),
            is_part=True,
            _errors={},
        )

    def sum_over_ranks(self, *sums: float) -> list[float]:
        """Add up sums over outputs, including the outputs of other ranks."""
        if not self.is_part:
            return list(sums)
        parts = distributed.gather_values(f"solving {self.name}", sums)
        return [sum(values) for values in zip(*parts, strict=True)]

    def error_around_weight(self, moments: Moments) -> ErrorAroundWeight:
        """Return the errors of values near the float weight, prepared once per moments."""
        if id(moments) not in self._errors:
            self._errors[id(moments)] = ErrorAroundWeight(moments, self.weight)
        return self._errors[id(moments)]

    def nearest_codes(self, target: Tensor, scale: Tensor, tables: Tensor | None = None) -> Tensor:
        grid = self.get_grid(tables)
        return grid.nearest_codes(target / expand_scale(scale, target.shape[-1])).to(torch.float32)

    def get_grid(self, tables: Tensor | None) -> CodeGrid:
        """Return the grid, with the tables of a solution."""
        return self.grid if tables is None else self.grid.with_tables(tables)

    def error(self, solution: Solution, moments: Moments | None = None, outputs: slice = slice(None)) -> float:
        """Return the squared error of the outputs over the variance of their targets.

        Args:
            solution: The codes and scales.
            moments: The rows to measure on; the held-out rows if None.
            outputs: Measure only these outputs.
        """
        moments = self.holdout if moments is None else moments
        squared_error = 0.0
        # Part by part, because the values of all outputs in float64 would take much memory.
        for part in split_outputs(outputs, self.weight.shape[1]):
            values = solution.select_outputs(part).values
            mismatch = moments.select_outputs(part).mean_mismatch(values)
            if self.has_intercept:  # the bias will be fitted on the fitted rows, not on those measured here
                mismatch = mismatch - self.fit.select_outputs(part).mean_mismatch(values)
            squared_error += float((self.error_around_weight(moments).error(values, part) + mismatch.square()).sum())
        variance = float(moments.target_variance[:, outputs].sum())
        squared_error, variance = self.sum_over_ranks(squared_error, variance)
        return squared_error / variance if variance > 0 else 0.0

    @property
    def sampled_outputs(self) -> slice:
        """Evenly spaced outputs on which to compare settings, because all outputs would take long."""
        return slice(None, None, max(1, -(-self.weight.shape[1] // MAX_SAMPLED_OUTPUTS)))

    def damped_hessian(self, min_share: float = 0.01) -> Tensor:
        """Return H with a raised diagonal, in float32.

        The damping grows with unknowns per row: with few rows, rounding fits noise too. With it H is so far from
        singular that float32 is enough.
        """
        return with_ridge(float32_hessian(self.fit), min_share + self.fit.size / max(self.fit.count, 1))


def with_ridge(hessian: Tensor, share: float) -> Tensor:
    """Return a copy of H with a share of its mean diagonal added to the diagonal."""
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    damped = hessian.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(share * mean[:, None])
    return damped


def expand_scale(scale: Tensor, size: int) -> Tensor:
    """Repeat one value per block to one value per element."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(size // scale.shape[-1], -1)


@dataclass(frozen=True)
class GroupedLayer:
    """A quantized layer of the model, with its weight, codes and scales as (groups, outputs, n)."""

    layer: QuantizedLayer
    geometry: Geometry

    def weight(self) -> Tensor:
        """Return the float weight in float64, with the batch norm folded in."""
        weight, _ = self.layer.fold_norm()
        return self.geometry.to_groups(self.layer.to_output_first(weight).detach().to(torch.float64))

    @property
    def size(self) -> tuple[int, int, int]:
        """Groups, outputs per group, unknowns per output."""
        weight = self.geometry.to_groups(self.layer.to_output_first(self.layer.weight))
        return weight.shape[0], weight.shape[1], weight.shape[2]

    def current_solution(self, weight: Tensor) -> Solution:
        """Return the codes and scales that the layer has now, as a solution for `weight`."""
        codes = self.layer.get_deployed().codes
        if is_palette(self.layer.weight_quant.spec):
            values = self.geometry.to_groups(self.layer.weight_quant.values(codes))
            return Solution(weight, values, torch.ones_like(weight[..., :1]))
        scale = self._group_parameter(self.layer.weight_quant.broadcast_qparams(codes).scale.to(torch.float64), codes)
        # Steps work on codes minus zero points, so that values are codes times scales.
        centred = self.geometry.to_groups(codes.to(torch.float32)) - self._zero_points().to(torch.float32)
        return Solution(weight, centred, scale)

    def code_grid(self) -> CodeGrid:
        """Return the values that codes minus their zero points may have; only zero for pruned weights."""
        if is_palette(self.layer.weight_quant.spec):
            return self._make_palette_grid()
        quant, zero_points = self.layer.weight_quant, self._zero_points()
        code_format = quant.quantizer.grid.format
        is_pair_safe = RangeCalculatorBase.key_of(quant.spec.range_calculator_cls) == "pair_safe"
        low, high = quant.spec.quant_min - zero_points, quant.spec.quant_max - zero_points
        if quant.mask is not None:  # pruned weights stay zero
            mask = self.geometry.to_groups(quant.mask)
            low, high = (torch.where(mask, limit, 0.0) for limit in (low, high))
        return CodeGrid(
            low,
            high,
            float_format=code_format if code_format.is_float else None,
            partners=self._find_partners() if is_pair_safe else None,
        )

    def _make_palette_grid(self) -> PaletteGrid:
        quant, (groups, outputs, _) = self.layer.weight_quant, self.size
        granularity = quant.calculator.granularity
        assert isinstance(granularity, PerGroupedChannelGranularity)  # noqa: S101  # the only one of a palette
        assert isinstance(quant.calculator, PaletteQParamsCalculator)  # noqa: S101
        tables = quant.scale.detach().to(torch.float32)
        tables = tables if tables.ndim == 3 else tables[..., None]
        dim = tables.shape[-1]
        channels = torch.arange(outputs // dim) * dim
        # All groups of a transposed convolution share the channels of an output.
        first = torch.arange(groups)[:, None] * (0 if self.geometry.kind == "conv_transpose" else outputs)
        codes_shape = self.layer.get_deployed().codes.shape
        _, table_count = granularity.count_groups(codes_shape)
        per_table = codes_shape[granularity.axis or 0] // table_count
        infinity = torch.tensor(torch.inf, dtype=torch.float64)
        return PaletteGrid(
            -infinity, infinity, tables=tables, table_index=(first + channels) // per_table,
            round_tables=quant.calculator.round_tables,
        )  # fmt: skip

    def _apply_palette(self, solution: Solution) -> None:
        """Set the tables of a solution, and the index of each code."""
        codes = self.layer.get_deployed().codes
        grid = self._make_palette_grid()
        if solution.tables is not None:
            grid = grid.with_tables(solution.tables)
        index = grid.find_indices(solution.codes.to(torch.float32)).repeat_interleave(grid.dim, 1)
        stored = self.geometry.from_groups(index.to(torch.float32), codes)
        self.layer.set_codes(stored, QParams(grid.tables if grid.dim > 1 else grid.tables[..., 0]))

    def _find_partners(self) -> Tensor:
        """Return the columns whose products the kernel adds in pairs.

        The kernel orders products by (position, channel). Neighbours in this order are paired; if the number of
        channels is odd, a kernel may also pair within each position, so both pairings are respected.
        """
        channels = int(self.layer.get_deployed().codes.shape[1])
        size = self.size[2]
        positions = size // channels
        kernel_order = torch.arange(size).view(channels, positions).T.reshape(-1)
        pairings = [_pair_neighbours(kernel_order)]
        if channels % 2 and positions > 1:
            pairings.append(torch.cat([_pair_neighbours(part) for part in kernel_order.view(positions, channels)]))
        return torch.stack([torch.empty_like(partner).scatter_(0, kernel_order, partner) for partner in pairings])

    def _zero_points(self) -> Tensor:
        """Return the zero point of every code, as one value if all are the same. Steps never change it."""
        codes = self.layer.get_deployed().codes
        zero_point = self.layer.weight_quant.broadcast_qparams(codes).zero_point
        size = self.geometry.to_groups(codes).shape[-1]
        # If all zero points are equal, the limits of all codes are two numbers, which makes clamping much faster.
        if zero_point is None or bool((zero_point == zero_point.flatten()[0]).all()):
            common_value = 0 if zero_point is None else zero_point.flatten()[0]
            return torch.as_tensor(common_value, dtype=torch.float64).reshape(1, 1, 1)
        return expand_scale(self._group_parameter(zero_point.to(torch.float64), codes), size)

    def _group_parameter(self, value: Tensor, codes: Tensor) -> Tensor:
        """Return a scale or zero point as (groups, outputs, blocks)."""
        granularity = self.layer.weight_quant.calculator.granularity
        groups, outputs = self.geometry.to_groups(codes).shape[:2]
        if isinstance(granularity, PerBlockGranularity):
            return value.reshape(groups, outputs, -1)
        if isinstance(granularity, PerChannelGranularity) and self.geometry.kind == "conv_transpose":
            return value.reshape(1, outputs, 1).expand(groups, -1, -1)  # all groups share the scales
        if value.numel() > 1:
            return value.reshape(groups, outputs, 1)
        return value.reshape(1, 1, 1).expand(groups, outputs, 1)

    @property
    def can_change_scales(self) -> bool:
        """Whether every output has its own scales, stored in float32."""
        spec = self.layer.weight_quant.spec
        granularity = self.layer.weight_quant.calculator.granularity
        groups_share_scales = self.geometry.kind == "conv_transpose" and self.geometry.groups > 1
        is_float32 = spec.scale_dtype is None or spec.scale_dtype == torch.float32
        is_fine = isinstance(granularity, PerChannelGranularity | PerBlockGranularity)
        return is_fine and not groups_share_scales and is_float32

    def apply(self, solution: Solution) -> None:
        """Set codes and scales of a solution in the layer, except for outputs whose int32 bias would overflow."""
        if is_palette(self.layer.weight_quant.spec):
            self._apply_palette(solution)
            return
        quant, codes = self.layer.weight_quant, self.layer.get_deployed().codes
        solution = self._revert_small_scales(solution)
        stored = self.geometry.from_groups((solution.codes + self._zero_points()).to(torch.float32), codes)
        scale = None  # keep the present scales
        if self.can_change_scales:
            shape = quant.broadcast_qparams(codes).scale.shape
            scale = QParams(solution.scale.reshape(shape).to(torch.float32))
        self.layer.set_codes(stored, scale)

    def _revert_small_scales(self, solution: Solution) -> Solution:
        """Take the present codes and scale where the new scale is so small that the int32 bias would overflow."""
        least_scale = self.layer.compute_min_scale()
        if least_scale is None or not self.can_change_scales or least_scale.numel() != solution.scale.numel():
            return solution
        floor = least_scale.detach().to(solution.scale.dtype).reshape(solution.scale.shape)
        current = self.current_solution(solution.target)
        is_low = (solution.scale < floor) & (solution.scale < current.scale)
        codes = torch.where(is_low, current.codes.to(solution.codes.dtype), solution.codes)
        return Solution(solution.target, codes, torch.where(is_low, current.scale.to(floor.dtype), solution.scale))


def _pair_neighbours(columns: Tensor) -> Tensor:
    """Return the partner of each of a row of columns. The last of an odd number is its own partner."""
    count = len(columns) // 2 * 2
    pairs = columns[:count].view(-1, 2).flip(1).reshape(-1)
    return torch.cat([pairs, columns[count:]])


def format_notes(notes: Mapping[str, Any]) -> str:
    texts = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in notes.items())
    return ", ".join(texts)
