"""What ranks hand to each other: errors as words, tensors as bytes."""

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scalepoint import errors
from scalepoint.errors import BatchNote, RankError, ScalepointError

if TYPE_CHECKING:
    from torch import Tensor

Words = dict[str, Any]


def packed(tensors: Mapping[str, "Tensor"]) -> tuple[list[Any], "Tensor"]:
    """Names, types and shapes, and the bytes of all."""
    import torch  # noqa: PLC0415

    about = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
    parts = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in tensors.values()]
    return about, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpacked(flat: "Tensor", header: Sequence[Any]) -> dict[str, "Tensor"]:
    import torch  # noqa: PLC0415

    found, start = {}, 0
    for name, dtype, shape in header:
        kind = getattr(torch, dtype)
        length = kind.itemsize * torch.Size(shape).numel()
        found[name] = flat[start : start + length].clone().view(kind).reshape(shape)
        start += length
    return found


def described(error: BaseException) -> Words:
    """An error as another rank can raise it."""
    is_plain = len(error.args) == 1 or (isinstance(error, ScalepointError) and bool(error.args))
    message = str(error.args[0]) if is_plain else str(error)
    notes = [[str(note), isinstance(note, BatchNote)] for note in getattr(error, "__notes__", ())]
    return {"type": type(error).__name__, "message": message, "notes": notes}


def rebuilt(words: Words, index: int) -> Exception:
    """The error of another rank: of its own class, where that is one of ours or Python's."""
    name, message = words["type"], words["message"]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, message = RankError, f"{name}: {message}"
    try:
        error = kind(message)
    except TypeError:
        error = RankError(f"{name}: {message}")
    for note, is_of_batch in words["notes"]:
        error.add_note(BatchNote(note) if is_of_batch else note)
    error.add_note(f"raised on rank {index}")
    return error
