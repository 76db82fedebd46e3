"""A quantized layer of the model in the shape of the solver: (groups, outputs, n), with n the inputs of one output.

    layer --weight, current_solution, code_grid--> solver --apply--> layer

Codes are passed to the solver without their zero points, so that values are codes times scales. The codes of a palette
are passed as their values, entries of the tables, with scales of 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import (
    PaletteQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerGroupedChannelGranularity,
    RangeCalculatorBase,
)
from scalepoint.spec.palette import is_palette
from scalepoint.tuning.code_grids import CodeGrid, PaletteGrid
from scalepoint.tuning.problem import Solution, expand_scale
from scalepoint.tuning.rows import Geometry


@dataclass(frozen=True)
class GroupedLayer:
    """A quantized layer, and its geometry, which defines the groups and n."""

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
        zero_points = self._zero_points().to(torch.float32)
        return Solution(weight, self.geometry.to_groups(codes.to(torch.float32)) - zero_points, scale)

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

    def output_rows(self, value: Any, count: int) -> Tensor | None:
        """Return the `count` rows of a value with the shape of the layer's output; None for any other value."""
        return self.geometry.output_rows(value, count, self.size[1]) if isinstance(value, Tensor) else None

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

    def _find_partners(self) -> Tensor:
        """Return the columns whose products the kernel adds in pairs.

        The kernel orders products by (position, channel). Neighbours in this order are paired; if the number of
        channels is odd, a kernel may also pair within each position, so both pairings are respected.
        """
        channels = int(self.layer.get_deployed().codes.shape[1])
        size = self.size[2]
        positions = size // channels
        kernel_order = torch.arange(size).view(channels, positions).T.reshape(-1)  # columns in the order of the kernel
        pairings = [_pair_neighbours(kernel_order)]
        if channels % 2 and positions > 1:
            pairings.append(torch.cat([_pair_neighbours(part) for part in kernel_order.view(positions, channels)]))
        # Each pairing lists partners in the order of the kernel: put them in the order of the columns.
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

    def _make_palette_grid(self) -> PaletteGrid:
        quant, (groups, outputs, _) = self.layer.weight_quant, self.size
        granularity = quant.calculator.granularity
        assert isinstance(granularity, PerGroupedChannelGranularity)  # noqa: S101  # the only one of a palette
        assert isinstance(quant.calculator, PaletteQParamsCalculator)  # noqa: S101
        tables = quant.scale.detach().to(torch.float32)
        tables = tables if tables.ndim == 3 else tables[..., None]
        dim = tables.shape[-1]
        first_channels = torch.arange(outputs // dim) * dim  # of each vector of outputs, within its group
        # All groups of a transposed convolution share the channels of an output.
        channels_per_group = 0 if self.geometry.kind == "conv_transpose" else outputs
        first_channels = torch.arange(groups)[:, None] * channels_per_group + first_channels
        codes_shape = self.layer.get_deployed().codes.shape
        _, table_count = granularity.count_groups(codes_shape)
        channels_per_table = codes_shape[granularity.axis or 0] // table_count
        infinity = torch.tensor(torch.inf, dtype=torch.float64)
        return PaletteGrid(
            low=-infinity,
            high=infinity,
            tables=tables,
            table_index=first_channels // channels_per_table,
            round_tables=quant.calculator.round_tables,
        )

    def _apply_palette(self, solution: Solution) -> None:
        """Set the tables of a solution, and the index of each code."""
        codes = self.layer.get_deployed().codes
        grid = self._make_palette_grid()
        if solution.tables is not None:
            grid = grid.with_tables(solution.tables)
        index = grid.find_indices(solution.codes.to(torch.float32)).repeat_interleave(grid.dim, 1)
        stored = self.geometry.from_groups(index.to(torch.float32), codes)
        self.layer.set_codes(stored, QParams(grid.tables if grid.dim > 1 else grid.tables[..., 0]))


def _pair_neighbours(columns: Tensor) -> Tensor:
    """Swap neighbours: 0 1 2 3 4 becomes 1 0 3 2 4. The last of an odd number is its own partner."""
    paired_count = len(columns) // 2 * 2
    pairs = columns[:paired_count].view(-1, 2).flip(1).reshape(-1)
    return torch.cat([pairs, columns[paired_count:]])
