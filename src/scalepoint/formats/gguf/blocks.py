"""Block types with a scale of their own for 32 columns; d and m are float16.

    Q8_0   d, 32 int8                              w = d q
    Q4_0   d, 16 bytes                             w = d (q - 8)
    Q4_1   d, m, 16 bytes                          w = d q + m
    Q5_0   d, 4 bytes of fifth bits, 16 bytes      w = d (q - 16)
    Q5_1   d, m, 4 bytes of fifth bits, 16 bytes   w = d q + m

A byte j of codes has element j in its low half and element j + 16 in its high half.
"""

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.gguf.layer_types import Bytes, Form

SIZE = 32


def q8_0(form: Form) -> Bytes | None:
    return _joined(form, _half(form.scale), form.codes.to(torch.int8).numpy().view(np.uint8).reshape(-1, SIZE))


def q4_0(form: Form) -> Bytes | None:
    return _joined(form, _half(form.scale), _nibbles(_codes(form, 8)))


def q4_1(form: Form) -> Bytes | None:
    return _joined(form, _half(form.scale), _half(form.least), _nibbles(_codes(form, 0)))


def q5_0(form: Form) -> Bytes | None:
    codes = _codes(form, 16)
    return _joined(form, _half(form.scale), _fifth(codes), _nibbles(codes))


def q5_1(form: Form) -> Bytes | None:
    codes = _codes(form, 0)
    return _joined(form, _half(form.scale), _half(form.least), _fifth(codes), _nibbles(codes))


def _joined(form: Form, *parts: Bytes | None) -> Bytes | None:
    """Rows of blocks; None where a scale is not a float16."""
    known = [each for each in parts if each is not None]
    return None if len(known) < len(parts) else np.concatenate(known, 1).reshape(form.codes.shape[0], -1)


def _half(values: Tensor | None) -> Bytes | None:
    """Two bytes for each, where all are float16 exactly."""
    if values is None:
        return None
    narrow = values.to(torch.float16)
    return narrow.numpy().view(np.uint8).reshape(-1, 2) if torch.equal(narrow.to(torch.float32), values) else None


def _codes(form: Form, shift: int) -> Bytes:
    return (form.codes + shift).to(torch.uint8).numpy().reshape(-1, SIZE)


def _nibbles(codes: Bytes) -> Bytes:
    low = codes & 15
    return low[:, : SIZE // 2] | low[:, SIZE // 2 :] << 4


def _fifth(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")
