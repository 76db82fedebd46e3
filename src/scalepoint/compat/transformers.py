"""Builds a module tree without memory for its parameters, so that a language model of any size can be built."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from scalepoint.compat import attribute_replaced, only_in_this_thread, patches_enabled


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Inside this context, parameters that are registered move to the meta device; buffers keep their values.

    `torch.device("meta")` would also drop the values of buffers (rotary frequencies), which a checkpoint does not
    contain. Without the patch the parameters are allocated, and their random values must not change the random state.
    """
    if not patches_enabled():
        with torch.random.fork_rng(devices=[]):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    with attribute_replaced(nn.Module, "register_parameter", only_in_this_thread(register_on_meta, register)):
        yield
