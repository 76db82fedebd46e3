"""One layer: the steps one after another, judged on held-out rows; the best is what it deploys from then on."""

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.results import TunedLayer
from scalepoint.tuning.collect import LayerUse, RowCollector, explain_refusal
from scalepoint.tuning.moments import Moments
from scalepoint.tuning.problem import GroupedLayer, Problem, Ridge, Solution, format_notes
from scalepoint.tuning.rows import get_geometry
from scalepoint.tuning.steps import INTERCEPT, LayerStep, find_step
from scalepoint.tuning.walk import StreamWalk

ALWAYS_JUDGED_STEPS = 2  # steps that are always judged
MIN_ROWS = 8  # rows below which nothing is chosen by them
MIN_SHARED_PRODUCTS = 3e7  # products of a sweep over a layer from which on ranks share its outputs


@dataclass
class LayerSolver:
    """Solves the layers that a walk comes to."""

    collector: RowCollector
    steps: tuple[str, ...]
    ridge: Ridge
    left: dict[str, str] = field(default_factory=dict)  # layer -> why it is not solved

    def solve(self, use: LayerUse, name: str) -> TunedLayer | None:
        """Choose for the layer of a node; None when it is left as it is."""
        geometry = get_geometry(use.layer)
        why = explain_refusal(use, geometry)
        if why or geometry is None:
            self.left[name] = why
            return None
        shape = GroupedLayer(use.layer, geometry)
        row = self._chosen(use, shape, name) if self._wants_products else self._shifted(use, shape, name)
        is_last = use.node is self.collector.uses_of(use.layer)[-1]
        if row is None and is_last and name not in self.left:
            self.left[name] = "no rows reached it: it is rounded to nearest; data that does would choose"
        return row

    def look(self, use: LayerUse) -> None:
        """Only see what a layer to come needs of this use, as `solve` does before it chooses."""
        geometry = get_geometry(use.layer)
        if geometry is not None:
            collect = self.collector.moments if self._wants_products else self.collector.residuals
            collect(use, GroupedLayer(use.layer, geometry))

    @property
    def _wants_products(self) -> bool:
        return any(isinstance(find_step(name), LayerStep) for name in self.steps if name != INTERCEPT)

    def _shifted(self, use: LayerUse, shape: GroupedLayer, name: str) -> TunedLayer | None:
        """The bias takes up what the means lack; codes stay."""
        if not can_shift_bias(self.collector.walk, use):
            self.left[name] = "it has no bias, and floats go in"
            return None
        start = time.perf_counter()
        fit, judge = self.collector.residuals(use, shape)
        if not fit.count or use.node is not self.collector.uses_of(use.layer)[-1]:
            return None
        before, after = judge.error(), judge.error(fit.mean)
        is_better = after < before
        if is_better:
            for each in use.layer.sharing_layers:
                each.set_bias_shift(fit.mean.reshape(-1))
        errors = (before, min(before, after), fit.error(), fit.error(fit.mean if is_better else None))
        count = fit.count + (judge.count if judge is not fit else 0)
        step = INTERCEPT if is_better else ""
        seconds = time.perf_counter() - start
        return TunedLayer(name, use.layer.kind, count, shape.size[2], *errors, 0.0, step, "", seconds)

    def _chosen(self, use: LayerUse, shape: GroupedLayer, name: str) -> TunedLayer | None:
        """The best solution on held-out rows, or what there was when nothing is better."""
        start = time.perf_counter()
        weight = shape.weight()
        fit, judge = self.collector.moments(use, shape)
        uses = self.collector.uses_of(use.layer)
        if fit is None or judge is None or use.node is not uses[-1]:
            return None
        if fit.count < MIN_ROWS:
            self.left[name] = f"only {fit.count} rows reached it: it is rounded to nearest; more data would choose"
            return None
        is_alone = not self.collector.is_shared(fit)
        first, has_bias = shape.start(weight), INTERCEPT in self.steps and can_shift_bias(self.collector.walk, use)
        fit, judge = _as_steps_read(fit, judge, has_bias)
        problem = Problem(name, weight, shape.codes(), fit, judge, shape.has_own_scales, has_bias, self.ridge)
        if len(uses) > 1:
            problem.notes["uses"] = len(uses)
        best, step, errors = self._solved(problem, first, is_alone=is_alone)
        if step:
            shape.apply(best)
            if has_bias:
                for each in use.layer.sharing_layers:
                    each.set_bias_shift(_compute_bias_shift(fit, judge, best).reshape(-1))
        moved = float((best.codes != first.codes).to(torch.float64).mean())
        seen = fit.count + (judge.count if judge is not fit else 0)
        seconds, notes = time.perf_counter() - start, format_notes(problem.notes)
        return TunedLayer(name, use.layer.kind, seen, fit.size, *errors, moved, step, notes, seconds)

    def _solved(
        self, problem: Problem, first: Solution, *, is_alone: bool
    ) -> tuple[Solution, str, tuple[float, float, float, float]]:
        """The best, its step, and the errors before and after, on held-out and on fitted rows. Ranks share outputs."""
        outputs = outputs_of_rank(problem.weight)
        own, start = (problem, first) if outputs is None else (problem.of(outputs), first.of(outputs))
        plain = replace(own, has_intercept=False)
        best, step, before, least = self.best(own, plain, start, is_alone=is_alone)
        after = own if step else plain
        fitted = (plain.error(start, own.fit, own.some), after.error(best, own.fit, own.some))
        if outputs is not None:
            best = _gather_outputs(best, first) if step else first
        return best, step, (before, least, *fitted)

    def best(
        self, problem: Problem, plain: Problem, first: Solution, *, is_alone: bool = False
    ) -> tuple[Solution, str, float, float]:
        """The best on held-out rows of the start, the last two steps, and, where these are no better, the others; ""
        as its step when that is the first. Then the errors there of the start and of the best. What the steps made of H
        goes before, where no other layer reads it."""
        tried: list[tuple[Solution, str]] = [(first, INTERCEPT)] if problem.has_intercept else []
        now = first
        for name in self.steps:
            found = None if name == INTERCEPT else find_step(name)
            if isinstance(found, LayerStep):
                now = found.run(problem, now)
                tried.append((now, name))
        if is_alone:
            problem.fit.made.clear()
        best, step, before = first, "", plain.error(first)
        least = before
        for place, (solution, name) in enumerate(reversed(tried)):
            if place >= ALWAYS_JUDGED_STEPS and step:
                break
            error = problem.error(solution)
            if error < least:
                best, step, least = solution, name, error
        return best, step, before, least


