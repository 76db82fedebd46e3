"""Which layer gets which precision: the least error for a cost, by a Lagrangian sweep.

    minimise  sum_i error_i(c_i) + lam sum_i cost_i(c_i)          c_i the choice of item i, for every lam at once

For one lam every item can choose by itself. As lam decreases, each item moves along the lower convex hull of its (cost,
error) points; one segment of a hull is a "raise". So sorting the raises of all items by error removed per cost gives
the Pareto front of the sums; each of its points has the least error for its cost. `find_best_within` also searches
between two points, and `trim_allocation` lowers layers again that gain little.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

RELATIVE_TOLERANCE = 1e-9  # of a limit, for rounding in sums of floats


@dataclass(frozen=True)
class PrecisionChoice:
    """One precision of an item: its cost, and the error that it adds to the output."""

    name: str
    error: float
    cost: float


ChoiceTable = Mapping[str, Mapping[str, PrecisionChoice]]  # item -> name of a choice -> the choice


@dataclass(frozen=True)
class Item:
    """A layer, or several that must have the same precision, with the choices in order of cost."""

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
        Allocations in order of cost; each raises one item by one segment of its hull.
    """
    _check_items(items)
    hulls = [lower_hull(item.choices) for item in items]
    levels = [0] * len(items)  # index into the hull of each item
    front = [_make_allocation(items, [hull[0] for hull in hulls])]
    for index in _order_of_raises(hulls):
        levels[index] += 1
        choices = [hull[level] for hull, level in zip(hulls, levels, strict=True)]
        front.append(_make_allocation(items, choices))
    return tuple(front)


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
    indices = {0, len(points) - 1}
    for number in range(most):
        cost = first + (last - first) * number / (most - 1)
        distances = [abs(point.cost - cost) for point in points]
        indices.add(distances.index(min(distances)))
    return [points[index] for index in sorted(indices)]


def find_best_within(items: Sequence[Item], limit: float) -> Allocation | None:
    """Find the allocation with the least error that costs no more than a limit.

    If the limit is the cost of a point of the front, no allocation within it has less error. Between two points the
    result is the better of two heuristics: fill up from the point below, or lower the point above.

    Args:
        items: The layers with error and cost at each precision.
        limit: The largest cost.

    Returns:
        The allocation, or None if even the cheapest one costs more.
    """
    points = compute_front(items)
    limit += RELATIVE_TOLERANCE * abs(limit)
    affordable = [point for point in points if point.cost <= limit]
    if not affordable:
        return None
    filled = _fill_up(items, _get_choices(items, affordable[-1]), limit)
    if len(affordable) == len(points):
        return filled
    next_point = points[len(affordable)]
    lowered = _fill_up(items, _lower_until_fits(items, _get_choices(items, next_point), limit), limit)
    return min(filled, lowered, key=lambda allocation: (allocation.error, allocation.cost))


def trim_allocation(items: Sequence[Item], allocation: Allocation, share: float) -> Allocation:
    """Lower the precision of layers again where that adds least error.

    Args:
        items: The layers with error and cost at each precision.
        allocation: The allocation to start from.
        share: All changes together may add this share of its error.

    Returns:
        The cheaper allocation.
    """
    choices, max_error = _get_choices(items, allocation), allocation.error * (1 + share)
    while True:
        steps = [
            (cheaper.error - current.error, index, cheaper)
            for index, current, cheaper in _cheaper_choices(items, choices)
            if allocation.error + cheaper.error - current.error <= max_error
        ]
        if not steps:
            return allocation
        _, index, choice = min(steps, key=_by_priority)
        choices[index] = choice
        allocation = _make_allocation(items, choices)


def _cheaper_choices(
    items: Sequence[Item], choices: Sequence[PrecisionChoice]
) -> Iterator[tuple[int, PrecisionChoice, PrecisionChoice]]:
    """Yield every way to lower one item: its index, its present choice and a cheaper one."""
    for index, (item, current) in enumerate(zip(items, choices, strict=True)):
        for choice in item.choices:
            if choice.cost < current.cost:
                yield index, current, choice


