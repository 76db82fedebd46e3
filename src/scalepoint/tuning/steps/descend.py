"""Descent: codes move one by one to where they cost least given all others; then the scales, given the codes.

    q_j <- round(q_j - R_j / (s_j H_jj)),  R = (s q - W*) H            s <- s - <q, R> / <q, q H>

The tables of a palette take the place of the scales: their entries move to the least error given the indices.
Every move lowers tr[(s q - W*) H (s q - W*)'], from any start and for any H. No inverse is needed, so it cannot fail.
Each move is a choice in one dimension, so limits that depend on other codes (pairs) can be respected.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.code_grids import CodeGrid, PaletteGrid
from scalepoint.tuning.problem import LayerProblem, Solution, expand_scale
from scalepoint.tuning.steps.registry import register

MAX_SWEEPS = 2
TABLE_STEPS = 6  # of conjugate gradients
COLUMNS_PER_BLOCK = 32


@register("descend")
def descend(problem: LayerProblem, solution: Solution) -> Solution:
    """Run a few sweeps over the codes; stop when no code moves."""
    cache = problem.fit.cache
    if "damped" not in cache:
        cache["damped"] = problem.damped_hessian()
    state = _Descent(problem, solution, cache["damped"])
    for sweep in range(MAX_SWEEPS):
        (moved,) = problem.sum_over_ranks(state.sweep(is_last=sweep + 1 == MAX_SWEEPS))
        problem.notes["sweeps"] = sweep + 1
        if not moved:
            break
    tables = state.grid.tables if isinstance(state.grid, PaletteGrid) else None
    return Solution(solution.target, state.codes.mT.contiguous(), state.scale.to(torch.float64), tables)


class _Descent:
    """Codes (groups, n, outputs) and R of the formula above, which is kept up to date.

    Codes are transposed, so that a column is contiguous.
    """

    def __init__(self, problem: LayerProblem, solution: Solution, hessian: Tensor) -> None:
        self.hessian, self.scale = hessian, solution.scale.to(torch.float32).clone()
        self.codes = solution.codes.mT.clone(memory_format=torch.contiguous_format)
        grid = problem.get_grid(solution.tables)
        self.grid: CodeGrid = replace(grid, low=grid.low.to(torch.float32), high=grid.high.to(torch.float32))
        self.column_limits = self.grid.column_limits(self.codes.shape[1])
        self.can_change_scales, self.block_count = problem.can_change_scales, self.scale.shape[-1]
        target = solution.target.mT.to(torch.float32)
        scale_per_code = expand_scale(self.scale, self.codes.shape[1]).mT
        self.slope = hessian @ (self.codes * scale_per_code - target)

    def sweep(self, *, is_last: bool) -> int:
        """Move all codes once, then the scales. Returns the number of codes that moved.

        If an output has several scales, each follows right after the codes of its block, and one product updates R for
        both changes.
        """
        size, moved, has_scale_blocks = self.codes.shape[1], 0, self.block_count > 1
        width = size // self.block_count if has_scale_blocks else COLUMNS_PER_BLOCK
        for start in range(0, size, width):
            block = slice(start, min(start + width, size))
            before = self.codes[:, block].clone()
            change = self._move_codes(block)
            moved += int(torch.count_nonzero(before != self.codes[:, block]))
            if has_scale_blocks and self.can_change_scales:
                change = self._move_block_scales(block, change)
            # In the last sweep nothing reads R of finished blocks, except the scales if they come after all codes.
            rows = slice(block.stop if is_last and has_scale_blocks else 0, None)
            self.slope[:, rows].baddbmm_(self.hessian[:, rows, block], change)
        if self.can_change_scales and not has_scale_blocks:
            self._move_output_scales()
        if isinstance(self.grid, PaletteGrid):
            self._move_tables(self.grid)
        return moved

    def _move_codes(self, block: slice) -> Tensor:
        """Move the codes of some columns one by one. Returns the change of their values."""
        codes, slope = self.codes[:, block], self.slope[:, block]
        scale = self.scale[:, :, block.start * self.block_count // self.codes.shape[1]]
        hessian, is_paired = self.hessian[:, block, block], self.grid.partners is not None
        diagonal = hessian.diagonal(dim1=-2, dim2=-1)[..., None]
        step_per_slope = (scale[:, None] * diagonal).clamp_(min=1e-30).reciprocal_()  # 1 / (s_j H_jj)
        changes = (codes * scale[:, None]).neg_()  # minus the old values; the new ones are added below
        # unbind makes the views of all columns at once: indexing every column takes longer than the arithmetic.
        # Slopes and rows of H have one more axis, which baddbmm needs.
        slope_rows, hessian_rows = (tensor.unsqueeze(2).unbind(1) for tensor in (slope, hessian))
        views = (tensor.unbind(1) for tensor in (codes, step_per_slope, changes))
        columns = zip(slope_rows, hessian_rows, *views, self.column_limits[block], strict=True)
        current_slope = torch.empty_like(slope[:, :1])
        for column, (slope_row, hessian_row, code, factor, change, limits) in enumerate(columns):
            # R of this column after the moves of the columns before it in this block
            torch.baddbmm(slope_row, hessian_row[..., :column], changes[:, :column], out=current_slope)
            if is_paired:  # the partner may have moved
                low, high = self.grid.paired_limits(self.codes.mT, block.start + column)
            else:
                low, high = limits
            self.grid.round_(code.addcmul_(current_slope[:, 0], factor, value=-1).clamp_(low, high))
            change.addcmul_(code, scale)
        return changes

    def _move_block_scales(self, block: slice, change: Tensor) -> Tensor:
        """Choose the best scales of a block given its codes. Returns the change of its values by codes and scales."""
        hessian, codes = self.hessian[:, block, block], self.codes[:, block]
        slope = torch.baddbmm(self.slope[:, block], hessian, change)
        scale_index = block.start * self.block_count // self.codes.shape[1]
        scale_change = self._move_scale(scale_index, codes, slope, hessian @ codes)
        return change.addcmul_(codes, scale_change[:, None])

    def _move_output_scales(self) -> None:
        """Choose the best scale of each output given its codes."""
        product = self.hessian @ self.codes
        scale_change = self._move_scale(0, self.codes, self.slope, product)
        self.slope.addcmul_(product, scale_change[:, None])

    def _move_tables(self, grid: PaletteGrid) -> None:
        """Choose the best tables given the index of each code, by a few steps of conjugate gradients.

        The error is quadratic in the entries. Its gradient at an entry is the sum of R over the codes that use it.
        """
        # The position of the entry of each code in the flattened tables, in the order of self.codes.
        entries = grid.table_index[..., None] * grid.tables.shape[1] + grid.find_indices(self.codes.mT)
        positions = entries[:, :, None] * grid.dim + torch.arange(grid.dim)[:, None]
        positions = positions.flatten(1, 2).mT.reshape(-1)
        gradient = self._sum_by_entry(self.slope, positions, grid)
        squared_gradient = float(gradient @ gradient)
        change, direction = torch.zeros_like(gradient), -gradient
        for _ in range(TABLE_STEPS):
            slope_change = self.hessian @ direction[positions].view_as(self.codes)
            gradient_change = self._sum_by_entry(slope_change, positions, grid)
            curvature = float(direction @ gradient_change)
            if squared_gradient <= 0 or curvature <= 0:
                break
            rate = squared_gradient / curvature
            change.add_(direction, alpha=rate)
            gradient.add_(gradient_change, alpha=rate)
            self.slope.add_(slope_change, alpha=rate)
            previous, squared_gradient = squared_gradient, float(gradient @ gradient)
            direction = direction * (squared_gradient / previous) - gradient
        moved = self.codes + change[positions].view_as(self.codes)
        tables = grid.tables + change.view_as(grid.tables)
        tables = grid.round_tables(tables.sort(1).values if grid.dim == 1 else tables)
        self.grid = grid.with_tables(tables)
        # Rounding the tables moves the codes again; each takes the nearest entry, which may be another one.
        rounded = self.grid.nearest_codes(moved.mT).mT
        self.slope.add_(self.hessian @ (rounded - moved))
        self.codes.copy_(rounded)

    def _sum_by_entry(self, values: Tensor, positions: Tensor, grid: PaletteGrid) -> Tensor:
        """Add up values (groups, n, outputs) over the codes of each entry of each table."""
        return torch.zeros(grid.tables.numel()).index_add_(0, positions, values.reshape(-1))

    def _move_scale(self, index: int, codes: Tensor, slope: Tensor, product: Tensor) -> Tensor:
        """Set one scale of all outputs to the best value. Returns the change.

        Args:
            index: Number of the block of the scale.
            codes: The codes of the block.
            slope: R of the block.
            product: H times the codes.
        """
        curve, before = (codes * product).sum(1), self.scale[..., index]
        change = torch.where(curve > 0, -(codes * slope).sum(1) / curve.clamp(min=1e-30), 0.0)
        change = torch.where(before + change > 0.1 * before, change, 0.0)  # a scale stays positive
        self.scale[..., index] = before + change
        return change
