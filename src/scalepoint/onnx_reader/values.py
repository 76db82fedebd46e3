"""The values that flow through a model that was read from an ONNX file: tensors, and small arrays of known numbers.

ONNX computes shapes, axes and pads with the same operators as data. As tensors their values would be unknown while
torch.export traces the model. So a small array of whole numbers is a KnownArray: a numpy array of Python numbers, or of
the symbolic sizes (SymInt) of an axis that stays free.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from scalepoint.compat.torch_names import FakeTensor
from scalepoint.errors import OnnxReadError

MAX_KNOWN_INTEGERS = 64  # a constant with more whole numbers is a tensor: it is data, not a shape
MAX_ELEMENTS = 2**31  # of one tensor that an operator such as Expand or ConstantOfShape creates

_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}
# numpy type -> numpy type of the same size that torch reads, and the torch type of its bits
_TYPES_OF_ML_DTYPES = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.uint8, torch.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.uint8, torch.float8_e5m2fnuz),
}
_INT4_CONTAINERS = {np.dtype(ml_dtypes.int4): np.int8, np.dtype(ml_dtypes.uint4): np.uint8}


@dataclass(frozen=True, eq=False)
class KnownArray:
    """A small array whose numbers are known while the model is traced.

    Attributes:
        numbers: Python numbers or symbolic sizes, in a numpy array of objects.
        dtype: The type that the values have in the file.
    """

    numbers: np.ndarray
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        return self.numbers.ndim

    def to_list(self) -> list[Any]:
        return list(self.numbers.reshape(-1))

    def map(
        self, function: Callable[..., Any], *other_arrays: "KnownArray", dtype: torch.dtype | None = None
    ) -> "KnownArray":
        """Apply a function to each number, and to those of other arrays at the same position after broadcasting."""
        dtype = dtype or self.dtype
        arrays = np.broadcast_arrays(self.numbers, *(other.numbers for other in other_arrays))
        rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
        results = [round_number(function(*numbers), dtype) for numbers in rows]
        return known_array(results, arrays[0].shape, dtype)


Value = Tensor | KnownArray
AnyValue = Any  # a Value, None for an omitted input, or a list of values: an ONNX sequence
# torch's functions for symbolic sizes, which have no type annotations
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min
sym_float: Callable[[Any], Any] = torch.sym_float
sym_int: Callable[[Any], Any] = torch.sym_int


def known_array(
    numbers: Sequence[Any], shape: Sequence[int] | None = None, dtype: torch.dtype = torch.int64
) -> KnownArray:
    """Make a KnownArray of a flat sequence of numbers; by default a vector."""
    array = np.empty(len(numbers), dtype=object)  # np.array(numbers) would try to convert symbolic sizes
    for index, number in enumerate(numbers):
        array[index] = number
    return KnownArray(array.reshape(len(numbers) if shape is None else tuple(shape)), dtype)


def round_number(number: Any, dtype: torch.dtype) -> Any:
    """Convert a number that Python computed to the precision and range of a type. Symbolic sizes stay as they are."""
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return number
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return float(np.float32(number)) if dtype == torch.float32 else float(number)
    if isinstance(number, float) and not math.isfinite(number):
        raise OnnxReadError(f"the whole number {number} cannot be represented")
    # An integer that is too large wraps around, as in torch.
    bits, number = torch.iinfo(dtype).bits, int(number)
    if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        return number % 2**bits
    half_range = 2 ** (bits - 1)
    return (number + half_range) % 2**bits - half_range


def as_tensor(value: Value, like: Tensor | None = None) -> Tensor:
    """Convert a value to a tensor, on the device of `like`."""
    if isinstance(value, Tensor):
        return value
    device = None if like is None else like.device
    numbers = value.to_list()
    if any(isinstance(number, torch.SymInt | torch.SymFloat) for number in numbers):
        parts = [torch.scalar_tensor(number, dtype=value.dtype, device=device) for number in numbers]
        return torch.stack(parts).reshape(value.shape)
    return torch.tensor(numbers, dtype=value.dtype, device=device).reshape(value.shape)


def as_number(value: Value, description: str = "value") -> Any:
    """Return the only number of a value. The description names the value in errors."""
    numbers = as_list(value, description)
    if len(numbers) != 1:
        raise OnnxReadError(f"{description} has {len(numbers)} numbers instead of one")
    return numbers[0]


def as_list(value: Value, description: str = "value") -> list[Any]:
    """Return the numbers of a value. While torch.export traces the model, a tensor has none: OnnxReadError."""
    if isinstance(value, KnownArray):
        return value.to_list()
    if is_traced(value):
        raise OnnxReadError(
            f"its {description} is computed from data, so it is not known when the model is captured: keep this part "
            "out of the file, or fix the input that it depends on with fixed_inputs="
        )
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


def is_traced(value: Tensor) -> bool:
    """Whether a tensor has no values because torch.export traces the model."""
    return isinstance(value, FakeTensor) or torch.compiler.is_exporting() or value.is_meta


def check_size(shape: Sequence[Any]) -> None:
    """Raise OnnxReadError if a shape has negative sizes or more than MAX_ELEMENTS elements, as in a damaged file."""
    sizes = [size for size in shape if isinstance(size, int)]
    if any(size < 0 for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise OnnxReadError(f"a tensor of shape {list(shape)} cannot be made")


def torch_dtype(code: int) -> torch.dtype:
    """Return the torch type for the number of an ONNX data type."""
    try:
        return _DTYPES[ir.DataType(code)]
    except (KeyError, ValueError):
        known_types = {int(kind): kind.name for kind in ir.DataType}
        name = known_types.get(code, str(code))
        raise OnnxReadError(f"its data type {name} has no equivalent in torch") from None


def tensor_from_array(array: np.ndarray) -> Tensor:
    """Convert an array, also with a type of ml_dtypes, to a tensor. The tensor may share the memory of the array."""
    array = np.asarray(array)
    if array.dtype in _TYPES_OF_ML_DTYPES:
        bits, dtype = _TYPES_OF_ML_DTYPES[array.dtype]
        return torch.from_numpy(np.array(array).view(bits)).view(dtype)
    if array.dtype in _INT4_CONTAINERS:
        array = array.astype(_INT4_CONTAINERS[array.dtype])
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        raise OnnxReadError(f"values of type {array.dtype} cannot be read")
    is_shared = array.flags.writeable and array.flags.c_contiguous
    return torch.from_numpy(array if is_shared else np.array(array, order="C"))


def as_constant(tensor: Tensor) -> Value:
    """Return a constant as a KnownArray if it may be a shape or a setting: one number, or a few whole numbers."""
    if tensor.is_complex():
        return tensor
    if tensor.is_floating_point():
        return known_from_tensor(tensor) if tensor.numel() == 1 else tensor
    return known_from_tensor(tensor) if tensor.numel() <= MAX_KNOWN_INTEGERS else tensor


def known_from_tensor(tensor: Tensor) -> KnownArray:
    """Convert a tensor to a KnownArray."""
    # float8 has no tolist()
    plain = tensor.float() if tensor.dtype.is_floating_point and tensor.dtype != torch.float64 else tensor
    return known_array(plain.reshape(-1).tolist(), tuple(tensor.shape), tensor.dtype)
