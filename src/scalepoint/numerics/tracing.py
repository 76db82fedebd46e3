"""Who is at work besides us: a tracer that records operations, or a transformation of them."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_traced(x: Tensor) -> bool:
    """Tell whether operations on a tensor are recorded or transformed (torch.compile, export, vmap) instead of run.

    Args:
        x: The tensor.
    """
    return torch.compiler.is_compiling() or type(x) not in _PLAIN or is_transformed()


def is_transformed() -> bool:
    """Whether vmap, func.grad or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
