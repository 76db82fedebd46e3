"""A precision for every layer, as a stage of a run: for a budget, or for what `max_drop` may raise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalepoint.allocation import Allocation, Budget, Widths, front, measure_widths, thinned
from scalepoint.allocation.losses import SOLVER
from scalepoint.allocation.widths import Costs
from scalepoint.deployment.marks import Watched, mark
from scalepoint.deployment.run import Run
from scalepoint.quantize import QuantConfig
from scalepoint.report import Allocated, AllocatedLayer, FrontPoint
from scalepoint.transformation import transform

MOST_POINTS = 200  # of the front in a report
CHOICES = ("int4", "int8", "float")


def widths_of(run: Run, config: QuantConfig, choices: Sequence[str] | None) -> Widths:
    """Every layer at every choice; None as choices: as it is, and all that is more."""
    args, kwargs = run.inputs
    marks = {
        **run.marks_of_quantizing(config),
        "choices": mark(choices),
        "the calibration data": Watched(run.data, None, run.max_batches).mark_now() if run.has_data else "none",
    }
    with run.stage("widths", "measuring widths", marks, is_timed=False) as stage:
        found = stage.reuse(Widths.from_dict)
        if found is None:
            with run.timed("measuring widths", is_phase=False):
                result = transform(
                    run.model, args, target=run.target, kwargs=kwargs, leave=run.leave, dynamic_axes=run.dynamic_axes
                )
                found = measure_widths(
                    result, config, run.target, choices, run.data if run.has_data else run.example(),
                    steps=_solver(run), max_batches=run.max_batches,
                    on_nan=run.on_nan, progress=run.progress,
                )  # fmt: skip
            stage.keep(found.to_dict())
    return found


def _solver(run: Run) -> tuple[str, ...] | None:
    """What stands for the tuning that will follow."""
    return None if not run.has_data else () if run.accuracy == "fast" else SOLVER


def corrected(widths: Widths, written: Allocation, size: int, float_size: int) -> Widths:
    """The same with what the files really hold beside the weights, from one that was written."""
    return replace(widths, float_size=float(float_size), rest_size=size - written.cost)


def allocated(widths: Widths, chosen: Mapping[str, str], unit: Costs, budget: Budget | None = None) -> Allocated:
    """For the report: what every layer got, and the front that it was taken from."""
    items = {item.name: {each.name: each for each in item.choices} for item in widths.items(unit)}
    layers = tuple(
        AllocatedLayer(
            name, row.kind, row.weights // len(row.layers), chosen[row.name],
            {each.name: each.error / len(row.layers) for each in row.widths}, row.refused,
        )
        for row in widths.rows
        for name in row.layers
    )  # fmt: skip
    found = _summed(items, chosen)
    points = [FrontPoint(widths.shown(unit, each.cost), each.error, _counts(widths, each.chosen)) for each in
              thinned(front(widths.items(unit)), MOST_POINTS)]  # fmt: skip
    names = dict.fromkeys(width.name for row in widths.rows for width in row.widths)
    uniform = {}
    for name in names:
        if all(name in choices for choices in items.values()):
            whole = _summed(items, dict.fromkeys(items, name))
            uniform[name] = (widths.shown(unit, whole.cost), whole.error)
    reached = widths.shown(unit, found.cost)
    return Allocated(unit, reached, found.error, layers, tuple(points), uniform, budget.limit if budget else None)


def _summed(items: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, str]) -> Allocation:
    picked = [items[name][width] for name, width in chosen.items()]
    return Allocation(chosen, sum(each.error for each in picked), sum(each.cost for each in picked))


def _counts(widths: Widths, chosen: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in widths.rows:
        found[chosen[row.name]] = found.get(chosen[row.name], 0) + len(row.layers)
    return found
