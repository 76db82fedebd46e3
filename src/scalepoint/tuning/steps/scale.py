"""Scale: for every output (and block) the step that costs the outputs least when codes are rounded to it.

    s = argmin over shrinkages of  sum_j H_jj (w_j - s q_j)^2,   q_j the nearest code

Weighted by how much an input matters: plain squared error clips weights that carry the signal.
"""

import torch
from torch import Tensor

from scalepoint.tuning.problem import Problem, Solution
from scalepoint.tuning.steps.registry import register

SHRINKAGES = tuple(1.05 - 0.025 * step for step in range(27))  # 1.05 .. 0.4 of the calibrated scale


@register("scale")
def scale(problem: Problem, solution: Solution) -> Solution:
    """The solution with searched scales and the nearest codes."""
    if not problem.has_own_scales:
        return solution
    importance = problem.fit.noisy.diagonal(dim1=-2, dim2=-1).clamp(min=0)[:, None, :]
    best = solution.scale
    least = _cost(problem, solution.target, best, importance)
    for factor in SHRINKAGES:
        tried = solution.scale * factor
        cost = _cost(problem, solution.target, tried, importance)
        better = cost < least
        best, least = torch.where(better, tried, best), torch.where(better, cost, least)
    return Solution(solution.target, problem.nearest(solution.target, best), best)


def _cost(problem: Problem, target: Tensor, scales: Tensor, importance: Tensor) -> Tensor:
    found = Solution(target, problem.nearest(target, scales), scales)
    cost = (target - found.values).square() * importance
    return cost.reshape(*scales.shape, -1).sum(-1)
