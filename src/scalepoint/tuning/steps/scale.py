"""Scale: for every output (and block) the step that costs the outputs least when codes are rounded to it.

    s = argmin over shrinkages of  sum_j H_jj (w_j - s q_j)^2,   q_j the nearest code

Weighted by how much an input matters: plain squared error clips weights that carry the signal.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.problem import CodeGrid, Problem, Solution
from scalepoint.tuning.steps.registry import register

COARSE_FACTORS = tuple(1.05 - 0.05 * step for step in range(14))  # 1.05 .. 0.4 of the calibrated scale
FINE_STEP = 0.025


@register("scale")
def scale(problem: Problem, solution: Solution) -> Solution:
    """The solution with searched scales and the nearest codes."""
    if not problem.has_own_scales:
        return solution
    importance = problem.fit.noisy.diagonal(dim1=-2, dim2=-1).clamp(min=0)[:, None, :].to(torch.float32)
    search = _ScaleSearch(
        solution.target.to(torch.float32), importance, problem.codes, solution.scale.to(torch.float32)
    )
    first = search.least.clone()
    for factor in COARSE_FACTORS:
        search.look(search.start * factor)
    coarse = search.best.clone()
    for factor in (1 - FINE_STEP, 1 + FINE_STEP):
        search.look(coarse * factor)
    best = torch.where(search.least < first, search.best.to(torch.float64), solution.scale)
    return Solution(solution.target, problem.nearest(solution.target, best), best)


class _ScaleSearch:
    """The best scale of each block so far."""

    def __init__(self, target: Tensor, importance: Tensor, codes: CodeGrid, start: Tensor) -> None:
        blocks = (*start.shape, -1)
        self.target, self.importance = target.reshape(blocks), importance.expand_as(target).reshape(blocks)
        self.codes, self.start, self.shape = codes, start, target.shape
        self.codes = replace(codes, low=codes.low.to(torch.float32), high=codes.high.to(torch.float32))
        self.best, self.least = start.clone(), self.cost(start)

    def cost(self, scales: Tensor) -> Tensor:
        steps = scales[..., None]
        codes = self.codes.nearest((self.target / steps).view(self.shape)).view_as(self.target)
        return codes.mul_(steps).sub_(self.target).square_().mul_(self.importance).sum(-1)

    def look(self, scales: Tensor) -> None:
        cost = self.cost(scales)
        is_better = cost < self.least
        self.best = torch.where(is_better, scales, self.best)
        self.least = torch.where(is_better, cost, self.least)