def _by_priority(step: tuple[float, int, PrecisionChoice]) -> tuple[float, int]:
    """Order steps by their first value and of equals by the index of the item; choices cannot be compared."""
    return step[:2]


def lower_hull(choices: Sequence[PrecisionChoice]) -> list[PrecisionChoice]:
    """Return the lower convex hull of the (cost, error) points, the cheapest first."""
    hull: list[PrecisionChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.cost, choice.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _error_per_cost(hull[-2], hull[-1]) <= _error_per_cost(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _error_per_cost(low: PrecisionChoice, high: PrecisionChoice) -> float:
    """Return the error that is removed per unit of cost, from one choice to a more expensive one."""
    cost = high.cost - low.cost
    return (low.error - high.error) / cost if cost > 0 else math.inf


def _order_of_raises(hulls: Sequence[Sequence[PrecisionChoice]]) -> list[int]:
    """Return the index of the item of each raise: most error removed per cost first, and of equals the earlier item."""
    raises: list[tuple[float, int]] = []
    for index, hull in enumerate(hulls):
        raises += [(-_error_per_cost(low, high), index) for low, high in pairwise(hull)]
    return [index for _, index in sorted(raises)]


def _make_allocation(items: Sequence[Item], choices: Sequence[PrecisionChoice]) -> Allocation:
    chosen = {item.name: choice.name for item, choice in zip(items, choices, strict=True)}
    return Allocation(chosen, math.fsum(choice.error for choice in choices), _total_cost(choices))


def _total_cost(choices: Sequence[PrecisionChoice]) -> float:
    return math.fsum(choice.cost for choice in choices)


def _get_choices(items: Sequence[Item], allocation: Allocation) -> list[PrecisionChoice]:
    """Return the choices of an allocation, in the order of the items."""
    return [next(choice for choice in item.choices if choice.name == allocation.chosen[item.name]) for item in items]


def _fill_up(items: Sequence[Item], choices: list[PrecisionChoice], limit: float) -> Allocation:
    """Raise items while the limit allows it, most error removed per cost first. Changes `choices`."""
    while True:
        remaining = limit - _total_cost(choices)
        steps = []
        for index, (item, current) in enumerate(zip(items, choices, strict=True)):
            affordable = [choice for choice in item.choices if choice.cost - current.cost <= remaining]
            better_choices = [choice for choice in affordable if choice.error < current.error]
            steps += [(_error_per_cost(current, better), -index, better) for better in better_choices]
        if not steps:
            return _make_allocation(items, choices)
        _, negative_index, choice = max(steps, key=_by_priority)  # negative: of equals the earlier item
        choices[-negative_index] = choice


def _lower_until_fits(items: Sequence[Item], choices: list[PrecisionChoice], limit: float) -> list[PrecisionChoice]:
    """Lower items until the limit holds, least error added per cost saved first. Changes `choices`."""
    while _total_cost(choices) > limit:
        steps = [
            (_error_per_cost(cheaper, current), index, cheaper)
            for index, current, cheaper in _cheaper_choices(items, choices)
        ]
        _, index, choice = min(steps, key=_by_priority)
        choices[index] = choice
    return choices


def _check_items(items: Sequence[Item]) -> None:
    names = [item.name for item in items]
    if len(set(names)) != len(names):
        raise ValueError(f"names of items must be unique, got {', '.join(names)}")
    for item in items:
        if not item.choices:
            raise ValueError(f"{item.name}: it has no choices")
        for choice in item.choices:
            if not (math.isfinite(choice.error) and math.isfinite(choice.cost)):
                raise ValueError(
                    f"{item.name}, {choice.name}: error and cost must be finite, got {choice.error} and {choice.cost}"
                )
