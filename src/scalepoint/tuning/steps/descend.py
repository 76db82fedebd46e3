"""Descent: one code after another moves to where it costs least, given all others; then the scales given the codes.

    q_j <- round(q_j - R_j / (s_j H_jj)),  R = (s q - W*) H            s <- s - <q, R> / <q, q H>

Every move lowers tr[(s q - W*) H (s q - W*)'], from any start and for any H: it needs no inverse, so it never fails.
Each move is a choice in one dimension, so limits that depend on other codes (pairs) are kept on the way.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scalepoint.tuning.problem import CodeGrid, Problem, Solution, expand_scale
from scalepoint.tuning.steps.registry import register

MAX_SWEEPS = 2
COLUMNS_PER_BLOCK = 32


@register("descend")
def descend(problem: Problem, solution: Solution) -> Solution:
    """The solution after a few sweeps; it stops when no code moves."""
    if "damped" not in problem.fit.made:
        problem.fit.made["damped"] = problem.damped()
    state = _Descent(problem, solution, problem.fit.made["damped"])
    for sweep in range(MAX_SWEEPS):
        (moved,) = problem.added(state.sweep(is_last=sweep + 1 == MAX_SWEEPS))
        problem.notes["sweeps"] = sweep + 1
        if not moved:
            break
    return Solution(solution.target, state.codes.mT.contiguous(), state.scale.to(torch.float64))


class _Descent:
    """Codes (groups, n, outputs), so that a column lies in one piece, and their slope R, kept up to date."""

    def __init__(self, problem: Problem, solution: Solution, hessian: Tensor) -> None:
        self.hessian, self.scale = hessian, solution.scale.to(torch.float32).clone()
        self.codes = solution.codes.mT.clone(memory_format=torch.contiguous_format)
        codes = problem.codes
        self.grid: CodeGrid = replace(codes, low=codes.low.to(torch.float32), high=codes.high.to(torch.float32))
        self.ends = self.grid.ends(self.codes.shape[1])
        self.refits, self.blocks = problem.has_own_scales, self.scale.shape[-1]
        target = solution.target.mT.to(torch.float32)
        steps = expand_scale(self.scale, self.codes.shape[1]).mT
        self.slope = hessian @ (self.codes * steps - target)

    def sweep(self, *, is_last: bool) -> int:
        """All codes once, and the scales; how many codes moved. Where an output has several scales, each follows the
        codes of its block at once, and both changes are one product; in the last sweep only for blocks to come."""
        size, moved, has_blocks = self.codes.shape[1], 0, self.blocks > 1
        width = size // self.blocks if has_blocks else COLUMNS_PER_BLOCK
        for start in range(0, size, width):
            part = slice(start, min(start + width, size))
            before, change = self.codes[:, part].clone(), self._moved(part)
            moved += int(torch.count_nonzero(before != self.codes[:, part]))
            if has_blocks and self.refits:
                change = self._rescaled(part, change)
            rows = slice(part.stop if is_last and has_blocks else 0, None)
            self.slope[:, rows].baddbmm_(self.hessian[:, rows, part], change)
        if self.refits and not has_blocks:
            self._refit()
        return moved

    def _moved(self, part: slice) -> Tensor:
        """Codes of some columns one after another; what that changes of their values."""
        codes, slope = self.codes[:, part], self.slope[:, part]
        steps = self.scale[:, :, part.start * self.blocks // self.codes.shape[1]]
        own, is_paired = self.hessian[:, part, part], self.grid.partners is not None
        curves = (steps[:, None] * own.diagonal(dim1=-2, dim2=-1)[..., None]).clamp_(min=1e-30).reciprocal_()
        changes = (codes * steps[:, None]).neg_()  # less the old values
        lines = (each.unsqueeze(2).unbind(1) for each in (slope, own))  # each with an axis for the product
        columns = zip(*lines, *(each.unbind(1) for each in (codes, curves, changes)), self.ends[part], strict=True)
        now = torch.empty_like(slope[:, :1])
        for column, (line, row, code, curve, change, limits) in enumerate(columns):
            torch.baddbmm(line, row[..., :column], changes[:, :column], out=now)
            ends = self.grid.limits(self.codes.mT, part.start + column) if is_paired else limits
            self.grid.round_(code.addcmul_(now[:, 0], curve, value=-1).clamp_(*ends))
            change.addcmul_(code, steps)
        return changes

    def _rescaled(self, part: slice, change: Tensor) -> Tensor:
        """The best scales of a block given its codes; what both changed of its values."""
        own = self.hessian[:, part, part]
        codes, slope = self.codes[:, part], torch.baddbmm(self.slope[:, part], own, change)
        more = self._better(part.start * self.blocks // self.codes.shape[1], codes, slope, own @ codes)
        return change.addcmul_(codes, more[:, None])

    def _refit(self) -> None:
        """The best scale of each output given its codes."""
        product = self.hessian @ self.codes
        more = self._better(0, self.codes, self.slope, product)
        self.slope.addcmul_(product, more[:, None])

    def _better(self, block: int, codes: Tensor, slope: Tensor, product: Tensor) -> Tensor:
        """Change the scales of a block to the best ones; by how much."""
        curve, before = (codes * product).sum(1), self.scale[..., block]
        change = torch.where(curve > 0, -(codes * slope).sum(1) / curve.clamp(min=1e-30), 0.0)
        change = torch.where(before + change > 0.1 * before, change, 0.0)
        self.scale[..., block] = before + change
        return change