def _as_steps_read(fit: Moments, judge: Moments, has_bias: bool) -> tuple[Moments, Moments]:
    """As the steps read them: around zero where no bias takes up the means."""
    first, second = (each.settled() if has_bias else each.raw().settled() for each in (fit, judge))
    return first, first if judge is fit else second


def outputs_of_rank(weight: Tensor) -> slice | None:
    """The outputs that this rank solves, where the ranks share those of a layer; None where each solves all: what they
    have to tell each other takes longer than a small layer."""
    groups, outputs, size = weight.shape
    rank, count = distributed.rank(), distributed.world_size()
    if count == 1 or outputs < count or groups * outputs * size**2 < MIN_SHARED_PRODUCTS:
        return None
    return slice(outputs * rank // count, outputs * (rank + 1) // count)


def _gather_outputs(found: Solution, first: Solution) -> Solution:
    """The solution of all outputs, from those of all ranks."""
    parts = distributed.gather_tensors({"codes": found.codes.to(torch.float32), "scale": found.scale}, "solved")
    codes, scale = (torch.cat([part[name] for part in parts], 1) for name in ("codes", "scale"))
    return Solution(first.target, codes, scale.to(torch.float64))


def can_shift_bias(walk: StreamWalk, use: LayerUse) -> bool:
    """Whether a shift of the bias costs nothing: it has one, or its kernel adds one to its integers anyway. A layer of
    floats without a bias is left without."""
    layer, source = use.layer, walk.find_source(use.node, use.layer)
    has_own = layer.bias is not None or layer.norm is not None
    return has_own or source is None or walk.get_stub(source) is not None


def _compute_bias_shift(fit: Moments, judge: Moments, best: Solution) -> Tensor:
    """What the bias takes up, from all rows."""
    if judge is fit:
        return fit.mismatch(best.values)
    parts = [(each.count, each.mismatch(best.values)) for each in (fit, judge)]
    return torch.stack([count * part for count, part in parts]).sum(0) / sum(count for count, _ in parts)
