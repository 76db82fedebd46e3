"""Who gets which precision: the least error for a cost, by a Lagrangian sweep.

    minimise  sum_i error_i(c_i) + lam sum_i cost_i(c_i)          c_i the choice of item i, for every lam at once

For one lam every item decides alone; as lam falls it climbs the lower convex hull of its own (cost, error) points. So
the rungs of all items, sorted by error removed per cost, are the front of the whole: each of its points is exactly the
least error for its cost. Between two points `within` fills what a budget leaves, and `trimmed` gives back what is
not worth having.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

RELATIVE_TOLERANCE = 1e-9  # of a limit: what sums of floats may be off


@dataclass(frozen=True)
class PrecisionChoice:
    """One precision of an item: its cost, and the error that it adds to the output."""

    name: str
    error: float
    cost: float


ChoiceTable = Mapping[str, Mapping[str, PrecisionChoice]]  # item -> name of a choice -> the choice


@dataclass(frozen=True)
class Item:
    """A layer, or several that share a precision, with the choices in order of cost."""

    name: str
    choices: tuple[PrecisionChoice, ...]


@dataclass(frozen=True)
class Allocation:
    """One precision for every item.

    Attributes:
        chosen: Name of the choice by name of the item.
        error: Sum of the errors.
        cost: Sum of the costs.
    """

    chosen: Mapping[str, str]
    error: float
    cost: float


def compute_front(items: Sequence[Item]) -> tuple[Allocation, ...]:
    """Compute the allocations from the cheapest to the one with the least error.

    Args:
        items: The layers with error and cost at each precision.

    Returns:
        Allocations in order of cost; each raises one layer by one step.
    """
    _check_items(items)
    hulls = [lower_hull(item.choices) for item in items]
    places = [0] * len(items)
    found = [_make_allocation(items, [steps[0] for steps in hulls])]
    for index in _order_of_raises(hulls):
        places[index] += 1
        found.append(_make_allocation(items, [steps[place] for steps, place in zip(hulls, places, strict=True)]))
    return tuple(found)


def sum_choices(table: ChoiceTable, chosen: Mapping[str, str]) -> Allocation:
    """Sum error and cost of a choice for every item.

    Args:
        table: Choices by item and name.
        chosen: Name of the choice by name of the item.
    """
    choices = [table[name][choice] for name, choice in chosen.items()]
    return Allocation(chosen, sum(choice.error for choice in choices), sum(choice.cost for choice in choices))


def thin_front(points: Sequence[Allocation], most: int) -> list[Allocation]:
    """Choose at most `most` points of a front, evenly by cost. The first and the last stay.

    Args:
        points: The front.
        most: How many points to keep.

    Returns:
        The chosen points, in order.
    """
    if len(points) <= most:
        return list(points)
    first, last = points[0].cost, points[-1].cost
    wanted = [first + (last - first) * index / (most - 1) for index in range(most)]
    places = {min(range(len(points)), key=lambda place, cost=cost: abs(points[place].cost - cost)) for cost in wanted}  # type: ignore[misc]
    return [points[place] for place in sorted({0, *places, len(points) - 1})]


def find_best_within(items: Sequence[Item], limit: float) -> Allocation | None:
    """Find the allocation with the least error that costs no more than a limit.

    At the points of the front the result is exact. Between two of them it is the better of two heuristics: fill up from
    the point below, or lower the point above.

    Args:
        items: The layers with error and cost at each precision.
        limit: The largest cost.

    Returns:
        The allocation, or None if even the cheapest one costs more.
    """
    points = compute_front(items)
    limit += RELATIVE_TOLERANCE * abs(limit)
    fitting = [point for point in points if point.cost <= limit]
    if not fitting:
        return None
    below = _fill_up(items, _get_choices(items, fitting[-1]), limit)
    if len(fitting) == len(points):
        return below
    above = _fill_up(items, _lower_until_fits(items, _get_choices(items, points[len(fitting)]), limit), limit)
    return min(below, above, key=lambda found: (found.error, found.cost))


def trim_allocation(items: Sequence[Item], found: Allocation, share: float) -> Allocation:
    """Lower the precision of layers again where that adds least error.

    Args:
        items: The layers with error and cost at each precision.
        found: The allocation to start from.
        share: All changes together may add this share of its error.

    Returns:
        The cheaper allocation.
    """
    picked, allowed = _get_choices(items, found), found.error * (1 + share)
    while True:
        steps = [
            (other.error - now.error, index, other)
            for index, (item, now) in enumerate(zip(items, picked, strict=True))
            for other in item.choices
            if other.cost < now.cost and found.error + other.error - now.error <= allowed
        ]
        if not steps:
            return found
        _, place, other = min(steps, key=lambda step: step[:2])
        picked[place] = other
        found = _make_allocation(items, picked)


def lower_hull(choices: Sequence[PrecisionChoice]) -> list[PrecisionChoice]:
    """The lower convex hull, the cheapest first: what is worth its cost for some price of an error."""
    kept: list[PrecisionChoice] = []
    for each in sorted(choices, key=lambda choice: (choice.cost, choice.error)):
        if kept and each.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _error_per_cost(kept[-2], kept[-1]) <= _error_per_cost(kept[-2], each):
            kept.pop()
        kept.append(each)
    return kept


def _error_per_cost(one: PrecisionChoice, other: PrecisionChoice) -> float:
    """The error that is removed for each unit of cost."""
    cost = other.cost - one.cost
    return (one.error - other.error) / cost if cost > 0 else math.inf


def _order_of_raises(hulls: Sequence[Sequence[PrecisionChoice]]) -> list[int]:
    """The items in the order of their rungs, the most worthwhile first; of equals the earlier item."""
    rungs = [(-_error_per_cost(low, high), index) for index, steps in enumerate(hulls) for low, high in pairwise(steps)]
    return [index for _, index in sorted(rungs)]


def _make_allocation(items: Sequence[Item], picked: Sequence[PrecisionChoice]) -> Allocation:
    chosen = {item.name: choice.name for item, choice in zip(items, picked, strict=True)}
    return Allocation(chosen, math.fsum(each.error for each in picked), math.fsum(each.cost for each in picked))


def _get_choices(items: Sequence[Item], found: Allocation) -> list[PrecisionChoice]:
    return [next(each for each in item.choices if each.name == found.chosen[item.name]) for item in items]


def _fill_up(items: Sequence[Item], picked: list[PrecisionChoice], limit: float) -> Allocation:
    """Raised by whatever still fits, the most worthwhile first."""
    while True:
        left = limit - math.fsum(each.cost for each in picked)
        steps = [
            (_error_per_cost(now, other), -index, other)
            for index, (item, now) in enumerate(zip(items, picked, strict=True))
            for other in item.choices
            if other.error < now.error and other.cost - now.cost <= left
        ]
        if not steps:
            return _make_allocation(items, picked)
        _, place, other = max(steps, key=lambda step: step[:2])
        picked[-place] = other


def _lower_until_fits(items: Sequence[Item], picked: list[PrecisionChoice], limit: float) -> list[PrecisionChoice]:
    """Lowered where that costs the least error for what it saves, until it fits."""
    while math.fsum(each.cost for each in picked) > limit:
        steps = [
            (_error_per_cost(other, now), index, other)
            for index, (item, now) in enumerate(zip(items, picked, strict=True))
            for other in item.choices
            if other.cost < now.cost
        ]
        _, place, other = min(steps, key=lambda step: step[:2])
        picked[place] = other
    return picked


def _check_items(items: Sequence[Item]) -> None:
    names = [item.name for item in items]
    if len(set(names)) != len(names):
        raise ValueError(f"two items of one name: {', '.join(names)}")
    for item in items:
        if not item.choices:
            raise ValueError(f"{item.name}: it has no choice")
        for each in item.choices:
            if not (math.isfinite(each.error) and math.isfinite(each.cost)):
                raise ValueError(f"{item.name}, {each.name}: an error of {each.error} at a cost of {each.cost}")
