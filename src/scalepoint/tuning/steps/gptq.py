"""GPTQ: column after column is rounded, and what the rounding did is made good by the columns that are still free.

    U = chol(H^-1) upper;   e_j = (w_j - s q_j) / U_jj,   w_k -= e_j U_jk  for k after j

Columns go by their diagonal, the largest first, each with the scale of the block that it belongs to: the order leaves
no trace in the file. H is damped by a share of its mean diagonal that grows with unknowns per row; where it is still
not positive definite the share is raised tenfold, and the report says by how much.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.problem import Codes, Problem, Solution, spread
from scalepoint.tuning.steps.registry import register

BLOCK = 64
RUNGS = 4


@register("gptq")
def gptq(problem: Problem, solution: Solution) -> Solution:
    """The solution with other codes at the same scales."""
    if problem.codes.partners is not None:
        problem.notes["pairs"] = "rounding left to descent"
        return Solution(solution.target, problem.nearest(solution.target, solution.scale), solution.scale)
    factor, order = _factor(problem)
    if factor is None:
        problem.notes["damping"] = "none helps: left to descent"
        return solution
    size = problem.fit.size
    steps = spread(solution.scale, size).expand_as(solution.target)
    by = order[:, None, :].expand_as(solution.target)
    weight, scale = solution.target.gather(-1, by).to(torch.float32), steps.gather(-1, by).to(torch.float32)
    ends = (end.expand_as(solution.target).gather(-1, by) for end in (problem.codes.low, problem.codes.high))
    low, high = (end.to(torch.float32) for end in ends)
    grid = replace(problem.codes, low=low, high=high)
    codes = _swept(weight, scale, grid, factor.to(torch.float32)).to(torch.float64)
    return Solution(solution.target, torch.empty_like(codes).scatter_(-1, by, codes), solution.scale)


def _factor(problem: Problem) -> tuple[Tensor | None, Tensor]:
    """The upper factor of the inverse, columns in the order of their diagonal."""
    order = problem.fit.noisy.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    for rung in range(RUNGS):
        share = 0.01 * 10.0**rung
        damped = problem.damped(share)
        ordered = damped.gather(-1, order[:, None, :].expand_as(damped)).gather(-2, order[:, :, None].expand_as(damped))
        lower, failed = torch.linalg.cholesky_ex(ordered)
        if not bool(failed.any()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed.any()) and bool(upper.isfinite().all()):
                problem.notes["damping"] = share
                return upper, order
    return None, order


def _swept(weight: Tensor, scale: Tensor, grid: Codes, factor: Tensor) -> Tensor:
    """Codes, in blocks of columns: within a block one by one, beyond it by one product."""
    codes = torch.empty_like(weight)
    size = weight.shape[-1]
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        errors = torch.empty_like(weight[..., start:end])
        for column in range(start, end):
            step = scale[..., column]
            low, high = grid.low[..., column], grid.high[..., column]
            code = grid.rounded((weight[..., column] / step).clamp(low, high))
            codes[..., column] = code
            error = (weight[..., column] - code * step) / factor[:, None, column, column]
            errors[..., column - start] = error
            weight[..., column + 1 : end] -= error[..., None] * factor[:, None, column, column + 1 : end]
        weight[..., end:] -= errors @ factor[:, start:end, end:]
    return codes
