"""Modes of modules, borrowed and given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """In eval mode; every module has its own mode back afterwards. What is no module has none."""
    modes = [(each, each.training) for each in model.modules()] if isinstance(model, nn.Module) else []
    for module, _ in modes:
        module.training = False  # by hand: train(False) of a quantized layer also derives its scales anew
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
