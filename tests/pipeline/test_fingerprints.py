"""Marks: the same for the same, other for anything that changes what a stage makes."""

import functools
from dataclasses import replace
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import nn

from scalepoint.pipeline.fingerprints import (
    fingerprint_code,
    fingerprint_model,
    fingerprint_target,
    fingerprint_tensors,
)
from scalepoint.pipeline.inputs import DataSource
from scalepoint.targets import find_target, onnxruntime_target


def net(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight.mul_(scale)
    return model


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Tripling(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class TestModel:
    def test_a_model_that_is_built_again_has_the_same_fingerprint(self):
        assert fingerprint_model(net()) == fingerprint_model(net())

    @pytest.mark.parametrize(
        "other",
        [
            lambda: net(1.001),
            lambda: nn.Sequential(net()[0], nn.GELU()),
            lambda: nn.Sequential(net()[0], nn.ReLU(), nn.Dropout()),
        ],
        ids=["weight", "activation", "module"],
    )
    def test_another_model_has_another_fingerprint(self, other):
        assert fingerprint_model(other()) != fingerprint_model(net())

    def test_the_code_of_forward_changes_the_fingerprint(self):
        first, second = Doubling(2, 2), Tripling(2, 2)
        second.load_state_dict(first.state_dict())
        Tripling.__qualname__ = Doubling.__qualname__
        Tripling.__name__ = Doubling.__name__
        assert fingerprint_model(first) != fingerprint_model(second)


class TestCode:
    def test_a_function_is_fingerprinted_by_its_code(self):
        def first(run):
            return run(1) + 2

        def second(run):
            return run(1) + 3

        second.__qualname__ = first.__qualname__
        assert fingerprint_code(first) == fingerprint_code(first)
        assert fingerprint_code(first) != fingerprint_code(second)

    def test_a_wrapped_function_has_the_fingerprint_of_the_inner_one(self):
        def metric(run):
            return 1.0

        @functools.wraps(metric)
        def wrapping(run):
            return metric(run)

        assert fingerprint_code(wrapping) == fingerprint_code(metric)

    def test_callable_objects_have_a_fingerprint(self):
        class Metric:
            def __call__(self, run):
                return 1.0

        assert fingerprint_code(Metric()) == fingerprint_code(Metric())
        assert fingerprint_code(functools.partial(max, 1))

    def test_sets_and_addresses_in_code_do_not_change_the_fingerprint(self):
        """repr() of a set of strings follows the hash seed; numbers that collide show the same in one process."""
        code = compile("lambda kind: kind in {'a', 'b', 'c', 'd'}", "", "eval").co_consts[0]
        orders = [frozenset(order) for order in (range(0, 64, 8), range(56, -1, -8))]
        assert repr(orders[0]) != repr(orders[1])
        first, second = (FunctionType(code.replace(co_consts=(None, (1, order))), {}, "function") for order in orders)
        assert fingerprint_code(first) == fingerprint_code(second)
        assert fingerprint_tensors({"a": object()}) == fingerprint_tensors({"a": object()})


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(0),
            np.ones(3),
            (torch.ones(2), {"a": 1}),
            {"ids": torch.ones(2, dtype=torch.int64)},
        ],
    )
    def test_of_any_kind(self, value):
        assert fingerprint_tensors(value) == fingerprint_tensors(value)

    def test_type_shape_and_bytes_change_the_fingerprint(self):
        values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0, 0, 0, 1.0])]
        assert len({fingerprint_tensors(value) for value in values}) == 4


class TestData:
    def test_batches_are_fingerprinted_while_they_are_read(self):
        batches = [torch.full((2,), float(index)) for index in range(6)]
        looked = []
        recorded = DataSource(batches).with_fingerprint(looked.append)
        assert len(recorded.data) == 6
        assert [float(batch[0]) for batch in recorded.data] == [0, 1, 2, 3, 4, 5]
        assert len(looked) == 6
        assert recorded.fingerprint() == DataSource(batches).fingerprint()
        assert recorded.fingerprint() != DataSource(batches[:5]).fingerprint()
        assert recorded.fingerprint() != DataSource(batches[::-1]).fingerprint()

    def test_iterators_and_values_that_are_not_data_are_not_read(self):
        once = iter([torch.ones(1)])
        assert DataSource(once).fingerprint() is None
        assert len(list(once)) == 1
        for value in (torch.ones(2), {"a": 1}, "text", print, None):
            assert DataSource(value).with_fingerprint(print).data is value

    def test_a_generator_function_is_fingerprinted_by_its_code(self):
        def loop(model):
            model(torch.ones(1))

        assert (
            DataSource(loop).fingerprint()
            == DataSource(loop).with_fingerprint(print).fingerprint()
            == fingerprint_code(loop)
        )


def never(facts):
    return None


def always(facts):
    return "it does not pay"


def at_least(size):
    return lambda facts: "too small" if len(facts.name) < size else None


class TestTarget:
    def test_the_fingerprint_of_a_target_is_reproducible(self):
        assert fingerprint_target(find_target("onnxruntime")) == fingerprint_target(find_target("onnxruntime"))
        assert fingerprint_target(onnxruntime_target(cpu="avx2")) != fingerprint_target(onnxruntime_target(cpu="vnni"))

    @pytest.mark.parametrize(
        "change",
        [
            {"patterns": find_target("onnxruntime").patterns[1:]},
            {"rules": (never,)},
            {"rules": (always,)},
            {"rules": (at_least(3),)},
            {"rules": (at_least(4),)},
            {"accepts": ()},
            {"bias": "float"},
            {"same_scale_kinds": frozenset()},
            {"conversions": ()},
            {"adapt_weight": None},
            {"options": {"cpu": "another"}},
        ],
        ids=[
            "patterns",
            "never",
            "always",
            "three",
            "four",
            "accepts",
            "bias",
            "same_scale_kinds",
            "conversions",
            "adapt",
            "options",
        ],
    )
    def test_every_declaration_of_a_target_changes_its_fingerprint(self, change):
        target = onnxruntime_target(cpu="avx2")
        assert fingerprint_target(replace(target, **change)) != fingerprint_target(target)

    def test_the_arguments_of_a_rule_change_the_fingerprint(self):
        target = find_target("onnxruntime")
        rules = (at_least(3), at_least(4), never, always)
        marks = {fingerprint_target(replace(target, rules=(rule,))) for rule in rules}
        assert len(marks) == 4
