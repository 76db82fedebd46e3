"""The element types of Core AI constants, and their bytes.

    int4 [1, -2, 3]  ->  si4, bytes 0xE1 0x03      codes of less than 8 bits are packed, low bits first

The names of the types are those of MLIR. Integers of n bits are siN and uiN, floats are f32, f16, f8E4M3FN, ...
"""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

FLOAT_TYPES: dict[str, tuple[str, Any, int]] = {
    "float32": ("f32", np.float32, 32),
    "float16": ("f16", np.float16, 16),
    "float8_e4m3fn": ("f8E4M3FN", ml_dtypes.float8_e4m3fn, 8),
    "float8_e5m2": ("f8E5M2", ml_dtypes.float8_e5m2, 8),
    "float8_e8m0fnu": ("f8E8M0FNU", ml_dtypes.float8_e8m0fnu, 8),
    "float4_e2m1fn_x2": ("f4E2M1FN", ml_dtypes.float4_e2m1fn, 4),
}
"""By our name: the name in Core AI, the numpy type, bits."""


def element_type(fmt: str) -> str:
    """Return the Core AI name of a dtype: int4 -> si4, float16 -> f16."""
    if fmt in FLOAT_TYPES:
        return FLOAT_TYPES[fmt][0]
    return fmt.replace("uint", "ui") if fmt.startswith("uint") else fmt.replace("int", "si")


def to_bytes(values: Tensor, fmt: str) -> bytes:
    """Return the elements as a constant of a file stores them."""
    values = values.detach().cpu()
    if fmt not in FLOAT_TYPES:
        return _pack_bits(np.ascontiguousarray(values.numpy()).astype(np.uint8), int(fmt.partition("int")[2]))
    _, dtype, bits = FLOAT_TYPES[fmt]
    array = np.ascontiguousarray(values.to(torch.float32).numpy(), np.float32).astype(dtype)
    return _pack_bits(array.view(np.uint8), bits) if bits < 8 else array.tobytes()


def from_bytes(data: bytes, fmt: str, shape: Sequence[int]) -> np.ndarray:
    """Return the elements of a constant: integers as int8 or uint8, 8-bit and 4-bit floats as float32.

    Raises:
        ValueError: The number of bytes is wrong.
    """
    if fmt in FLOAT_TYPES:
        _, dtype, bits = FLOAT_TYPES[fmt]
        codes = _unpack_bits(data, bits, math.prod(shape)).view(dtype) if bits < 8 else np.frombuffer(data, dtype)
        array: np.ndarray = codes.reshape(shape)
        return array if bits > 8 else array.astype(np.float32)
    width = int(fmt.partition("int")[2])
    integers = _unpack_bits(data, width, math.prod(shape)).reshape(shape)
    if fmt.startswith("uint"):
        return integers
    unused_bits = np.uint8(8 - width)
    signed: np.ndarray = (integers << unused_bits).view(np.int8) >> unused_bits.view(np.int8)
    return signed


def _pack_bits(codes: np.ndarray, width: int) -> bytes:
    if width == 8:
        return codes.tobytes()
    bits = (codes.reshape(-1, 1) >> np.arange(width, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _unpack_bits(data: bytes, width: int, count: int) -> np.ndarray:
    if len(data) != math.ceil(width * count / 8):
        raise ValueError(f"{len(data)} bytes for {count} elements of {width} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=width * count, bitorder="little").reshape(count, width)
    codes: np.ndarray = (bits << np.arange(width, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return codes
