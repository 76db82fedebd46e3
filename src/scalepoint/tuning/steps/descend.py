"""Descent: one code after another moves to where it costs least, given all others; then the scales given the codes.

    q_j <- round(q_j - R_j / (s_j H_jj)),  R = (s q - W*) H            s <- s - <q, R> / <q, q H>

Every move lowers tr[(s q - W*) H (s q - W*)'], from any start and for any H: it needs no inverse, so it never fails.
Each move is a choice in one dimension, so limits that depend on other codes (pairs) are kept on the way.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.problem import Codes, Problem, Solution, spread
from scalepoint.tuning.steps.registry import register

SWEEPS = 2
BLOCK = 32


@register("descend")
def descend(problem: Problem, solution: Solution) -> Solution:
    """The solution after a few sweeps; it stops when no code moves."""
    if "damped" not in problem.fit.made:
        problem.fit.made["damped"] = problem.damped()
    state = _Descent(problem, solution, problem.fit.made["damped"])
    for sweep in range(SWEEPS):
        (moved,) = problem.added(state.sweep())
        if problem.has_own_scales:
            state.refit(is_last=sweep + 1 == SWEEPS)
        problem.notes["sweeps"] = sweep + 1
        if not moved:
            break
    return Solution(solution.target, state.codes.mT.to(torch.float64).contiguous(), state.scale.to(torch.float64))


class _Descent:
    """Codes (groups, n, outputs), so that a column lies in one piece, and their slope R, kept up to date."""

    def __init__(self, problem: Problem, solution: Solution, hessian: Tensor) -> None:
        self.hessian, self.scale = hessian, solution.scale.to(torch.float32)
        self.codes = solution.codes.mT.to(torch.float32).contiguous()
        codes = problem.codes
        self.grid: Codes = replace(codes, low=codes.low.to(torch.float32), high=codes.high.to(torch.float32))
        target = solution.target.mT.to(torch.float32)
        self.slope = hessian @ (self.codes * self._steps() - target)

    def _steps(self) -> Tensor:
        """The scale of every code."""
        return spread(self.scale, self.codes.shape[1]).mT.expand_as(self.codes)

    def sweep(self) -> int:
        """All codes once; how many moved."""
        size, moved, steps = self.codes.shape[1], 0, self._steps()
        curves = (steps * self.hessian.diagonal(dim1=-2, dim2=-1)[..., None]).clamp_(min=1e-30).reciprocal_()
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            part = slice(start, end)
            changes, local = torch.empty_like(self.codes[:, part]), self.slope[:, part].clone()
            own = self.hessian[:, part, part, None].unbind(2)
            values = (self.codes[:, part], steps[:, part], curves[:, part], local, changes)
            columns = zip(*(each.unbind(1) for each in values), strict=True)
            for column, (code, step, curve, slope, change) in enumerate(columns):
                low, high = self.grid.limits(self.codes.mT, start + column)
                wanted = self.grid.rounded(torch.addcmul(code, slope, curve, value=-1).clamp_(low, high))
                torch.sub(wanted, code, out=change).mul_(step)
                code.copy_(wanted)
                local[:, column + 1 :].baddbmm_(own[column][:, column + 1 :], change[:, None])
            moved += int(torch.count_nonzero(changes))
            self.slope += self.hessian[:, :, part] @ changes
        return moved

    def refit(self, *, is_last: bool) -> None:
        """The best scale of each output given its codes; block after block where it has several."""
        blocks = self.scale.shape[-1]
        width = self.codes.shape[1] // blocks
        new = self.scale.clone()
        for block in range(blocks):
            part = slice(block * width, (block + 1) * width)
            own, before = self.codes[:, part], new[..., block]
            curve = (own * (self.hessian[:, part, part] @ own)).sum(1)
            change = torch.where(curve > 0, -(own * self.slope[:, part]).sum(1) / curve.clamp(min=1e-30), 0.0)
            change = torch.where(before + change > 0.1 * before, change, 0.0)
            new[..., block] = before + change
            if block + 1 < blocks or not is_last:
                self.slope += self.hessian[:, :, part] @ (own * change[:, None])
        self.scale = new
