"""Runs code while an exporter traces a model, without recording what the code computes."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from scalepoint.compat import patches_enabled

Result = TypeVar("Result")


def run_untraced(function: Callable[[], Result]) -> Result:
    """Call a function that no tracer records: neither torch.export nor the TorchScript exporter (torch 2.13)."""
    if not patches_enabled():
        return _run_in_thread(function)
    # Shapes are tensors while the TorchScript tracer is on.
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function()
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def _run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a new thread. The state of tracers and modes belongs to the thread that started them."""
    results: list[Result] = []
    errors: list[BaseException] = []
    grad_enabled = torch.is_grad_enabled()

    def run() -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                results.append(function())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="scalepoint untraced")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
