"""Which config to try next, for `min_speed` and `max_drop`. Every function is pure: trials in, a plan out.

    min_speed   leave in float what the runtime's profiler found slower in int8; then, where only conversions are left
                to win, the layers that gain less than the conversions cost
    max_drop    0          the config as given
                1          activation ranges by the other method, which costs nothing at run time
                upwards    along the front of error against cost, until a file holds the limit
                downwards  of what held, only the layers that remove most error, half as many each time; then the middle
                           between what failed and what held, by cost; then single layers lowered again

    cost = share of the float model's size + share of its time

The user's metric or the clock judges each file. Estimates only say which file to try.
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
MIN_STEP_SHARE, MAX_STEP_SHARE = 0.1, 0.5  # how much of the error may remain after a step upwards
LAST_STEP_SHARE = 0.1  # the last allowed trial goes this much further
TRIM_SHARE = 0.1  # share of the error: a layer that removes less is not raised
MAX_FRONT_POINTS = 64  # of the front; a search looks at few of them
CLIPPING_CALCULATORS = ("histogram_mse", "histogram_percentile", "histogram_entropy", "moving_average")

ChoiceKey = tuple[tuple[str, str], ...]


def next_for_speed(trials: Sequence[Trial]) -> TrialPlan | None:
    """The last trial with more layers in float; None if nothing is left to win."""
    last = trials[-1]
    verification = last.verification
    if verification is None or not verification.times:
        return None
    quantized = {site.name for site in record_of(last.model).sites} - set(last.float_layers)
    rows = [row for row in verification.times if row.name in quantized and row.seconds is not None]
    slower = [row.name for row in find_slower_layers(verification.times) if row.name in quantized]
    moved = _keep_one_quantized(last, slower or _cheaper_than_conversions(rows, verification.times))
    if not moved:
        return None
    overrides = tuple(Override(name=name, weight=FLOAT, activation=FLOAT) for name in moved)
    config = last.config.model_copy(update={"overrides": (*last.config.overrides, *overrides)})
    return TrialPlan(config, tuple(PrecisionChange(name, FLOAT) for name in moved), len(trials) - 1)


def _cheaper_than_conversions(rows: Sequence[LayerTime], times: Sequence[LayerTime]) -> list[str]:
    """Layers whose gains together are less than the time of conversions: in float, some conversions go."""
    remaining = sum(row.seconds or 0.0 for row in times if row.is_conversion)
    names: list[str] = []
    for row in sorted((row for row in rows if row.float_seconds is not None), key=lambda row: -row.loss):
        remaining += row.loss
        if remaining <= 0:
            break
        names.append(row.name)
    return names


def _keep_one_quantized(last: Trial, moved: Sequence[str]) -> list[str]:
    """Leave the layer with the largest weight quantized if otherwise nothing would be."""
    rows = [row for row in coverage(last.model).operations if row.precision != FLOAT]
    if not rows:
        return []
    if not {row.name for row in rows} <= set(moved):
        return list(moved)
    largest = max(rows, key=lambda row: row.parameters).name
    return [name for name in moved if name != largest]


def use_other_ranges(config: QuantConfig, target: Target) -> QuantConfig:
    """The config with ranges by the other method: min-max instead of clipping, least squared error instead of min-max.

    Ranges of 8-bit weights stay.
    """
    update: dict[str, Any] = {
        "activation": _other_range(
            config.activation or (None if target.activations else target.activation), "activation"
        ),
        "weight": _other_range(config.weight or target.weight, "weight"),
        "overrides": tuple(_override_with_other_ranges(each) for each in config.overrides),
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
    """The same field of a config, with a spec whose range is found by the other method."""
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
    """The trial whose config gets more precision: the better one of those that no allocation made."""
    plain = [index for index, trial in enumerate(trials) if trial.chosen is None]
    return max(plain, key=lambda index: (trials[index].comparable_score, -index))


def next_for_accuracy(
    trials: Sequence[Trial], widths: Widths, limits: Limits, *, is_last: bool = False
) -> TrialPlan | None:
    """The next file to try for `max_drop`; None if no other could be better.

    Args:
        trials: All trials so far.
        widths: Error and cost of each layer at each precision.
        limits: What a file must hold.
        is_last: Whether this is the last allowed trial.
    """
    start = find_start(trials)
    points = _front_points(widths)
    tried = {
        _choice_key(trial.chosen): limits.allows_score(trial.score) for trial in trials if trial.chosen is not None
    }
    tried[_choice_key(as_configured(widths))] = False
    known = {
        index: tried[_choice_key(point.chosen)]
        for index, point in enumerate(points)
        if _choice_key(point.chosen) in tried
    }
    holding = min((index for index, holds in known.items() if holds), default=None)
    failing = max((index for index in known if not known[index] and index < (holding or len(points))), default=-1)
    if holding is None:
        chosen = _step_up(points, failing, _remaining_error_share(trials, limits, is_last=is_last))
    else:
        chosen = _fewer_layers(widths, trials, tried, limits)
        if chosen is None and holding - failing > 1:
            chosen = _middle_point(points, failing, holding)
        chosen = chosen or _one_layer_lower(widths, trials, tried, limits)
    if chosen is None:
        return None
    base_cost = sum(choices[UNCHANGED].cost for choices in widths.table("cost").values())
    config = widths.config(trials[start].config, chosen.chosen)
    raised = _raised_layers(widths, chosen)
    return TrialPlan(config, raised, start, dict(chosen.chosen), max(chosen.cost - base_cost, 0.0))


def as_configured(widths: Widths) -> dict[str, str]:
    """The choice that changes no layer."""
    return dict.fromkeys((row.name for row in widths.rows), UNCHANGED)


def _front_points(widths: Widths) -> list[Allocation]:
    """The front without layers that are hardly worth raising. At least one layer with weights stays quantized."""
    weighted = [row.name for row in widths.rows if row.weights]
    items = widths.items("cost")
    lowered = [
        trim_allocation(items, point, TRIM_SHARE) for point in thin_front(compute_front(items), MAX_FRONT_POINTS)
    ]
    points = sorted({_choice_key(each.chosen): each for each in lowered}.values(), key=lambda point: point.cost)
    return [each for each in points if not weighted or any(each.chosen[name] != FLOAT for name in weighted)]


def _choice_key(chosen: Mapping[str, str] | None) -> ChoiceKey:
    return tuple(sorted((chosen or {}).items()))


def _remaining_error_share(trials: Sequence[Trial], limits: Limits, *, is_last: bool) -> float:
    """How much of the error may remain, if the drop is proportional to it."""
    drop = min(limits.drop(trial.score) for trial in trials)
    share = (limits.max_drop or 0.0) / drop if drop > 0 else MAX_STEP_SHARE
    share = min(max(share, MIN_STEP_SHARE), MAX_STEP_SHARE)
    return share * LAST_STEP_SHARE if is_last else share


def _step_up(points: Sequence[Allocation], failing: int, share: float) -> Allocation | None:
    higher = points[failing + 1 :]
    if not higher:
        return None
    before = points[max(failing, 0)].error
    return next((point for point in higher if point.error <= share * before), higher[-1])


def _fewer_layers(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[ChoiceKey, bool], limits: Limits
) -> Allocation | None:
    """Of the layers that the cheapest holding trial raised, those that remove most error: the middle between all of
    them and the largest number that was too small."""
    table, best = widths.table("cost"), _choices_of_cheapest(trials, limits)
    gains = {name: table[name][UNCHANGED].error - table[name][width].error for name, width in best.items()}
    order = sorted((name for name, width in best.items() if width != UNCHANGED), key=lambda name: -gains[name])

    def first(count: int) -> dict[str, str]:
        names = set(order[:count])
        return {name: width if name in names else UNCHANGED for name, width in best.items()}

    too_few = max((count for count in range(len(order)) if tried.get(_choice_key(first(count))) is False), default=0)
    if len(order) - too_few < 2:
        return None
    return sum_choices(table, first((len(order) + too_few) // 2))


def _choices_of_cheapest(trials: Sequence[Trial], limits: Limits) -> Mapping[str, str]:
    """The choices of the cheapest trial that holds the limit."""
    holding = [trial for trial in trials if trial.chosen is not None and limits.allows_score(trial.score)]
    best = min(holding, key=lambda trial: trial.cost)
    assert best.chosen is not None  # noqa: S101  # filtered above
    return best.chosen


def _middle_point(points: Sequence[Allocation], failing: int, holding: int) -> Allocation:
    """The point in the middle between the two, by cost."""
    low = points[failing].cost if failing >= 0 else points[0].cost
    wanted = (low + points[holding].cost) / 2
    return min(points[failing + 1 : holding], key=lambda point: abs(point.cost - wanted))


def _one_layer_lower(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[ChoiceKey, bool], limits: Limits
) -> Allocation | None:
    """The cheapest holding trial with one layer lowered: where that adds least error for what it saves, and less than
    the best failed trial has."""
    table, best = widths.table("cost"), _choices_of_cheapest(trials, limits)
    current = sum_choices(table, best)
    least_failed = min(sum_choices(table, dict(key)).error for key, holds in tried.items() if not holds)
    candidates = []
    for name, width in best.items():
        now = table[name][width]
        for other in (each for each in table[name].values() if each.cost < now.cost):
            added, saved = other.error - now.error, now.cost - other.cost
            chosen = {**best, name: other.name}
            if _choice_key(chosen) not in tried and current.error + added < least_failed:
                lowered = Allocation(chosen, current.error + added, current.cost - saved)
                candidates.append((added / saved, name, lowered))
    return min(candidates, key=lambda each: each[:2])[2] if candidates else None


def _raised_layers(widths: Widths, chosen: Allocation) -> tuple[PrecisionChange, ...]:
    """The layers that got more precision, the one that gains most for its cost first."""
    table, raised = widths.table("cost"), []
    for row in widths.rows:
        to, share = chosen.chosen[row.name], len(row.layers)
        if to == UNCHANGED:
            continue
        before, after = table[row.name][UNCHANGED], table[row.name][to]
        gain, cost = (before.error - after.error) / share, (after.cost - before.cost) / share
        raised += [PrecisionChange(layer, to, gain, cost) for layer in row.layers]
    return tuple(sorted(raised, key=lambda each: -(each.gain or 0.0) / max(each.cost, 1e-12)))
