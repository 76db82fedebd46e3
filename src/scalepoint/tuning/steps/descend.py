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

SWEEPS = 4
BLOCK = 64


@register("descend")
def descend(problem: Problem, solution: Solution) -> Solution:
    """The solution after a few sweeps; it stops when no code moves."""
    hessian = problem.damped().to(torch.float32)
    target, codes = solution.target.to(torch.float32), solution.codes.to(torch.float32).clone()
    scale = solution.scale.to(torch.float32).clone()
    grid = replace(problem.codes, low=problem.codes.low.to(torch.float32), high=problem.codes.high.to(torch.float32))
    for sweep in range(SWEEPS):
        steps = spread(scale, codes.shape[-1]).expand_as(codes)
        moved = _sweep(codes, steps, target, hessian, grid)
        if problem.has_own_scales:
            scale = _refit(codes, scale, target, hessian)
        problem.notes["sweeps"] = sweep + 1
        if not moved:
            break
    return Solution(solution.target, codes.to(torch.float64), scale.to(torch.float64))


def _sweep(codes: Tensor, steps: Tensor, target: Tensor, hessian: Tensor, grid: Codes) -> int:
    """All codes once, in place; how many moved."""
    slope = (codes * steps - target) @ hessian
    size, moved = codes.shape[-1], 0
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        changes = torch.zeros_like(codes[..., start:end])
        local, own = slope[..., start:end].clone(), hessian[:, start:end, start:end]
        for column in range(end - start):
            place = start + column
            curve = own[:, None, column, column] * steps[..., place]
            wanted = codes[..., place] - local[..., column] / curve.clamp(min=1e-30)
            wanted = grid.rounded(wanted.clamp(*grid.limits(codes, place)))
            change = (wanted - codes[..., place]) * steps[..., place]
            moved += int((change != 0).sum())
            codes[..., place] = wanted
            changes[..., column] = change
            local += change[..., None] * own[:, None, column]
        slope += changes @ hessian[:, start:end]
    return moved


def _refit(codes: Tensor, scale: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """The best scale of each output given its codes; block after block where it has several."""
    size, blocks = codes.shape[-1], scale.shape[-1]
    width = size // blocks
    slope = (codes * spread(scale, size) - target) @ hessian
    new = scale.clone()
    for block in range(blocks):
        part = slice(block * width, (block + 1) * width)
        own = codes[..., part]
        turned = own @ hessian[:, part, part]
        curve = (turned * own).sum(-1)
        change = torch.where(curve > 0, -(own * slope[..., part]).sum(-1) / curve.clamp(min=1e-30), 0.0)
        change = torch.where(new[..., block] + change > 0.1 * new[..., block], change, 0.0)
        new[..., block] += change
        if block + 1 < blocks:
            slope += change[..., None] * (own @ hessian[:, part])
    return new
