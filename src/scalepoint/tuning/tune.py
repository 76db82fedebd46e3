"""tune: codes, scales and bias shifts of the quantized weights, so that the quantized net computes what the float does.

    walk both streams to a layer -> moments of its rows -> steps, judged on held-out rows -> choose -> walk on

One walk over the graph, node after node: no prefix is run twice. The float parameters are never written.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, fx

from scalepoint.errors import ConfigError, NonFiniteError
from scalepoint.progress import phase
from scalepoint.quantize.calibrate import OnNan, freeze
from scalepoint.quantize.config import Config
from scalepoint.quantize.feeding import Data
from scalepoint.quantize.record import record_of
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import RangeCalculatorBase
from scalepoint.tuning.checkpoint import Checkpoint, Chosen, mark_of
from scalepoint.tuning.moments import Moments, Sums
from scalepoint.tuning.problem import Problem, Shape, Solution, noted
from scalepoint.tuning.report import TunedLayer, TuneReport
from scalepoint.tuning.rows import Geometry, chosen_rows, geometry_of, uniform
from scalepoint.tuning.steps import INTERCEPT, find_step, step_names
from scalepoint.tuning.walk import Walk, inputs_of_batches

FEW_SAMPLES = 10  # with fewer, single rows are held out instead of whole samples
CHUNK = 4096  # rows that are gathered at once
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(value: Any) -> Any:
    """2_000_000_000, or "2GB"."""
    text = str(value).strip().upper().replace(" ", "")
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    return value


class TuneConfig(Config):
    """How to tune: the steps in their order, rows a layer, the share that judges, memory for values between layers."""

    steps: tuple[str, ...] = (INTERCEPT, "target", "scale", "gptq", "descend")
    unit: Literal["layer"] = "layer"
    rows: Annotated[int, Field(ge=64)] = 16_384
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    memory: Annotated[int, BeforeValidator(_bytes), Field(ge=1_000_000)] = 2_000_000_000

    def check(self) -> None:
        for name in self.steps:
            if name != INTERCEPT:
                find_step(name)
        if not self.steps:
            raise ConfigError(f"steps=() tunes nothing: choose from {', '.join(step_names())}")


def tune(
    model: fx.GraphModule,
    data: Data,
    config: TuneConfig | Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    max_batches: int | None = None,
    on_nan: OnNan = "error",
    progress: bool | None = None,
) -> TuneReport:
    """Choose the codes of all quantized weights of a calibrated model; it is changed, and stays frozen.

    `data` is what `calibrate` takes. No layer ends worse than with the nearest codes on held-out rows. With a `folder`
    every finished layer is kept there, and resume=True goes on after the last of them.
    """
    config = TuneConfig() if config is None else config if isinstance(config, TuneConfig) else TuneConfig(**config)
    config.check()
    record = record_of(model)
    freeze(model)
    start = time.perf_counter()
    skip_nan = on_nan == "skip"
    batches = inputs_of_batches(model, data, max_batches=max_batches, skip_nan=skip_nan, progress=progress)
    mark = "" if folder is None else mark_of(model, batches, config.model_dump_json())
    kept = Checkpoint(None if folder is None else Path(folder), mark, resume=resume)
    walk = Walk(model, batches, memory=config.memory)
    names = record.names
    run = _Tuning(model, walk, config, kept)
    layers = [node for node in model.graph.nodes if walk.layer(node) is not None]
    try:
        with phase("tuning", total=len(layers), unit="layers", show=progress) as running:
            for node in model.graph.nodes:
                if node in layers:
                    run.solve(node, names.get(node.name, str(node.target)))
                    running.advance()
                walk.advance(node)
    finally:
        walk.shelf.close()
    return TuneReport(tuple(run.rows), run.left, walk.count, run.samples, time.perf_counter() - start)


@dataclass
class _Tuning:
    """One run of tune."""

    model: fx.GraphModule
    walk: Walk
    config: TuneConfig
    kept: Checkpoint
    rows: list[TunedLayer] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    done: set[int] = field(default_factory=set)

    def solve(self, node: fx.Node, name: str) -> None:
        found = self.walk.layer(node)
        assert found is not None  # noqa: S101  # only such nodes are asked for
        place, live = found
        own = self.model.get_submodule(place)
        assert isinstance(own, QuantizedWeighted)  # noqa: S101  # the walk's model is a copy of it
        geometry = geometry_of(live)
        why = self._why_not(live, geometry)
        if why or geometry is None:
            self.left[name] = why
            return
        self.done.add(id(live.weight_quant))
        chosen = self.kept.find(place) or self._chosen(node, place, Shape(live, geometry), name)
        if chosen is None:
            self.left[name] = "no rows reached it"
            return
        if chosen.solution is not None:
            for each in (live, own):
                Shape(each, geometry).apply(chosen.solution, chosen.shift)
        self.kept.keep(place, chosen)
        self.rows.append(chosen.row)

    def _chosen(self, node: fx.Node, place: str, shape: Shape, name: str) -> Chosen | None:
        """The best solution on held-out rows; None as that when the nearest codes are."""
        start = time.perf_counter()
        weight = shape.weight()
        fit, judge = self._seen(node, place, shape.geometry, weight, name)
        if fit is None or judge is None:
            return None
        first, has_bias = shape.start(weight), INTERCEPT in self.config.steps
        low, high = shape.limits()
        problem = Problem(name, weight, low, high, fit, judge, shape.has_own_scales, has_bias)
        plain = replace(problem, has_intercept=False)
        best, step = self._best(problem, plain, first)
        shift = self._shift(fit, judge, weight, best) if has_bias and step else None
        after = problem if step else plain
        moved = float((best.codes != first.codes).to(torch.float64).mean())
        errors = (plain.error(first), after.error(best), plain.error(first, fit), after.error(best, fit))
        seen, taken = fit.count + judge.count, time.perf_counter() - start
        kind = shape.layer.kind
        row = TunedLayer(name, kind, seen, fit.size, *errors, moved, step, noted(problem.notes), taken)
        return Chosen(best if step else None, shift, row)

    def _why_not(self, layer: QuantizedWeighted, geometry: Geometry | None) -> str:
        """The reason to leave a layer as it is; "" when there is none."""
        quant, grid = layer.weight_quant, layer.weight_quant.quantizer.grid
        key = RangeCalculatorBase.key_of(quant.spec.range_calculator_cls)
        reasons = (
            (id(quant) in self.done, "its weight is shared with a layer before it"),
            (quant.quantizer.is_disabled(), quant.quantizer.reason),
            (quant.chosen is not None, "its codes were chosen before: quantize anew to choose again"),
            (grid.format.is_float, f"codes of {grid.format.name} are not whole numbers"),
            (quant.spec.qformulation != "zp", "its codes are relative to a minimum, not to a zero point"),
            (key == "pair_safe", "its codes obey the pair rule of this CPU, which the steps do not know"),
            (geometry is None, "it pads with other things than zeros"),
        )
        return next((why for is_so, why in reasons if is_so), "")

    def _best(self, problem: Problem, plain: Problem, first: Solution) -> tuple[Solution, str]:
        """The solution that is best on held-out rows; "" as its step when that is the first."""
        best, step, least = first, "", plain.error(first)
        now = first
        for name in self.config.steps:
            now = now if name == INTERCEPT else find_step(name)(problem, now)
            error = problem.error(now)
            if error < least:
                best, step, least = now, name, error
        return best, step

    def _shift(self, fit: Moments, judge: Moments, weight: Tensor, best: Solution) -> Tensor:
        """What the bias takes up, from all rows."""
        parts = [(each.count, each.mismatch(weight, best.values)) for each in (fit, judge)]
        return torch.stack([count * part for count, part in parts]).sum(0) / sum(count for count, _ in parts)

    def _seen(
        self, node: fx.Node, place: str, geometry: Geometry, weight: Tensor, name: str
    ) -> tuple[Moments | None, Moments | None]:
        """Moments of nine tenths of the rows, and of the rest."""
        counts = [geometry.positions(exact) for exact, _ in self.walk.inputs(node, place)]
        self.samples = max(self.samples, sum(samples for samples, _ in counts))
        total, samples = sum(a * b for a, b in counts), sum(a for a, _ in counts)
        share = min(1.0, self.config.rows / max(total, 1))
        sums, before = (Sums(weight), Sums(weight)), 0
        for (count, each), (exact, noisy) in zip(counts, self.walk.inputs(node, place), strict=True):
            places = chosen_rows(before, count, each, share)
            numbers = before * each + places
            of_judge = uniform(numbers // each if samples >= FEW_SAMPLES else numbers, salt=1) < self.config.holdout
            for held, taken in ((False, sums[0]), (True, sums[1])):
                chosen = places[of_judge == held]
                for start in range(0, len(chosen), CHUNK):
                    part = chosen[start : start + CHUNK]
                    pair = geometry.rows(exact, part), geometry.rows(noisy, part)
                    if not all(bool(rows.isfinite().all()) for rows in pair):
                        raise NonFiniteError(
                            f"{name}: its input holds NaN or infinity. Mend the data, or leave such batches out: "
                            "on_nan='skip'"
                        )
                    taken.add(*pair)
            before += count
        if sums[1].around is None:  # too few to hold any out
            return sums[0].moments(), sums[0].moments()
        return sums[0].moments() or sums[1].moments(), sums[1].moments()
