"""Target: the weight that gives the float outputs for the inputs of the quantized model.

    W* = W + (P - W H) (H + lam I)^-1          P = cov(W x + d, x~)

This is the exact form of asymmetric calibration (GPTAQ, Qronos). d is the error of the other operand of a residual add,
which W* corrects too. With few rows W* overfits, so the ridge lam is chosen on held-out rows before rounding: among
0.01 .. 10 times the mean diagonal of H and "no change", from 0.3 on in the direction that improves. If no rows are held
out, it is 0.3 + 2 n / N times the mean diagonal, with n unknowns and N rows.
"""

import torch
from torch import Tensor

from scalepoint.tuning.moments import float32_hessian
from scalepoint.tuning.problem import LayerProblem, Solution, with_ridge
from scalepoint.tuning.steps.registry import register

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # shares of the mean diagonal
FIRST_RIDGE = 3  # index of the one that is tried first


@register("target")
def target(problem: LayerProblem, solution: Solution) -> Solution:
    """Choose another target, and the nearest codes to it."""
    fit = problem.fit
    if fit.count < 2 * fit.size:
        problem.notes["ridge"] = "none: fewer than two rows per unknown"
        return solution
    share: float | None
    if problem.ridge != "auto":
        share = float(problem.ridge)
    elif problem.holdout is fit:
        share = 0.3 + 2 * fit.size / fit.count
    else:
        share = _choose_ridge(problem)
    solved = None if share is None else _solve_with_ridge(problem, share)
    problem.notes["ridge"] = "none" if solved is None else share
    best = problem.weight if solved is None else solved
    codes = problem.nearest_codes(best, solution.scale, solution.tables)
    return Solution(best, codes, solution.scale, solution.tables)


def _choose_ridge(problem: LayerProblem) -> float | None:
    """Return the ridge that is best on held-out rows; None if no change is best. Compares some of the outputs."""
    holdout_error = problem.error_around_weight(problem.holdout)
    outputs = problem.sampled_outputs
    (best_error,) = problem.sum_over_ranks(float(holdout_error.base[:, outputs].sum()))
    best: float | None = None
    # First 0.3 and larger ones until the error rises; then, unless a larger one was better, smaller ones.
    for shares in (RIDGES[FIRST_RIDGE:], RIDGES[FIRST_RIDGE - 1 :: -1]):
        for share in shares:
            solved = _solve_with_ridge(problem, share, outputs)
            error = float("inf") if solved is None else float(holdout_error.error(solved, outputs).sum())
            (error,) = problem.sum_over_ranks(error)
            is_better = error < best_error
            if is_better:
                best_error, best = error, share
            _drop_other_factors(problem, best)
            if not is_better:
                break
        if best is not None and best > RIDGES[FIRST_RIDGE]:
            break
    return best


def _solve_with_ridge(problem: LayerProblem, share: float, outputs: slice = slice(None)) -> Tensor | None:
    """Return W* of some outputs; None if H is singular. Layers with the same inputs share the factor of H."""
    cache = problem.fit.cache
    if ("ridge", share) not in cache:
        factor, failed = torch.linalg.cholesky_ex(with_ridge(float32_hessian(problem.fit), share))
        cache["ridge", share] = None if bool(failed.any()) else factor
    factor = cache["ridge", share]
    if factor is None:
        return None
    slope = problem.error_around_weight(problem.fit).slope
    change = torch.cholesky_solve(slope[:, outputs].mT, factor).mT
    return problem.weight[:, outputs] - change.to(torch.float64)


def _drop_other_factors(problem: LayerProblem, share: float | None) -> None:
    """Keep only the factor of the best ridge so far: each is as large as H."""
    for key in list(problem.fit.cache):
        if isinstance(key, tuple) and key[0] == "ridge" and key[1] != share:
            del problem.fit.cache[key]
