"""GPTQ: column after column is rounded, and what the rounding did is made good by the columns that are still free.

    U = chol(H^-1) upper;   e_j = (w_j - s q_j) / U_jj,   w_k -= e_j U_jk  for k after j

Columns go by their diagonal, the largest first, each with the scale of the block that it belongs to: the order leaves
no trace in the file. H is damped by a share of its mean diagonal that grows with unknowns per row; where it is still
not positive definite the share is raised tenfold, and the report says by how much.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scalepoint.tuning.problem import CodeGrid, LowHigh, Problem, Solution, expand_scale
from scalepoint.tuning.steps.registry import register

COLUMNS_PER_BLOCK = 32
DAMPING_ATTEMPTS = 4


@register("gptq")
def gptq(problem: Problem, solution: Solution) -> Solution:
    """The solution with other codes at the same scales."""
    if problem.codes.partners is not None:
        problem.notes["pairs"] = "rounding left to descent"
        return Solution(solution.target, problem.nearest(solution.target, solution.scale), solution.scale)
    factor, order, share = _factor_inverse(problem)
    if factor is None:
        problem.notes["damping"] = "none helps: left to descent"
        return solution
    problem.notes["damping"] = share
    steps = expand_scale(solution.scale, problem.fit.size)
    weight, scale = (_sort_columns(each, order) for each in (solution.target, steps))
    codes = _round_columns(weight, scale, problem.codes, _sort_limits(problem.codes, order), factor).mT
    by = order[:, None, :].expand_as(codes)
    return Solution(solution.target, torch.empty_like(codes).scatter_(-1, by, codes), solution.scale)


def _sort_columns(values: Tensor, order: Tensor) -> Tensor:
    """(groups, n, outputs) in the order of the columns, so that a column lies in one piece; what is one value for all
    columns is not copied."""
    by_column = (values if values.ndim else values.reshape(1, 1, 1)).mT.to(torch.float32)
    if by_column.shape[1] == 1:
        return by_column.expand(-1, order.shape[-1], -1)
    return by_column.gather(1, order[:, :, None].expand(-1, -1, by_column.shape[-1]))


def _sort_limits(codes: CodeGrid, order: Tensor) -> Sequence[LowHigh]:
    """The low and the high of every column in this order."""
    if codes.low.numel() == codes.high.numel() == 1:
        return codes.ends(order.shape[-1])
    return list(zip(*(_sort_columns(each, order).unbind(1) for each in (codes.low, codes.high)), strict=True))


def _factor_inverse(problem: Problem) -> tuple[Tensor | None, Tensor, float]:
    """The upper factor of the inverse, columns in the order of their diagonal; and the damping. Made once for layers
    with the same inputs."""
    made = problem.fit.made
    if "gptq" not in made:
        order = problem.fit.noisy.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
        made["gptq"] = (None, order, 0.0)
        for rung in range(DAMPING_ATTEMPTS):
            share = 0.01 * 10.0**rung
            upper = _upper_factor(problem.damped(share), order.flip(-1))
            if upper is not None:
                made["gptq"] = upper, order, share
                break
    found: tuple[Tensor | None, Tensor, float] = made["gptq"]
    return found


def _upper_factor(hessian: Tensor, backwards: Tensor) -> Tensor | None:
    """U of H^-1 = U'U from the factor of H with its columns backwards, whose inverse it is."""
    turned = hessian.gather(-1, backwards[:, None, :].expand_as(hessian))
    turned = turned.gather(-2, backwards[:, :, None].expand_as(hessian))
    lower, failed = torch.linalg.cholesky_ex(turned)
    if bool(failed.any()):
        return None
    inverse = turned.zero_()  # its memory: of a wide layer each matrix counts
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    upper = torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse).flip(-1, -2)
    return upper if bool(upper.isfinite().all()) else None


def _round_columns(weight: Tensor, scale: Tensor, grid: CodeGrid, ends: Sequence[LowHigh], factor: Tensor) -> Tensor:
    """Codes (groups, n, outputs), in blocks of columns: within a block one by one, beyond it by one product."""
    codes, pivots = torch.empty_like(weight), factor.diagonal(dim1=-2, dim2=-1)[..., None]
    value = torch.empty_like(weight[:, :1])
    for start in range(0, weight.shape[1], COLUMNS_PER_BLOCK):
        part = slice(start, start + COLUMNS_PER_BLOCK)
        errors, own = torch.empty_like(weight[:, part]), factor[:, part, part].mT
        lines = (each.unsqueeze(2).unbind(1) for each in (weight[:, part], own))  # each with an axis for the product
        parts = (each.unbind(1) for each in (scale[:, part], codes[:, part], errors, pivots[:, part]))
        columns = zip(*lines, *parts, ends[part], strict=True)
        for column, (line, row, step, code, error, pivot, limits) in enumerate(columns):
            torch.baddbmm(line, row[..., :column], errors[:, :column], alpha=-1, out=value)
            grid.round_(torch.div(value[:, 0], step, out=code).clamp_(*limits))
            torch.addcmul(value[:, 0], code, step, value=-1, out=error).div_(pivot)
        weight[:, part.stop :].baddbmm_(factor[:, part, part.stop :].mT, errors, alpha=-1)
    return codes
