"""Saves memory in training: autograd saves 8-bit codes of quantized activations, and no quantized weights.

    activation: y = c * scale, so c = round(y / scale), one byte per element, restores y bit for bit
    weight: computed again in backward from the float weight, which is in memory anyway

`fake_quantize_by_steps` attaches the scale to its result. A layer computes inside
`with save_codes_for_backward(x, weight, recompute_weight)`. If other hooks decide what autograd saves (activation
checkpointing, offloading, torch.func), nothing is changed.
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
# Codes are saved as int8: converting floats to int8 is five times as fast as to uint8.
LOWEST_SAVED_BYTE = -128


class _SavedCodes(NamedTuple):
    saved_bytes: Tensor  # saved byte = centred code - offset
    scale: Tensor
    offset: Tensor
    dtype: torch.dtype  # of the activation


class _RecomputedTensor(NamedTuple):
    recompute: Callable[[], Tensor]


class _SavedTensor(NamedTuple):
    """Any other tensor. Saved-tensor hooks turn off torch's version check, so `_unpack` does it."""

    tensor: Tensor
    version: int


class _QuantizationMark:
    """Holds the scale of a quantized tensor.

    Its codes are computed when the first layer saves it, and shared with later ones.
    """

    def __init__(self, y: Tensor, scale: Tensor, offset: Tensor) -> None:
        self.scale, self.offset, self.version = scale, offset, y._version
        self._saved_bytes: Callable[[], Tensor | None] = lambda: None  # a weak reference

    def to_saved_codes(self, y: Tensor) -> _SavedCodes:
        saved_bytes = self._saved_bytes()
        if saved_bytes is None:
            saved_bytes = self._compute_saved_bytes(y)
            self._saved_bytes = weakref.ref(saved_bytes)
        return _SavedCodes(saved_bytes, self.scale, self.offset, y.dtype)

    def _compute_saved_bytes(self, y: Tensor) -> Tensor:
        if not _is_processed_in_pieces(y):
            return torch.div(y.to(torch.float32), self.scale).round_().sub_(self.offset).to(torch.int8)
        saved_bytes, scratch = torch.empty_like(y, dtype=torch.int8), y.new_empty(PIECE_ELEMENTS)
        pieces = (torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in (y, saved_bytes))
        for part, target in zip(*pieces, strict=True):
            target.copy_(torch.div(part, self.scale, out=scratch[: part.numel()]).round_().sub_(self.offset))
        return saved_bytes


def mark_quantized(y: Tensor, steps: Steps, fmt: Format) -> Tensor:
    """Attach the scale to a fake-quantized tensor, if its codes fit into 8 bits."""
    if not fmt.is_float and steps.shift is None and steps.is_uniform and fmt.bits <= 8:
        low = torch.as_tensor(steps.low, dtype=torch.float32, device=y.device).detach().reshape(())
        offset = low - LOWEST_SAVED_BYTE  # `low` is the lowest centred code
        setattr(y, _MARK_ATTRIBUTE, _QuantizationMark(y, steps.scale.detach().reshape(()).clone(), offset))
    return y


@contextmanager
def save_codes_for_backward(
    x: Tensor | None, weight: Tensor | None = None, recompute_weight: Callable[[], Tensor] | None = None
) -> Iterator[None]:
    """Inside this context, autograd saves codes instead of float values.

    Args:
        x: The activation, saved as codes for backward.
        weight: A weight that is not saved if `recompute_weight` is given.
        recompute_weight: Computes the weight again in backward.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or has_saved_tensor_hooks():
        yield
        return
    mark: _QuantizationMark | None = getattr(x, _MARK_ATTRIBUTE, None)
    if mark is not None and x is not None and x._version != mark.version:
        mark = None  # x was written to in place
    if mark is None and recompute_weight is None:
        yield
        return
    # Autograd keeps a reference to `pack`, so `pack` must not refer to the tensors themselves.
    x_key, weight_key = _storage_key(x), _storage_key(weight)

    def pack(tensor: Tensor) -> Any:
        key = _storage_key(tensor)
        if mark is not None and key == x_key:
            return mark.to_saved_codes(tensor.detach())
        if recompute_weight is not None and key == weight_key:
            return _RecomputedTensor(recompute_weight)
        return _SavedTensor(tensor, tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _storage_key(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return a key that identifies a tensor while it is alive. A tensor and its transpose have different keys."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _unpack(saved: _SavedCodes | _RecomputedTensor | _SavedTensor) -> Tensor:
    if isinstance(saved, _SavedCodes):
        if _is_processed_in_pieces(saved.saved_bytes) and saved.dtype == torch.float32:
            y = torch.empty_like(saved.saved_bytes, dtype=torch.float32)
            pieces = (torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in (saved.saved_bytes, y))
            for part, target in zip(*pieces, strict=True):
                target.copy_(part).add_(saved.offset).mul_(saved.scale)
            return y
        y = saved.saved_bytes.to(torch.float32).add_(saved.offset).mul_(saved.scale)
        return cast_to_input_dtype(y, saved.dtype)
    if isinstance(saved, _RecomputedTensor):
        with torch.no_grad():
            return saved.recompute()
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
