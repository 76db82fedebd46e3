"""Chooses the config of the next trial, for `min_speed` and `max_drop`. Every function is pure: trials in, a plan out.

    min_speed   1. leave the layers in float that the runtime's profiler measured as slower in int8
                2. if there are none, leave the layers in float that gain less than the conversions around them cost
    max_drop    1. the user's config, then the same with activation ranges by another method (free at run time)
                2. more precision, along the Pareto front of error against cost, until a file is within the limit
                3. cheaper again: raise only half of the layers; then a point between the last that failed and the
                   first that passed; then lower single layers

Cost is the share of the float model's size plus the share of its time. The estimates only choose which file to try;
whether it is good enough is decided by the user's metric or by the measured time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scalepoint.allocation import UNCHANGED, Allocation, Widths, compute_front, sum_choices, thin_front, trim_allocation
from scalepoint.pipeline.result import Limits, Trial, TrialPlan
from scalepoint.quantize import Override, QuantConfig, coverage, record_of
from scalepoint.quantize.config import FLOAT, TensorQuantConfig
from scalepoint.results import PrecisionChange
from scalepoint.spec import QParamsCalculatorBase, QuantizationSpec, RangeCalculatorBase
from scalepoint.targets import Target
from scalepoint.verification.layer_times import LayerTime, find_slower_layers

OTHER_RANGES_TEXT = "other ranges"
MIN_STEP_SHARE, MAX_STEP_SHARE = 0.1, 0.5  # bounds of the share of the error that remains after one step up
LAST_STEP_SHARE = 0.1  # the last allowed trial aims at this part of the remaining error: there is no second attempt
TRIM_SHARE = 0.1  # a layer that removes less than this share of the error is not raised
MAX_FRONT_POINTS = 64  # points of the front to consider
CLIPPING_CALCULATORS = ("histogram_mse", "histogram_percentile", "histogram_entropy", "moving_average")

ChoiceKey = tuple[tuple[str, str], ...]  # (layer, precision) pairs: a choice of precisions that can be a dict key


def next_for_speed(trials: Sequence[Trial]) -> TrialPlan | None:
    """Return the last trial's config with more layers in float; None if no layer would be faster in float."""
    last = trials[-1]
    verification = last.verification
    if verification is None or not verification.times:
        return None
    quantized = {site.name for site in record_of(last.model).sites} - set(last.float_layers)
    rows = [row for row in verification.times if row.name in quantized and row.seconds is not None]
    slower = [row.name for row in find_slower_layers(verification.times) if row.name in quantized]
    names = _keep_one_quantized(last, slower or _cheaper_than_conversions(rows, verification.times))
    if not names:
        return None
    overrides = tuple(Override(name=name, weight=FLOAT, activation=FLOAT) for name in names)
    config = last.config.model_copy(update={"overrides": (*last.config.overrides, *overrides)})
    return TrialPlan(config, tuple(PrecisionChange(name, FLOAT) for name in names), len(trials) - 1)


def _cheaper_than_conversions(rows: Sequence[LayerTime], times: Sequence[LayerTime]) -> list[str]:
    """Return the layers whose int8 gains together are less than the time of conversions, which float layers avoid."""
    remaining = sum(row.seconds or 0.0 for row in times if row.is_conversion)
    names: list[str] = []
    for row in sorted((row for row in rows if row.float_seconds is not None), key=lambda row: -row.loss):
        remaining += row.loss
        if remaining <= 0:
            break
        names.append(row.name)
    return names


def _keep_one_quantized(last: Trial, names: Sequence[str]) -> list[str]:
    """Return the layers to leave in float, without the largest one if otherwise nothing would be quantized."""
    quantized_rows = [row for row in coverage(last.model).operations if row.precision != FLOAT]
    if not quantized_rows:
        return []
    if not {row.name for row in quantized_rows} <= set(names):
        return list(names)
    largest = max(quantized_rows, key=lambda row: row.parameters).name
    return [name for name in names if name != largest]


def use_other_ranges(config: QuantConfig, target: Target) -> QuantConfig:
    """Return the config with the other method for ranges.

    Min-max replaces clipping methods, and least squared error replaces min-max. Ranges of 8-bit weights stay.
    """
    update: dict[str, Any] = {
        "activation": _other_range(
            config.activation or (None if target.activations else target.activation), "activation"
        ),
        "weight": _other_range(config.weight or target.weight, "weight"),
        "overrides": tuple(_override_with_other_ranges(override) for override in config.overrides),
    }
    defaults = {"activation": target.activation, "weight": target.weight}
    changed = {
        name: value for name, value in update.items() if value != (getattr(config, name) or defaults.get(name, ()))
    }
    return config.model_copy(update=changed)


