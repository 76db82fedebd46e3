"""GPTQ: columns are rounded one by one, and the columns that are still free compensate the error of each.

    U = chol(H^-1) upper;   e_j = (w_j - s q_j) / U_jj,   w_k -= e_j U_jk  for k after j

Columns are rounded in the order of the diagonal of H, the largest first, each with the scale of its own block, so the
file does not depend on the order. H is damped by a share of its mean diagonal that grows with unknowns per row. If the
result is not positive definite, the share is raised tenfold; the report contains the share.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.code_grids import CodeGrid, LowHigh
from scalepoint.tuning.problem import LayerProblem, Solution, expand_scale
from scalepoint.tuning.steps.registry import register

COLUMNS_PER_BLOCK = 32
DAMPING_ATTEMPTS = 4


@register("gptq")
def gptq(problem: LayerProblem, solution: Solution) -> Solution:
    """Choose other codes at the same scales."""
    if problem.grid.partners is not None:  # the limits of a code depend on its partner, which may come later
        problem.notes["pairs"] = "rounding left to descent"
        return Solution(solution.target, problem.nearest_codes(solution.target, solution.scale), solution.scale)
    factor, order, share = _factor_inverse(problem)
    if factor is None:
        problem.notes["damping"] = "none helps: left to descent"
        return solution
    problem.notes["damping"] = share
    scale_per_code = expand_scale(solution.scale, problem.fit.size)
    weight, scale = _sort_columns(solution.target, order), _sort_columns(scale_per_code, order)
    grid = problem.get_grid(solution.tables)
    sorted_codes = _round_columns(weight, scale, grid, _sort_limits(grid, order), factor).mT
    index = order[:, None, :].expand_as(sorted_codes)
    codes = torch.empty_like(sorted_codes).scatter_(-1, index, sorted_codes)  # back to the order of the layer
    return replace(solution, codes=codes)


def _sort_columns(values: Tensor, order: Tensor) -> Tensor:
    """Transpose (groups, outputs, n) to (groups, n, outputs), with the columns in this order.

    Transposed, so that a column is contiguous. One value for all columns is not copied.
    """
    by_column = (values if values.ndim else values.reshape(1, 1, 1)).mT.to(torch.float32)
    if by_column.shape[1] == 1:
        return by_column.expand(-1, order.shape[-1], -1)
    return by_column.gather(1, order[:, :, None].expand(-1, -1, by_column.shape[-1]))


def _sort_limits(grid: CodeGrid, order: Tensor) -> Sequence[LowHigh]:
    """Return low and high of every column, in this order."""
    if grid.low.numel() == grid.high.numel() == 1:
        return grid.column_limits(order.shape[-1])
    lows, highs = (_sort_columns(limit, order).unbind(1) for limit in (grid.low, grid.high))
    return list(zip(lows, highs, strict=True))


def _factor_inverse(problem: LayerProblem) -> tuple[Tensor | None, Tensor, float]:
    """Return U of the formula above, the order of the columns, and the damping.

    Layers with the same inputs share them in the cache of the moments.
    """
    cache = problem.fit.cache
    if "gptq" not in cache:
        order = problem.fit.hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
        cache["gptq"] = (None, order, 0.0)
        for attempt in range(DAMPING_ATTEMPTS):
            share = 0.01 * 10.0**attempt
            upper = _upper_factor(problem.damped_hessian(share), order.flip(-1))
            if upper is not None:
                cache["gptq"] = upper, order, share
                break
    factor: tuple[Tensor | None, Tensor, float] = cache["gptq"]
    return factor


def _upper_factor(hessian: Tensor, reversed_order: Tensor) -> Tensor | None:
    """Return the upper factor U of H^-1 = U'U; None if H is not positive definite.

    H with its columns reversed is L L'. The inverse of L, reversed again, is U. So H itself is never inverted.
    """
    permuted = hessian.gather(-1, reversed_order[:, None, :].expand_as(hessian))
    permuted = permuted.gather(-2, reversed_order[:, :, None].expand_as(hessian))
    lower, failed = torch.linalg.cholesky_ex(permuted)
    if bool(failed.any()):
        return None
    identity = permuted.zero_()  # in the same memory, because a wide layer's matrices take gigabytes
    identity.diagonal(dim1=-2, dim2=-1).fill_(1)
    upper = torch.linalg.solve_triangular(lower, identity, upper=False, out=identity).flip(-1, -2)
    return upper if bool(upper.isfinite().all()) else None


def _round_columns(
    weight: Tensor, scale: Tensor, grid: CodeGrid, column_limits: Sequence[LowHigh], factor: Tensor
) -> Tensor:
    """Return codes (groups, n, outputs). Changes `weight`.

    Columns are rounded in blocks: within a block one by one; the columns after it get the errors of the whole block in
    one product.
    """
    codes, pivots = torch.empty_like(weight), factor.diagonal(dim1=-2, dim2=-1)[..., None]
    compensated = torch.empty_like(weight[:, :1])
    for start in range(0, weight.shape[1], COLUMNS_PER_BLOCK):
        block = slice(start, start + COLUMNS_PER_BLOCK)
        errors, block_factor = torch.empty_like(weight[:, block]), factor[:, block, block].mT
        # unbind makes the views of all columns at once: indexing every column takes longer than the arithmetic.
        # Weights and factor rows have one more axis, which baddbmm needs.
        weights = weight[:, block].unsqueeze(2).unbind(1)
        factor_rows = block_factor.unsqueeze(2).unbind(1)
        other_views = (tensor.unbind(1) for tensor in (scale[:, block], codes[:, block], errors, pivots[:, block]))
        columns = zip(weights, factor_rows, *other_views, column_limits[block], strict=True)
        for column, (weight_row, factor_row, step_size, code, error, pivot, limits) in enumerate(columns):
            # The weights minus the errors of the columns before them in this block.
            torch.baddbmm(weight_row, factor_row[..., :column], errors[:, :column], alpha=-1, out=compensated)
            grid.round_(torch.div(compensated[:, 0], step_size, out=code).clamp_(*limits))
            torch.addcmul(compensated[:, 0], code, step_size, value=-1, out=error).div_(pivot)
        weight[:, block.stop :].baddbmm_(factor[:, block, block.stop :].mT, errors, alpha=-1)
    return codes
