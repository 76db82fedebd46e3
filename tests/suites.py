"""Test models of other projects with their inputs, as (name, model, args, kwargs)."""

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


def torch_cases() -> Iterator[Case]:
    """Every layer of torch.nn with each of its float32 configurations (module_db)."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
        for number, module_input in enumerate(inputs):
            constructor_input, forward_input = module_input.constructor_input, module_input.forward_input
            if forward_input is not None:
                model = info.module_cls(*constructor_input.args, **constructor_input.kwargs).eval()
                yield Case(f"{info.name} {number}", model, tuple(forward_input.args), dict(forward_input.kwargs))


def executorch_cases() -> Iterator[Case]:
    """The operators of ExecuTorch's backend test suite. Its tests pass a model and inputs to a runner."""
    package = import_module("executorch.backends.test.suite.operators")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("test_"):
            module = import_module(f"{package.__name__}.{info.name}")
            for name, function in vars(module).items():
                if name.startswith("test_") and callable(function):
                    yield from _run_test_function(f"{info.name} {name}", function)


def _run_test_function(name: str, function: Any) -> Iterator[Case]:
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    columns = [_read_parameters(*mark.args[:2]) for mark in marks]
    for number, rows in enumerate(product(*columns)):
        runner = _Runner()
        torch.manual_seed(0)
        with suppress(SkipTest):  # the suite skips some cases
            function(runner, **{key: value for row in rows for key, value in row.items()})
        for model, inputs in runner.models:
            yield Case(f"{name} {number}", model.eval(), tuple(inputs), {})


def _read_parameters(names: Any, rows: Any) -> list[dict[str, Any]]:
    """Return the rows of a parametrize mark as dicts."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    plain = [row.values if hasattr(row, "marks") else row if len(keys) > 1 else (row,) for row in rows]
    return [dict(zip(keys, row, strict=True)) for row in plain]


class _Runner:
    """Replaces the runner of the suite: stores the models and inputs."""

    _flow = SimpleNamespace(name="none", quantize=False)  # read by the suite

    def __init__(self) -> None:
        self.models: list[tuple[nn.Module, Any]] = []

    def lower_and_run_model(self, model: nn.Module, inputs: Any, **_: Any) -> None:
        self.models.append((model, inputs))
