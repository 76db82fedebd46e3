"""Saves memory in training: autograd saves 8-bit codes of quantized activations, and no quantized weights.

    activation: y = c * scale, so c = round(y / scale), one byte per element, restores y bit for bit
    weight: computed again in backward from the float weight, which is in memory anyway

`fake_quantize_by_steps` attaches the scale to its result. A layer computes inside
`with save_codes_for_backward(x, weight, make)`. If other hooks decide what autograd saves (activation checkpointing,
offloading, torch.func), nothing is changed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalepoint.compat.torch_names import has_saved_tensor_hooks
from scalepoint.numerics.affine import PIECE_ELEMENTS, Steps, cast_to_input_dtype
from scalepoint.numerics.formats import Format

_MARK_ATTRIBUTE = "_scalepoint_steps"
# The lowest centred code is saved as -128. Converting floats to int8 is five times as fast as to uint8.
HALF = 128


class _SavedCodes(NamedTuple):
    codes: Tensor
    scale: Tensor
    zero: Tensor
    dtype: torch.dtype


class _RecomputedTensor(NamedTuple):
    make: Callable[[], Tensor]


class _SavedTensor(NamedTuple):
    """Any other tensor. With hooks, torch does not check whether a saved tensor was written to in place."""

    tensor: Tensor
    version: int


class _QuantizationMark:
    """The scale of a quantized tensor and, once a layer saves it, its codes minus `zero`, shared by all its readers."""

    def __init__(self, y: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.scale, self.zero, self.version = scale, zero, y._version
        self._codes: Callable[[], Tensor | None] = lambda: None  # a weak reference

    def to_saved_codes(self, y: Tensor) -> _SavedCodes:
        codes = self._codes()
        if codes is None:
            codes = self._compute_codes(y)
            self._codes = weakref.ref(codes)
        return _SavedCodes(codes, self.scale, self.zero, y.dtype)

    def _compute_codes(self, y: Tensor) -> Tensor:
        if not _is_processed_in_pieces(y):
            return torch.div(y.to(torch.float32), self.scale).round_().sub_(self.zero).to(torch.int8)
        codes, scratch = torch.empty_like(y, dtype=torch.int8), y.new_empty(PIECE_ELEMENTS)
        pieces = (torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in (y, codes))
        for part, target in zip(*pieces, strict=True):
            target.copy_(torch.div(part, self.scale, out=scratch[: part.numel()]).round_().sub_(self.zero))
        return codes


def mark_quantized(y: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Attach the scale to a fake-quantized tensor, if its codes fit into 8 bits."""
    if not fmt.is_float and steps.shift is None and steps.is_uniform and fmt.bits <= 8:
        low = torch.as_tensor(steps.low, dtype=torch.float32, device=y.device).detach().reshape(())
        setattr(y, _MARK_ATTRIBUTE, _QuantizationMark(y, steps.scale.detach().reshape(()).clone(), low + HALF))
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
    mark: _QuantizationMark | None = getattr(x, _MARK_ATTRIBUTE, None)
    if mark is not None and x is not None and x._version != mark.version:
        mark = None  # x was written to in place
    if mark is None and make is None:
        yield
        return
    # Autograd keeps a reference to `pack`, so `pack` must not refer to the tensors themselves.
    x_key, weight_key = _storage_key(x), _storage_key(weight)

    def pack(tensor: Tensor) -> Any:
        key = _storage_key(tensor)
        if mark is not None and key == x_key:
            return mark.to_saved_codes(tensor.detach())
        if make is not None and key == weight_key:
            return _RecomputedTensor(make)
        return _SavedTensor(tensor, tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _storage_key(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return a key that identifies a tensor while it is alive. A tensor and its transpose have different keys."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _unpack(saved: _SavedCodes | _RecomputedTensor | _SavedTensor) -> Tensor:
    if isinstance(saved, _SavedCodes):
        if not (_is_processed_in_pieces(saved.codes) and saved.dtype == torch.float32):
            y = saved.codes.to(torch.float32).add_(saved.zero).mul_(saved.scale)
            return cast_to_input_dtype(y, saved.dtype)
        y = torch.empty_like(saved.codes, dtype=torch.float32)
        pieces = (torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in (saved.codes, y))
        for codes, target in zip(*pieces, strict=True):
            target.copy_(codes).add_(saved.zero).mul_(saved.scale)
        return y
    if isinstance(saved, _RecomputedTensor):
        with torch.no_grad():
            return saved.make()
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} was written to in place before backward, which needs the "
            "values that the layer read: use an operation that is not in place"
        )
    return saved.tensor


def _is_processed_in_pieces(tensor: Tensor) -> bool:
    """Whether a tensor is processed in pieces that fit into the cache: it is large, contiguous and on a CPU."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.int8)
    return is_plain and tensor.numel() >= 2 * PIECE_ELEMENTS
