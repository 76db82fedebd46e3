"""Encodes tensors and errors, so that they can be sent to other ranks without running code from them."""

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalepoint import errors
from scalepoint.errors import BatchNote, RankError, ScalepointError

if TYPE_CHECKING:
    from torch import Tensor


def encode_tensors(tensors: Mapping[str, "Tensor"]) -> tuple[list[Any], "Tensor"]:
    """Return a header with names, dtypes and shapes, and one tensor with the bytes of all tensors."""
    import torch  # noqa: PLC0415

    header = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return header, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode_tensors(data: "Tensor", header: Sequence[Any]) -> dict[str, "Tensor"]:
    """Undo `encode_tensors`. `data` may be longer than needed."""
    import torch  # noqa: PLC0415

    tensors, start = {}, 0
    for name, dtype_name, shape in header:
        dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = data[start:end].clone().view(dtype).reshape(shape)  # the clone is aligned for any dtype
        start = end
    return tensors


def encode_error(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON values."""
    has_message = len(error.args) == 1 or (isinstance(error, ScalepointError) and bool(error.args))
    message = str(error.args[0]) if has_message else str(error)
    notes = [[str(note), isinstance(note, BatchNote)] for note in getattr(error, "__notes__", ())]
    return {"type": type(error).__name__, "message": message, "notes": notes}


def decode_error(encoded: Mapping[str, Any], rank: int) -> Exception:
    """Restore the error of another rank: its class if that is one of scalepoint or Python, else a RankError."""
    name, message = encoded["type"], encoded["message"]
    error_type = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(error_type, type) and issubclass(error_type, Exception)):
        error_type, message = RankError, f"{name}: {message}"
    try:
        error = error_type(message)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        error = RankError(f"{name}: {message}")
    for note, is_batch_note in encoded["notes"]:
        error.add_note(BatchNote(note) if is_batch_note else note)
    error.add_note(f"raised on rank {rank}")
    return error
