"""The process-wide state of torch around our own work, and the lock that protects it.

Capture and export patch what all threads of a process share: the call of every module, warnings, the random state.
`serialized` therefore lets one thread at a time run a public function. Functions that only run a model (calibrate,
tune, compare, ...) need it too: while another thread traces with torch.fx 2.13, a call of any module ends in "module is
not installed as a submodule" (docs/decisions/0022). Inside it, torch has its default settings: no autocast, no
inference mode, float32 as the default dtype. Code of the user (the model while it is captured, the data, the metric)
runs under the caller's default dtype, because it was written under that dtype.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from scalepoint.support.interrupts import interrupts_remembered

Function = TypeVar("Function", bound=Callable[..., Any])
AUTOCAST_DEVICES = ("cpu", "cuda")


class _ProcessLock:
    """A reentrant lock. A forked child gets a fresh one: the thread that held the old one does not exist there."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


class _Caller:
    """The default dtype under which the outermost public function was called; None for float32."""

    dtype: torch.dtype | None = None


_LOCK = _ProcessLock()


def serialized(function: Function) -> Function:
    """Decorate a public function so that one thread at a time runs it, under torch's default settings."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _LOCK.lock, default_settings(), interrupts_remembered():  # remembered: no Ctrl-C is lost
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same signature as `function`


@contextmanager
def default_settings() -> Iterator[None]:
    """Run without autocast (cpu, cuda) and inference mode, with float32 as default dtype and no default device "meta".

    The settings of the caller are restored afterwards.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # Tensors on "meta" have no values. Any other default device is the choice of the caller.
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        if torch.get_default_dtype() != torch.float32:
            stack.callback(setattr, _Caller, "dtype", _Caller.dtype)
            _Caller.dtype = torch.get_default_dtype()
            stack.enter_context(_default_dtype(torch.float32))
        yield


@contextmanager
def caller_dtype() -> Iterator[None]:
    """Run code of the user under the default dtype of the outermost public call."""
    with _default_dtype(_Caller.dtype or torch.get_default_dtype()):
        yield


def library_dtype() -> AbstractContextManager[None]:
    """Run our own code under float32 while it is called from code of the user, such as a data function."""
    return _default_dtype(torch.float32)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the garbage collector off while a graph is built.

    Building a graph leaves few reference cycles, and each collection walks over everything that torch has loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
