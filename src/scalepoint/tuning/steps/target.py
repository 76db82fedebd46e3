"""Target: the weight that gives the float outputs for the inputs that the quantized net really has.

    W* = (P + lam W) (H + lam I)^-1          P = cov(W x + d, x~)

The exact form of asymmetric calibration (GPTAQ, Qronos); with d, what the other side of a residual add lacks, it makes
good that, too. What limits it is overfitting: the ridge lam is chosen on the held-out rows among 0.01 .. 10 of the mean
diagonal and "no change", before anything is rounded. Where none are held out it is 0.3 + 2 n/N.
"""

import torch
from torch import Tensor

from scalepoint.tuning.problem import Problem, Solution
from scalepoint.tuning.steps.registry import register

LADDER = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@register("target")
def target(problem: Problem, solution: Solution) -> Solution:
    """The solution with another target, and the nearest codes to it."""
    seen, weight = problem.fit, problem.weight
    if seen.count < 2 * seen.size:
        problem.notes["ridge"] = "none: fewer than two rows an unknown"
        return solution
    mean = seen.noisy.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    if problem.ridge != "auto" or problem.judge is seen:
        share = 0.3 + 2 * seen.size / seen.count if isinstance(problem.ridge, str) else problem.ridge
        problem.notes["ridge"] = share
        best = _ridged(problem, weight, share * mean)
        return Solution(best, problem.nearest(best, solution.scale), solution.scale)
    least, best, ridge = _judged(problem, weight), weight, 0.0
    for share in LADDER:
        found = _ridged(problem, weight, share * mean)
        error = _judged(problem, found)
        if error < least:
            least, best, ridge = error, found, share
    problem.notes["ridge"] = ridge or "none"
    return Solution(best, problem.nearest(best, solution.scale), solution.scale)


def _ridged(problem: Problem, weight: Tensor, lam: Tensor) -> Tensor:
    seen = problem.fit
    diagonal = torch.diag_embed(lam[:, None].expand(-1, seen.size))
    right = seen.cross + lam[:, None, None] * weight
    found: Tensor = torch.linalg.solve(seen.noisy + diagonal, right, left=False)
    return found


def _judged(problem: Problem, values: Tensor) -> float:
    return float(problem.judge.error(values).sum())
