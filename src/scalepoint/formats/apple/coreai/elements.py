"""The element types of Core AI constants, and their bytes.

    int4 [1, -2, 3]  ->  si4, bytes 0xE1 0x03      codes of less than 8 bits are packed, low bits first

The names of the types are those of MLIR. Integers of n bits are siN and uiN, floats are f32, f16, f8E4M3FN, ...
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

FLOAT_TYPES = {
    "float32": ("f32", np.float32),
    "float16": ("f16", np.float16),
}
"""By our name: the name in Core AI, and the numpy type."""


def element_type(fmt: str) -> str:
    """Return the Core AI name of a dtype: int4 -> si4, float16 -> f16."""
    if fmt in FLOAT_TYPES:
        return FLOAT_TYPES[fmt][0]
    return fmt.replace("uint", "ui") if fmt.startswith("uint") else fmt.replace("int", "si")


def to_bytes(values: Tensor, fmt: str) -> bytes:
    """Return the elements as a constant of a file stores them."""
    array = values.detach().cpu().numpy()
    if fmt in FLOAT_TYPES:
        return np.ascontiguousarray(array, FLOAT_TYPES[fmt][1]).tobytes()
    width = _integer_width(fmt)
    codes = np.ascontiguousarray(array).reshape(-1).astype(np.uint8)
    if width == 8:
        return codes.tobytes()
    bits = (codes[:, None] >> np.arange(width, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def from_bytes(data: bytes, fmt: str, shape: Sequence[int]) -> np.ndarray:
    """Return the elements of a constant; integers as int8 or uint8. Raises ValueError for a wrong number of bytes."""
    if fmt in FLOAT_TYPES:
        return np.frombuffer(data, FLOAT_TYPES[fmt][1]).reshape(shape)
    width, count = _integer_width(fmt), math.prod(shape)
    if len(data) != math.ceil(width * count / 8):
        raise ValueError(f"{len(data)} bytes for {count} elements of {width} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=width * count, bitorder="little").reshape(count, width)
    codes: np.ndarray = (bits << np.arange(width, dtype=np.uint8)).sum(-1, dtype=np.uint8).reshape(shape)
    if fmt.startswith("uint"):
        return codes
    unused_bits = np.uint8(8 - width)
    signed: np.ndarray = (codes << unused_bits).view(np.int8) >> unused_bits.view(np.int8)
    return signed


def _integer_width(fmt: str) -> int:
    return int(fmt.removeprefix("u").removeprefix("int"))