def _override_with_other_ranges(override: Override) -> Override:
    roles = ("activation", "input", "output", "weight")
    return override.model_copy(update={role: _other_range(getattr(override, role), role) for role in roles})


def _other_range(value: Any, role: str) -> Any:
    """Return the value of a config field with the other method for its range."""
    if value is None or value == FLOAT:
        return value
    spec: QuantizationSpec = value
    if isinstance(value, TensorQuantConfig):
        spec = value.weight_spec() if role == "weight" else value.activation_spec()
    if role == "weight":
        key = RangeCalculatorBase.key_of(spec.range_calculator_cls)
        if key in ("mse", "percentile", "entropy"):
            return spec.replace(range_calculator_cls="minmax")
        return spec.replace(range_calculator_cls="mse") if key == "minmax" and spec.n_bits < 8 else value
    key = QParamsCalculatorBase.key_of(spec.qparam_calculator_cls)
    if key in CLIPPING_CALCULATORS:
        return spec.replace(qparam_calculator_cls="global_minmax")
    return spec.replace(qparam_calculator_cls="histogram_mse") if key == "global_minmax" else value


def find_start(trials: Sequence[Trial]) -> int:
    """Return the index of the trial whose config gets more precision: the best one that no allocation made."""
    candidates = [index for index, trial in enumerate(trials) if trial.chosen is None]
    return max(candidates, key=lambda index: (trials[index].comparable_score, -index))


def next_for_accuracy(
    trials: Sequence[Trial], widths: Widths, limits: Limits, *, is_last: bool = False
) -> TrialPlan | None:
    """Return the next file to try for `max_drop`; None if no other file could be better.

    Args:
        trials: All trials so far.
        widths: Error and cost of each layer at each precision.
        limits: Limits of score and speed.
        is_last: Whether this is the last allowed trial.
    """
    start = find_start(trials)
    points = _front_points(widths)
    tried = {
        _choice_key(trial.chosen): limits.allows_score(trial.score) for trial in trials if trial.chosen is not None
    }
    tried[_choice_key(as_configured(widths))] = False
    known = {  # index of a tried point -> whether it is within the limit
        index: tried[_choice_key(point.chosen)]
        for index, point in enumerate(points)
        if _choice_key(point.chosen) in tried
    }
    # The cheapest point that passed, and the most expensive point below it that failed.
    passing = min((index for index, passes in known.items() if passes), default=None)
    end = len(points) if passing is None else passing
    failing = max((index for index, passes in known.items() if not passes and index < end), default=-1)
    if passing is None:
        chosen = _step_up(points, failing, _remaining_error_share(trials, limits, is_last=is_last))
    else:
        chosen = _fewer_layers(widths, trials, tried, limits)
        if chosen is None and passing - failing > 1:
            chosen = _middle_point(points, failing, passing)
        chosen = chosen or _one_layer_lower(widths, trials, tried, limits)
    if chosen is None:
        return None
    base_cost = sum(choices[UNCHANGED].cost for choices in widths.to_choice_table("cost").values())
    config = widths.with_overrides(trials[start].config, chosen.chosen)
    raised = _raised_layers(widths, chosen)
    return TrialPlan(config, raised, start, dict(chosen.chosen), max(chosen.cost - base_cost, 0.0))


def as_configured(widths: Widths) -> dict[str, str]:
    """Return the choice that changes no layer."""
    return dict.fromkeys((row.name for row in widths.rows), UNCHANGED)


def _front_points(widths: Widths) -> list[Allocation]:
    """Return the front without raised layers that remove little error, and without points that quantize no weight."""
    weighted = [row.name for row in widths.rows if row.weights]
    items = widths.to_search_items("cost")
    points = [trim_allocation(items, point, TRIM_SHARE) for point in thin_front(compute_front(items), MAX_FRONT_POINTS)]
    unique_points = {_choice_key(point.chosen): point for point in points}.values()
    points = sorted(unique_points, key=lambda point: point.cost)
    if weighted:  # a point with all weights in float is the float model
        points = [point for point in points if any(point.chosen[name] != FLOAT for name in weighted)]
    return points


def _choice_key(chosen: Mapping[str, str] | None) -> ChoiceKey:
    return tuple(sorted((chosen or {}).items()))


