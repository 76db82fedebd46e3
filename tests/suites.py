"""Models that others wrote to try tools like this one: each with inputs, as (name, model, args, kwargs)."""

import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import SkipTest

import torch
from torch import nn


class Case(NamedTuple):
    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def of_torch() -> Iterator[Case]:
    """Every layer of torch.nn in one float32 setting after the other (module_db)."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
        for number, each in enumerate(given):
            made, called = each.constructor_input, each.forward_input
            if called is not None:
                model = info.module_cls(*made.args, **made.kwargs).eval()
                yield Case(f"{info.name} {number}", model, tuple(called.args), dict(called.kwargs))


def of_executorch() -> Iterator[Case]:
    """The operators of ExecuTorch's suite for backends, whose tests hand a model and inputs to a runner."""
    package = import_module("executorch.backends.test.suite.operators")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("test_"):
            module = import_module(f"{package.__name__}.{info.name}")
            for name, function in vars(module).items():
                if name.startswith("test_") and callable(function):
                    yield from _handed(f"{info.name} {name}", function)


def _handed(name: str, function: Any) -> Iterator[Case]:
    marks = [each for each in getattr(function, "pytestmark", []) if each.name == "parametrize"]
    columns = [_values(*each.args[:2]) for each in marks]
    for number, chosen in enumerate(product(*columns)):
        runner = _Runner()
        torch.manual_seed(0)
        with suppress(SkipTest):  # what the suite itself does not ask of anybody
            function(runner, **{key: value for row in chosen for key, value in row.items()})
        for model, inputs in runner.given:
            yield Case(f"{name} {number}", model.eval(), tuple(inputs), {})


def _values(names: Any, rows: Any) -> list[dict[str, Any]]:
    """The rows of a parametrize mark, each by the names of its arguments."""
    keys = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    plain = [row.values if hasattr(row, "marks") else row if len(keys) > 1 else (row,) for row in rows]
    return [dict(zip(keys, row, strict=True)) for row in plain]


class _Runner:
    """In the place of the suite's own: keeps what it is given."""

    _flow = SimpleNamespace(name="none", quantize=False)  # of the suite: which backend

    def __init__(self) -> None:
        self.given: list[tuple[nn.Module, Any]] = []

    def lower_and_run_model(self, model: nn.Module, inputs: Any, **_: Any) -> None:
        self.given.append((model, inputs))
