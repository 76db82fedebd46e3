"""The allocator: exact on the front, never over a budget, and independent of the order of equal items."""

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalepoint.allocation import Item, PrecisionChoice, compute_front, find_best_within, thin_front, trim_allocation

NUMBERS = st.integers(0, 40).map(float)
CHOICES = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4)
PROBLEMS = st.lists(CHOICES, min_size=1, max_size=4)


def make_items(rows):
    return [
        Item(f"layer{index}", tuple(PrecisionChoice(f"c{position}", *pair) for position, pair in enumerate(pairs)))
        for index, pairs in enumerate(rows)
    ]


def brute(items, limit):
    """The least error of all allocations that fit."""
    sums = [
        (sum(choice.error for choice in picked), sum(choice.cost for choice in picked))
        for picked in itertools.product(*(item.choices for item in items))
    ]
    return min((error for error, cost in sums if cost <= limit), default=None)


UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is not an error


@UNTIMED
@given(PROBLEMS)
def test_every_point_of_the_front_has_the_least_error_for_its_cost(rows):
    items = make_items(rows)
    points = compute_front(items)
    assert [point.error for point in points] == [brute(items, point.cost) for point in points]
    assert all(a.cost < b.cost or a.error > b.error for a, b in itertools.pairwise(points))
    worth = [(a.error - b.error) / (b.cost - a.cost) for a, b in itertools.pairwise(points) if b.cost > a.cost]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(worth))


@UNTIMED
@given(PROBLEMS, st.integers(0, 120))
def test_within_a_budget_nothing_is_better_than_brute_force_nor_worse_than_the_front(rows, limit):
    items = make_items(rows)
    best, result = brute(items, limit), find_best_within(items, limit)
    if best is None:
        assert result is None
        return
    assert result.cost <= limit * (1 + 1e-9)
    fitting = [point for point in compute_front(items) if point.cost <= limit]
    assert best <= result.error <= fitting[-1].error
    chosen = [next(choice for choice in item.choices if choice.name == result.chosen[item.name]) for item in items]
    assert (result.error, result.cost) == (sum(c.error for c in chosen), sum(c.cost for c in chosen))


def test_the_layer_that_gains_most_for_its_cost_comes_first():
    items = [
        Item("big", (PrecisionChoice("int4", 5, 100), PrecisionChoice("int8", 0, 200))),
        Item("small", (PrecisionChoice("int4", 4, 10), PrecisionChoice("int8", 0, 20))),
    ]
    assert [dict(point.chosen) for point in compute_front(items)] == [
        {"big": "int4", "small": "int4"}, {"big": "int4", "small": "int8"}, {"big": "int8", "small": "int8"}
    ]  # fmt: skip


def test_a_choice_off_the_hull_is_used_if_only_it_fits():
    item = Item("a", (PrecisionChoice("int2", 10, 0), PrecisionChoice("int4", 8, 5), PrecisionChoice("int8", 0, 10)))
    assert [point.chosen["a"] for point in compute_front([item])] == ["int2", "int8"]
    assert find_best_within([item], 7).chosen["a"] == "int4"


def test_lowering_the_point_above_may_be_better_than_filling_the_one_below():
    items = [
        Item("a", (PrecisionChoice("low", 10, 0), PrecisionChoice("high", 0, 10))),
        Item("b", (PrecisionChoice("low", 2, 0), PrecisionChoice("mid", 1, 3), PrecisionChoice("high", 0.5, 9))),
        Item("c", (PrecisionChoice("low", 9, 0), PrecisionChoice("high", 0, 10))),
    ]
    for limit in range(31):
        assert find_best_within(items, limit).error <= brute(items, limit) + 1.5


def test_single_layers_equal_choices_and_ties_are_handled():
    same = (PrecisionChoice("int4", 1, 4), PrecisionChoice("int8", 0, 8))
    items = [Item(name, same) for name in "abc"]
    assert [list(point.chosen.values()).count("int8") for point in compute_front(items)] == [0, 1, 2, 3]
    assert find_best_within(items, 16).chosen == {"a": "int8", "b": "int4", "c": "int4"}
    flat = Item("flat", (PrecisionChoice("int8", 1, 8), PrecisionChoice("int4", 1, 4), PrecisionChoice("float", 1, 32)))
    assert [point.chosen["flat"] for point in compute_front([flat])] == ["int4"]
    only = Item("only", (PrecisionChoice("float", 0, 32),))
    assert find_best_within([only], 32).chosen == {"only": "float"}
    assert find_best_within([only], 31) is None


def test_a_long_front_is_thinned_evenly_between_its_ends():
    items = [
        Item(str(index), (PrecisionChoice("low", 1.0, 0.0), PrecisionChoice("high", 0.0, 1.0 + index)))
        for index in range(40)
    ]
    points = compute_front(items)
    few = thin_front(points, 10)
    assert len(few) == 10
    assert (few[0], few[-1]) == (points[0], points[-1])
    gaps = [b.cost - a.cost for a, b in itertools.pairwise(few)]
    assert max(gaps) < 2 * points[-1].cost / 9
    assert thin_front(points, 100) == list(points)


def test_choices_that_gain_little_are_trimmed():
    items = [
        Item("needed", (PrecisionChoice("low", 10.0, 0.0), PrecisionChoice("high", 1.0, 1.0))),
        Item("spare", (PrecisionChoice("low", 0.005, 0.0), PrecisionChoice("high", 0.0, 1.0))),
    ]
    everything = find_best_within(items, 2.0)
    assert everything.chosen == {"needed": "high", "spare": "high"}
    assert trim_allocation(items, everything, 0.01).chosen == {"needed": "high", "spare": "low"}
    assert trim_allocation(items, everything, 0.001) == everything


def test_invalid_items_are_errors():
    with pytest.raises(ValueError, match="must be finite, got nan"):
        compute_front([Item("a", (PrecisionChoice("int4", math.nan, 1),))])
    with pytest.raises(ValueError, match="no choices"):
        compute_front([Item("a", ())])
    with pytest.raises(ValueError, match="must be unique"):
        compute_front(make_items([[(1, 1)]]) * 2)
