"""Scale: searches for every output (and block) the scale with which the nearest codes cost the outputs least.

    s = argmin over factors of the calibrated scale of  sum_j H_jj (w_j - s q_j)^2,   q_j the nearest code

The diagonal of H says how much an input matters. Without it, the search would clip weights that carry the signal.
The tables of a palette are chosen by k-means with these weights.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.code_grids import CodeGrid, PaletteGrid
from scalepoint.tuning.problem import LayerProblem, Solution
from scalepoint.tuning.steps.registry import register

COARSE_FACTORS = tuple(1.05 - 0.05 * step for step in range(14))  # 1.05 .. 0.4 of the calibrated scale
FINE_STEP = 0.025


@register("scale")
def scale(problem: LayerProblem, solution: Solution) -> Solution:
    """Choose the scales, or the tables of a palette, and the nearest codes."""
    importance = problem.fit.hessian.diagonal(dim1=-2, dim2=-1).clamp(min=0)[:, None, :].to(torch.float32)
    if isinstance(problem.grid, PaletteGrid):
        tables = problem.grid.make_tables(solution.target, importance)
        codes = problem.nearest_codes(solution.target, solution.scale, tables)
        return Solution(solution.target, codes, solution.scale, tables)
    if not problem.can_change_scales:
        return solution
    search = _ScaleSearch(solution.target.to(torch.float32), importance, problem.grid, solution.scale.to(torch.float32))
    start_cost = search.best_cost.clone()
    for factor in COARSE_FACTORS:
        search.try_scales(search.start * factor)
    coarse = search.best.clone()
    for factor in (1 - FINE_STEP, 1 + FINE_STEP):
        search.try_scales(coarse * factor)
    # Scales that were not improved keep their float64 value.
    best = torch.where(search.best_cost < start_cost, search.best.to(torch.float64), solution.scale)
    return Solution(solution.target, problem.nearest_codes(solution.target, best), best)


class _ScaleSearch:
    """The best scale of each block that was tried so far."""

    def __init__(self, target: Tensor, importance: Tensor, grid: CodeGrid, start: Tensor) -> None:
        by_block = (*start.shape, -1)
        self.target, self.importance = target.reshape(by_block), importance.expand_as(target).reshape(by_block)
        self.start, self.shape = start, target.shape
        self.grid = replace(grid, low=grid.low.to(torch.float32), high=grid.high.to(torch.float32))
        self.best, self.best_cost = start.clone(), self._cost(start)

    def _cost(self, scales: Tensor) -> Tensor:
        scales = scales[..., None]
        codes = self.grid.nearest_codes((self.target / scales).view(self.shape)).view_as(self.target)
        error = codes.mul_(scales).sub_(self.target)
        return error.square_().mul_(self.importance).sum(-1)

    def try_scales(self, scales: Tensor) -> None:
        cost = self._cost(scales)
        is_better = cost < self.best_cost
        self.best = torch.where(is_better, scales, self.best)
        self.best_cost = torch.where(is_better, cost, self.best_cost)
