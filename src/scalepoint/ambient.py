"""What a caller has set for all of torch: autocast, inference mode, a default dtype, the meta device as the default.

The work here is the same wherever it is called from, so it runs without them. The user's own code (the model when it is
captured, the data, the metric) runs under the default dtype of the call, because it was written under that dtype.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

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


def inside_users_code() -> AbstractContextManager[None]:
    """For our own code that the user's code calls, such as the model that a function for data is given."""
    return _default(torch.float32)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
