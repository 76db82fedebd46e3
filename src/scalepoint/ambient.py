"""What a caller has set for all of torch: autocast, inference mode, a default dtype, the meta device as the default.

The work here is the same wherever it is called from, so it runs without them; only the model's own code, and the user's
metric, see the default dtype that they were written under.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

DEVICES = ("cpu", "cuda")


class _Caller:
    """What the outermost call was made under."""

    dtype: torch.dtype | None = None


@contextmanager
def settled() -> Iterator[None]:
    """torch as it is when a process starts; the caller's settings come back afterwards."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        if torch.get_default_dtype() != torch.float32:
            stack.callback(setattr, _Caller, "dtype", _Caller.dtype)
            _Caller.dtype = torch.get_default_dtype()
            stack.enter_context(_default(torch.float32))
        yield


@contextmanager
def as_called() -> Iterator[None]:
    """For the user's own code: the default dtype of the call."""
    with _default(_Caller.dtype or torch.get_default_dtype()):
        yield


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
