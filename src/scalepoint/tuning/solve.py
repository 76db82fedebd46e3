"""Solves one layer when the walk is at its node, and applies the solution that is best on held-out rows.

    rows -> moments -> steps, each starts from the solution of the last one -> best solution -> codes, scales, bias

If "intercept" is the only step, the codes stay, and the bias takes up the mean of the residuals.
"""

import math
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.results import TunedLayer
from scalepoint.tuning.code_grids import CodeGrid, PaletteGrid
from scalepoint.tuning.collect import RowCollector, explain_refusal
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.moments import Moments
from scalepoint.tuning.problem import LayerProblem, Ridge, Solution, format_notes
from scalepoint.tuning.rows import get_geometry
from scalepoint.tuning.steps import INTERCEPT, LayerStep, find_step
from scalepoint.tuning.walk import LayerUse, StreamWalk

ALWAYS_COMPARED_STEPS = 2  # the last ones; earlier steps are compared only if these do not improve the layer
MIN_ROWS = 8  # with fewer rows only the bias of a layer is corrected
MIN_SHARED_PRODUCTS = 3e7  # products per sweep from which ranks share the outputs of a layer


@dataclass(frozen=True)
class _BestSolution:
    """The best solution of a layer.

    Attributes:
        solution: The codes and scales.
        step: The step that found it; "" if nothing was better than the nearest codes.
        before, after: Error on held-out rows with the nearest codes, and with the solution.
        fitted_before, fitted_after: The same on fitted rows, of the sampled outputs only.
    """

    solution: Solution
    step: str
    before: float
    after: float
    fitted_before: float = math.nan
    fitted_after: float = math.nan


@dataclass
class LayerSolver:
    """Solves the layers of a walk.

    Attributes:
        collector: Collects the rows.
        steps: Names of the steps, in order.
        ridge: Regularization of the target.
        skipped: Layers that were not solved -> the reason.
    """

    collector: RowCollector
    steps: tuple[str, ...]
    ridge: Ridge
    skipped: dict[str, str] = field(default_factory=dict)

    def solve(self, use: LayerUse, name: str) -> TunedLayer | None:
        """Choose codes, scales and bias of the layer at a node. Returns None if it stays as it is."""
        geometry = get_geometry(use.layer)
        refusal = explain_refusal(use, geometry)
        if refusal or geometry is None:
            self.skipped[name] = refusal
            return None
        grouped = GroupedLayer(use.layer, geometry)
        row = self._choose_codes(use, grouped, name) if self._needs_moments else self._correct_bias(use, grouped, name)
        if row is None and self.collector.is_last_use(use) and name not in self.skipped:
            self.skipped[name] = "no rows reached it: rounded to nearest. Add data that reaches it"
        return row

    def collect_only(self, use: LayerUse) -> None:
        """Collect the rows of a finished layer, because a later one shares its weight or its input."""
        geometry = get_geometry(use.layer)
        if geometry is None:
            return
        grouped = GroupedLayer(use.layer, geometry)
        if self._needs_moments:
            self.collector.collect_moments(use, grouped)
        else:
            self.collector.collect_residuals(use, grouped)

    @property
    def _needs_moments(self) -> bool:
        """Whether a step needs second moments of the rows; the intercept alone needs only means."""
        return any(isinstance(find_step(name), LayerStep) for name in self.steps if name != INTERCEPT)

    def _correct_bias(self, use: LayerUse, grouped: GroupedLayer, name: str) -> TunedLayer | None:
        """Shift the bias by the mean of the residual. The codes stay."""
        if not can_shift_bias(self.collector.walk, use):
            self.skipped[name] = "it has no bias, and its input is not quantized"
            return None
        start = time.perf_counter()
        fit, holdout = self.collector.collect_residuals(use, grouped)
        if not fit.count or not self.collector.is_last_use(use):
            return None
        before, after = holdout.error(), holdout.error(fit.mean)
        is_better = after < before
        if is_better:
            _shift_bias(use, fit.mean)
        return TunedLayer(
            name=name,
            kind=use.layer.kind,
            rows=fit.count + (holdout.count if holdout is not fit else 0),
            unknowns=grouped.size[2],
            before=before,
            after=min(before, after),
            fitted_before=fit.error(),
            fitted_after=fit.error(fit.mean if is_better else None),
            moved=0.0,
            step=INTERCEPT if is_better else "",
            notes="",
            seconds=time.perf_counter() - start,
        )

    def _choose_codes(self, use: LayerUse, grouped: GroupedLayer, name: str) -> TunedLayer | None:
        """Apply the solution that is best on held-out rows, if it is better than the nearest codes."""
        start = time.perf_counter()
        weight = grouped.weight()
        fit, holdout = self.collector.collect_moments(use, grouped)
        if fit is None or holdout is None or not self.collector.is_last_use(use):
            return None
        has_bias = INTERCEPT in self.steps and can_shift_bias(self.collector.walk, use)
        has_few_rows = fit.count < MIN_ROWS
        few_rows = f"only {fit.count} rows reached it: rounded to nearest. Add data that reaches it"
        if has_few_rows and (holdout is fit or not has_bias):
            self.skipped[name] = few_rows
            return None
        is_cache_shared = self.collector.has_later_readers(fit)
        nearest = grouped.current_solution(weight)
        fit, holdout = _prepare_moments(fit, holdout, has_bias)
        problem = LayerProblem(
            name=name,
            weight=weight,
            grid=grouped.code_grid(),
            fit=fit,
            holdout=holdout,
            can_change_scales=grouped.can_change_scales,
            has_intercept=has_bias,
            ridge=self.ridge,
        )
        use_count = len(self.collector.uses_of(use.layer))
        if use_count > 1:
            problem.notes["uses"] = use_count
        solver = replace(self, steps=(INTERCEPT,)) if has_few_rows else self
        best = solver._solve_over_ranks(problem, nearest, is_cache_shared=is_cache_shared)
        if has_few_rows and not best.step:
            self.skipped[name] = few_rows
            return None
        if best.step:
            grouped.apply(best.solution)
            if has_bias:
                _shift_bias(use, _compute_bias_shift(fit, holdout, best.solution))
        return TunedLayer(
            name=name,
            kind=use.layer.kind,
            rows=fit.count + (holdout.count if holdout is not fit else 0),
            unknowns=fit.size,
            before=best.before,
            after=best.after,
            fitted_before=best.fitted_before,
            fitted_after=best.fitted_after,
            moved=float((best.solution.codes != nearest.codes).to(torch.float64).mean()),
            step=best.step,
            notes=format_notes(problem.notes),
            seconds=time.perf_counter() - start,
        )

    def _solve_over_ranks(self, problem: LayerProblem, nearest: Solution, *, is_cache_shared: bool) -> _BestSolution:
        """Find the best solution, and its error on fitted rows. Each rank solves some of the outputs."""
        outputs = outputs_of_rank(problem.weight, problem.grid)
        part, start = problem, nearest
        if outputs is not None:
            part, start = problem.select_outputs(outputs), nearest.select_outputs(outputs)
        best = self.find_best(part, start, is_cache_shared=is_cache_shared)
        # The bias is shifted only if a solution is applied.
        without_shift = replace(part, has_intercept=False)
        before = without_shift.error(start, part.fit, part.sampled_outputs)
        after = (part if best.step else without_shift).error(best.solution, part.fit, part.sampled_outputs)
        best = replace(best, fitted_before=before, fitted_after=after)
        if outputs is None:
            return best
        return replace(best, solution=_gather_outputs(best.solution, nearest) if best.step else nearest)

    def find_best(self, problem: LayerProblem, nearest: Solution, *, is_cache_shared: bool) -> _BestSolution:
        """Run the steps and compare their solutions on held-out rows.

        Args:
            problem: The layer.
            nearest: The nearest codes, which the steps start from.
            is_cache_shared: Whether later layers read what the steps store in the cache of the moments. If not, it is
                dropped before the solutions are compared.
        """
        candidates: list[tuple[Solution, str]] = [(nearest, INTERCEPT)] if problem.has_intercept else []
        solution = nearest
        for name in self.steps:
            step = None if name == INTERCEPT else find_step(name)
            if isinstance(step, LayerStep):
                solution = step.run(problem, solution)
                candidates.append((solution, name))
        if not is_cache_shared:
            problem.fit.cache.clear()
        # The error of the nearest codes includes the mismatch of the means: no bias was shifted before tuning.
        before = replace(problem, has_intercept=False).error(nearest)
        best = _BestSolution(nearest, "", before, before)
        for position, (solution, name) in enumerate(reversed(candidates)):
            if position >= ALWAYS_COMPARED_STEPS and best.step:
                break  # later steps start from earlier ones and are nearly always better
            error = problem.error(solution)
            if error < best.after:
                best = _BestSolution(solution, name, before, error)
        return best


