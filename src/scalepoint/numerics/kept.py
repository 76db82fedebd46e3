"""What autograd keeps for a layer that reads quantized tensors: codes of its input, and nothing of its weight.

    y = c * scale, so c = round(y / scale) gives y back bit for bit, from a byte an element
    a quantized weight is made again from the weight, which is there anyway

`straight_through` marks its result with the scale; a layer computes `with keeping(x, weight, make)`. Where something
else decides what is kept (activation checkpointing, offloading), nothing is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.numerics.affine import Steps, narrow
from scalepoint.numerics.format import Format

_MARK = "_scalepoint_steps"


class _Codes(NamedTuple):
    codes: Tensor
    scale: Tensor
    low: Tensor
    dtype: torch.dtype


class _Made(NamedTuple):
    make: Callable[[], Tensor]


def mark(y: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Remember with a result how it was made, where a byte can hold its codes."""
    if not fmt.is_float and steps.shift is None and steps.is_uniform and fmt.bits <= 8:
        low = torch.as_tensor(steps.low, dtype=torch.float32, device=y.device)
        setattr(y, _MARK, (steps.scale.detach().reshape(()).clone(), low.detach().reshape(()).clone()))
    return y


@contextmanager
def keeping(x: Tensor | None, weight: Tensor | None = None, make: Callable[[], Tensor] | None = None) -> Iterator[None]:
    """Inside, what backward needs of x is kept as codes, and what it needs of the weight is made by `make`."""
    steps = getattr(x, _MARK, None)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_taken():
        yield
        return
    packed: list[_Codes] = []
    of_x, of_weight = _place(x), _place(weight)  # no tensors: autograd keeps this function

    def pack(tensor: Tensor) -> Any:
        place = _place(tensor)
        if steps is not None and place == of_x:
            if not packed:
                packed.append(_packed(tensor.detach(), *steps))
            return packed[0]
        return _Made(make) if make is not None and place == of_weight else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield


def _place(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What tells a tensor from others while it is alive."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.dtype)


def _packed(y: Tensor, scale: Tensor, low: Tensor) -> _Codes:
    codes = torch.div(y.to(torch.float32), scale).round_().sub_(low)
    return _Codes(codes.to(torch.uint8), scale, low, y.dtype)


def _unpacked(kept: Any) -> Tensor:
    if isinstance(kept, _Codes):
        return narrow(kept.codes.to(torch.float32).add_(kept.low).mul_(kept.scale), kept.dtype)
    if isinstance(kept, _Made):
        with torch.no_grad():
            return kept.make()
    found: Tensor = kept
    return found


def _is_taken() -> bool:
    """Whether somebody else has a say in what is kept."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
