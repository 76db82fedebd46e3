"""Keeps torch's older ONNX exporter from printing the graph of a failed export, which no option of it does."""

from contextlib import AbstractContextManager, nullcontext

import torch

from scalepoint.compat import attribute_replaced, patches_enabled


def onnx_log_silenced() -> AbstractContextManager[None]:
    """Inside this context, the TorchScript exporter prints no graph to stdout. It prints in C++: no redirect helps."""
    if not patches_enabled():
        return nullcontext()
    return attribute_replaced(torch._C, "_jit_onnx_log", lambda *_: None)