def _prepare_moments(fit: Moments, holdout: Moments, has_bias: bool) -> tuple[Moments, Moments]:
    """Convert H to float32. Without a bias that corrects the means, take moments around zero."""

    def prepare(moments: Moments) -> Moments:
        return moments.in_float32() if has_bias else moments.around_zero().in_float32()

    prepared = prepare(fit)
    return prepared, prepared if holdout is fit else prepare(holdout)


def outputs_of_rank(weight: Tensor, grid: CodeGrid) -> slice | None:
    """Return the outputs that this rank solves; None if every rank solves all outputs.

    For a small layer, exchanging the solutions takes longer than solving it. Outputs of a palette share tables.
    """
    if isinstance(grid, PaletteGrid):
        return None
    groups, outputs, size = weight.shape
    rank, count = distributed.rank(), distributed.world_size()
    if count == 1 or outputs < count or groups * outputs * size**2 < MIN_SHARED_PRODUCTS:
        return None
    return slice(outputs * rank // count, outputs * (rank + 1) // count)


def _gather_outputs(part: Solution, nearest: Solution) -> Solution:
    """Return the solution of all outputs, from the parts of all ranks."""
    parts = distributed.gather_tensors({"codes": part.codes.to(torch.float32), "scale": part.scale}, "solved")
    codes, scale = (torch.cat([tensors[name] for tensors in parts], 1) for name in ("codes", "scale"))
    return Solution(nearest.target, codes, scale.to(torch.float64))


def can_shift_bias(walk: StreamWalk, use: LayerUse) -> bool:
    """Whether a shift of the bias adds no operation.

    That holds for a layer with a bias, and for one with a quantized input, whose integer kernel adds one anyway. A
    float layer without a bias stays without.
    """
    layer, source = use.layer, walk.find_source(use.node, use.layer)
    has_bias = layer.bias is not None or layer.norm is not None
    return has_bias or source is None or walk.get_stub(source) is not None


def _shift_bias(use: LayerUse, shift: Tensor) -> None:
    for layer in use.layer.sharing_layers:
        layer.set_bias_shift(shift.reshape(-1))


def _compute_bias_shift(fit: Moments, holdout: Moments, solution: Solution) -> Tensor:
    """Return the mean mismatch over all rows, fitted and held out."""
    if holdout is fit:
        return fit.mean_mismatch(solution.values)
    sums = [moments.count * moments.mean_mismatch(solution.values) for moments in (fit, holdout)]
    return torch.stack(sums).sum(0) / (fit.count + holdout.count)
