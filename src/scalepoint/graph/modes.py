"""Modes and attributes of modules, borrowed and given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


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


@contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """A forward that is traced may store tensors of the trace, which have no values, in attributes: those are as before
    afterwards."""
    before = {module: {name: copy(value) for name, value in _plain(module).items()} for module in model.modules()}
    try:
        yield
    finally:
        for module, known in before.items():
            for name, value in _plain(module).items():
                if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                    if name in known:
                        setattr(module, name, known[name])
                    else:
                        delattr(module, name)


def _plain(module: nn.Module) -> dict[str, Any]:
    """What may hold tensors without being registered."""
    kinds, own = (FakeTensor, dict, list, tuple, type(None)), vars(nn.Module())
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds) and name not in own}
