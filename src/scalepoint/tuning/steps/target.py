"""Target: the weight that gives the float outputs for the inputs that the quantized net really has.

    W* = W + (P - W H) (H + lam I)^-1          P = cov(W x + d, x~)

The exact form of asymmetric calibration (GPTAQ, Qronos); with d, what the other side of a residual add lacks, it makes
good that, too. What limits it is overfitting: the ridge lam is chosen on the held-out rows among 0.01 .. 10 of the mean
diagonal and "no change", before anything is rounded, from 0.3 on to the side that is better. Where none are held out it
is 0.3 + 2 n/N.
"""

import torch
from torch import Tensor

from scalepoint.tuning.moments import float32_covariance
from scalepoint.tuning.problem import Problem, Solution, with_ridge
from scalepoint.tuning.steps.registry import register

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FIRST_RIDGE = 3


@register("target")
def target(problem: Problem, solution: Solution) -> Solution:
    """The solution with another target, and the nearest codes to it."""
    seen, weight = problem.fit, problem.weight
    if seen.count < 2 * seen.size:
        problem.notes["ridge"] = "none: fewer than two rows an unknown"
        return solution
    share: float | None = None if problem.ridge == "auto" else float(problem.ridge)
    if share is None:
        share = _choose_ridge(problem) if problem.judge is not seen else 0.3 + 2 * seen.size / seen.count
    found = None if share is None else _solve_with_ridge(problem, share)
    problem.notes["ridge"] = "none" if found is None else share
    best = weight if found is None else found
    return Solution(best, problem.nearest(best, solution.scale), solution.scale)


def _choose_ridge(problem: Problem) -> float | None:
    """The ridge that is best on held-out rows; None where no change is. Some outputs are enough to tell by."""
    judge = problem.near(problem.judge)
    some = problem.some
    (least,) = problem.added(float(judge.base[:, some].sum()))
    ridge: float | None = None
    for rungs in (RIDGES[FIRST_RIDGE:], RIDGES[FIRST_RIDGE - 1 :: -1]):
        for share in rungs:
            found = _solve_with_ridge(problem, share, some)
            (error,) = problem.added(float("inf") if found is None else float(judge.error(found, some).sum()))
            is_better = error < least
            least, ridge = (error, share) if is_better else (least, ridge)
            _drop_other_factors(problem, ridge)
            if not is_better:
                break
        if ridge is not None and ridge > RIDGES[FIRST_RIDGE]:
            break
    return ridge


def _solve_with_ridge(problem: Problem, share: float, outputs: slice = slice(None)) -> Tensor | None:
    """None where the moments allow no factor; layers with the same inputs share it."""
    seen = problem.fit
    if ("ridge", share) not in seen.made:
        factor, failed = torch.linalg.cholesky_ex(with_ridge(float32_covariance(seen), share))
        seen.made["ridge", share] = None if bool(failed.any()) else factor
    factor = seen.made["ridge", share]
    if factor is None:
        return None
    change = torch.cholesky_solve(problem.near(seen).slope[:, outputs].mT, factor).mT
    return problem.weight[:, outputs] - change.to(torch.float64)


def _drop_other_factors(problem: Problem, share: float | None) -> None:
    """Keep only the factor of the best ridge so far: each is as large as H."""
    for key in [key for key in problem.fit.made if isinstance(key, tuple) and key[0] == "ridge" and key[1] != share]:
        del problem.fit.made[key]