def _remaining_error_share(trials: Sequence[Trial], limits: Limits, *, is_last: bool) -> float:
    """Return the share of the error that may remain, assuming that the drop is proportional to the error."""
    drop = min(limits.drop(trial.score) for trial in trials)
    share = (limits.max_drop or 0.0) / drop if drop > 0 else MAX_STEP_SHARE
    share = min(max(share, MIN_STEP_SHARE), MAX_STEP_SHARE)
    return share * LAST_STEP_SHARE if is_last else share


def _step_up(points: Sequence[Allocation], failing: int, share: float) -> Allocation | None:
    """Return the first point above `failing` whose error is at most `share` of that point's; else the last point."""
    higher = points[failing + 1 :]
    if not higher:
        return None
    before = points[max(failing, 0)].error
    return next((point for point in higher if point.error <= share * before), higher[-1])


def _fewer_layers(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[ChoiceKey, bool], limits: Limits
) -> Allocation | None:
    """Raise fewer layers than the cheapest trial within the limit: those that remove most error.

    Their number is halfway between all of its raised layers and the largest number that failed.
    """
    table, best = widths.to_choice_table("cost"), _choices_of_cheapest(trials, limits)
    gains = {name: table[name][UNCHANGED].error - table[name][width].error for name, width in best.items()}
    raised = [name for name, width in best.items() if width != UNCHANGED]
    raised.sort(key=lambda name: -gains[name])

    def raise_first(count: int) -> dict[str, str]:
        names = set(raised[:count])
        return {name: width if name in names else UNCHANGED for name, width in best.items()}

    failed_counts = [count for count in range(len(raised)) if tried.get(_choice_key(raise_first(count))) is False]
    too_few = max(failed_counts, default=0)
    if len(raised) - too_few < 2:
        return None
    return sum_choices(table, raise_first((len(raised) + too_few) // 2))


def _choices_of_cheapest(trials: Sequence[Trial], limits: Limits) -> Mapping[str, str]:
    """Return the choices of the cheapest trial within the limit."""
    passing = [trial for trial in trials if trial.chosen is not None and limits.allows_score(trial.score)]
    best = min(passing, key=lambda trial: trial.cost)
    assert best.chosen is not None  # noqa: S101  # filtered above
    return best.chosen


def _middle_point(points: Sequence[Allocation], failing: int, passing: int) -> Allocation:
    """Return the point in the middle between the two, by cost."""
    low = points[failing].cost if failing >= 0 else points[0].cost
    middle_cost = (low + points[passing].cost) / 2
    return min(points[failing + 1 : passing], key=lambda point: abs(point.cost - middle_cost))


def _one_layer_lower(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[ChoiceKey, bool], limits: Limits
) -> Allocation | None:
    """Lower one layer of the cheapest trial within the limit: the one that adds least error for the cost it saves.

    The total error must stay below that of every failed trial.
    """
    table, best = widths.to_choice_table("cost"), _choices_of_cheapest(trials, limits)
    current = sum_choices(table, best)
    min_failed_error = min(sum_choices(table, dict(key)).error for key, passes in tried.items() if not passes)
    candidates = []
    for name, width in best.items():
        now = table[name][width]
        for cheaper in (choice for choice in table[name].values() if choice.cost < now.cost):
            added_error, saved_cost = cheaper.error - now.error, now.cost - cheaper.cost
            chosen = {**best, name: cheaper.name}
            if _choice_key(chosen) not in tried and current.error + added_error < min_failed_error:
                lowered = Allocation(chosen, current.error + added_error, current.cost - saved_cost)
                candidates.append((added_error / saved_cost, name, lowered))
    if not candidates:
        return None
    _, _, best_candidate = min(candidates, key=lambda candidate: candidate[:2])
    return best_candidate


def _raised_layers(widths: Widths, chosen: Allocation) -> tuple[PrecisionChange, ...]:
    """Return the layers with more precision, the one with the largest gain for its cost first."""
    table, changes = widths.to_choice_table("cost"), []
    for row in widths.rows:
        precision, layer_count = chosen.chosen[row.name], len(row.layers)
        if precision == UNCHANGED:
            continue
        before, after = table[row.name][UNCHANGED], table[row.name][precision]
        gain = (before.error - after.error) / layer_count  # layers of a row share their precision
        cost = (after.cost - before.cost) / layer_count
        changes += [PrecisionChange(layer, precision, gain, cost) for layer in row.layers]
    return tuple(sorted(changes, key=lambda change: -(change.gain or 0.0) / max(change.cost, 1e-12)))
