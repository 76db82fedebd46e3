"""Turns torch.autocast off while a model is captured, so that the graph has the dtypes of the parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scalepoint.compat import attribute_replaced, only_in_this_thread, patches_enabled

DEVICES = ("cpu", "cuda")


@contextmanager
def autocast_ignored(on_block: Callable[[torch.dtype], None]) -> Iterator[None]:
    """Inside this context, torch.autocast does not cast.

    Args:
        on_block: Called with the dtype of each autocast block that would cast, from inside the `with` statement of the
            user's code.
    """
    if not patches_enabled():
        with _AutocastOffMode(on_block):
            yield
        return
    enter: Any = torch.autocast.__enter__

    def enter_without_casts(self: Any) -> Any:
        is_enabled = self._enabled
        if is_enabled:
            on_block(self.fast_dtype)
        self._enabled = False
        try:
            return enter(self)
        finally:
            self._enabled = is_enabled

    with attribute_replaced(torch.autocast, "__enter__", only_in_this_thread(enter_without_casts, enter)):
        yield


class _AutocastOffMode(TorchFunctionMode):
    """Turns autocast off before each operation. Leaving an autocast block restores the earlier setting."""

    def __init__(self, on_block: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self.on_block = on_block

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                self.on_block(torch.get_autocast_dtype(device))
                torch.set_autocast_enabled(device, False)
        return func(*args, **(kwargs or {}))
