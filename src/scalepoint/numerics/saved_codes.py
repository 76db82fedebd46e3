"""What autograd keeps for a layer that reads quantized tensors: codes of its input, and nothing of its weight.

    y = c * scale, so c = round(y / scale) gives y back bit for bit, from a byte an element
    a quantized weight is made again from the weight, which is there anyway

`fake_quantize_by_steps` marks its result with the scale; a layer computes inside
`with save_codes_for_backward(x, weight, make)`. Where something else decides what is kept (activation checkpointing,
offloading, torch.func), nothing is changed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.compat.torch_names import has_saved_tensor_hooks
from scalepoint.numerics.affine import PIECE, Steps, cast_to_input_dtype
from scalepoint.numerics.formats import Format

_MARK = "_scalepoint_steps"
HALF = 128  # the least centred code is kept as -128, the least int8: floats become int8 five times as fast as uint8


class _SavedCodes(NamedTuple):
    codes: Tensor
    scale: Tensor
    zero: Tensor
    dtype: torch.dtype


class _RecomputedTensor(NamedTuple):
    make: Callable[[], Tensor]


class _SavedTensor(NamedTuple):
    """Any other tensor; where there are hooks torch does not look whether it was written to since."""

    tensor: Tensor
    version: int


class _QuantizationMark:
    """How a tensor was made, and its codes less `zero`, which all layers that read it share."""

    def __init__(self, y: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.scale, self.zero, self.version = scale, zero, y._version
        self.known: Callable[[], Tensor | None] = lambda: None

    def to_saved_codes(self, y: Tensor) -> _SavedCodes:
        codes = self.known()
        if codes is None:
            codes = self._codes(y)
            self.known = weakref.ref(codes)
        return _SavedCodes(codes, self.scale, self.zero, y.dtype)

    def _codes(self, y: Tensor) -> Tensor:
        if not _is_cut_in_pieces(y):
            return torch.div(y.to(torch.float32), self.scale).round_().sub_(self.zero).to(torch.int8)
        codes, scratch = torch.empty_like(y, dtype=torch.int8), y.new_empty(PIECE)
        for part, target in zip(torch.split(y.view(-1), PIECE), torch.split(codes.view(-1), PIECE), strict=True):
            target.copy_(torch.div(part, self.scale, out=scratch[: part.numel()]).round_().sub_(self.zero))
        return codes


def mark_quantized(y: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Remember with a result how it was made, where a byte can hold its codes."""
    if not fmt.is_float and steps.shift is None and steps.is_uniform and fmt.bits <= 8:
        low = torch.as_tensor(steps.low, dtype=torch.float32, device=y.device).detach().reshape(())
        setattr(y, _MARK, _QuantizationMark(y, steps.scale.detach().reshape(()).clone(), low + HALF))
    return y


@contextmanager
def save_codes_for_backward(
    x: Tensor | None, weight: Tensor | None = None, make: Callable[[], Tensor] | None = None
) -> Iterator[None]:
    """Inside this context, autograd saves codes instead of float values.

    Args:
        x: The activation, saved as codes for backward.
        weight: A weight that is not saved at all.
        make: Computes the weight again in backward.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or has_saved_tensor_hooks():
        yield
        return
    marked: _QuantizationMark | None = getattr(x, _MARK, None)
    if marked is not None and x is not None and x._version != marked.version:
        marked = None  # it was written to
    if marked is None and make is None:
        yield
        return
    of_x, of_weight = _storage_key(x), _storage_key(weight)  # no tensors: autograd keeps this function

    def pack(tensor: Tensor) -> Any:
        place = _storage_key(tensor)
        if marked is not None and place == of_x:
            return marked.to_saved_codes(tensor.detach())
        return (
            _RecomputedTensor(make)
            if make is not None and place == of_weight
            else _SavedTensor(tensor, tensor._version)
        )

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _storage_key(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What tells a tensor from others while it is alive, and from its transpose."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _SavedCodes):
        if not (_is_cut_in_pieces(kept.codes) and kept.dtype == torch.float32):
            return cast_to_input_dtype(kept.codes.to(torch.float32).add_(kept.zero).mul_(kept.scale), kept.dtype)
        y = torch.empty_like(kept.codes, dtype=torch.float32)
        for part, target in zip(torch.split(kept.codes.view(-1), PIECE), torch.split(y.view(-1), PIECE), strict=True):
            target.copy_(part).add_(kept.zero).mul_(kept.scale)
        return y
    if isinstance(kept, _RecomputedTensor):
        with torch.no_grad():
            return kept.make()
    saved: _SavedTensor = kept
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} was written to in place before backward, which needs it as "
            "the layer read it"
        )
    return saved.tensor


def _is_cut_in_pieces(tensor: Tensor) -> bool:
    """Whether it goes through the cache in pieces: large, on a CPU, and of one run of memory."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.int8)
    return is_plain and tensor.numel() >= 2 * PIECE
