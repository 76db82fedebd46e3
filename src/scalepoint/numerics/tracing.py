"""Detects tracers and function transformations."""

import torch
from torch import Tensor

from scalepoint.compat.torch_names import is_functorch_active

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_traced(x: Tensor) -> bool:
    """Tell whether operations on a tensor are recorded or transformed (torch.compile, export, vmap) instead of run.

    Args:
        x: The tensor.
    """
    return torch.compiler.is_compiling() or type(x) not in _PLAIN or is_functorch_active()
