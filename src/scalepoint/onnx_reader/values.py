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

MAX_KNOWN_INTEGERS = 64  # constants of more whole numbers are tensors
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
_SAME_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.uint8, torch.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.uint8, torch.float8_e5m2fnuz),
}
_SMALL_INTEGERS = {np.dtype(ml_dtypes.int4): np.int8, np.dtype(ml_dtypes.uint4): np.uint8}


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
        results = [
            round_number(function(*numbers), dtype) for numbers in zip(*(a.reshape(-1) for a in arrays), strict=True)
        ]
        return known(results, arrays[0].shape, dtype)


Value = Tensor | KnownArray
# torch's functions on symbolic sizes have no types.
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min
sym_float: Callable[[Any], Any] = torch.sym_float
sym_int: Callable[[Any], Any] = torch.sym_int
AnyValue = Any  # a Value, None for an omitted one, or a list of values: an ONNX sequence


def known(numbers: Sequence[Any], shape: Sequence[int] | None = None, dtype: torch.dtype = torch.int64) -> KnownArray:
    """Make a KnownArray of numbers. numpy must not look into them, since it cannot convert symbolic sizes."""
    array = np.empty(len(numbers), dtype=object)
    for index, number in enumerate(numbers):
        array[index] = number
    return KnownArray(array.reshape(len(numbers) if shape is None else tuple(shape)), dtype)


def round_number(number: Any, dtype: torch.dtype) -> Any:
    """Convert a number that was computed in Python to the precision of its type in the file."""
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return number
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return float(np.float32(number)) if dtype == torch.float32 else float(number)
    if isinstance(number, float) and not math.isfinite(number):
        raise OnnxReadError(f"the whole number {number} cannot be represented")
    bits, number = torch.iinfo(dtype).bits, int(number)
    if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        return number % 2**bits
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)  # an overflow wraps around


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


def as_number(value: Value, what: str = "value") -> Any:
    """Return the only number of a value."""
    numbers = as_list(value, what)
    if len(numbers) != 1:
        raise OnnxReadError(f"{what} has {len(numbers)} numbers instead of one")
    return numbers[0]


def as_list(value: Value, what: str = "value") -> list[Any]:
    """Return the numbers of a value. A tensor has them only outside of a trace."""
    if isinstance(value, KnownArray):
        return value.to_list()
    if is_traced(value):
        raise OnnxReadError(
            f"its {what} is computed from data, so it is not known when the model is captured: keep this part out of "
            "the file, or fix the input that it depends on with fixed_inputs="
        )
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


def is_traced(value: Tensor) -> bool:
    """Whether a tensor has no values now, because torch.export records the model."""
    return isinstance(value, FakeTensor) or torch.compiler.is_exporting() or value.is_meta


def check_size(shape: Sequence[Any]) -> None:
    """Raise if a tensor of this shape would take many gigabytes: a damaged file may ask for any size."""
    sizes = [size for size in shape if isinstance(size, int)]
    if any(size < 0 for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise OnnxReadError(f"a tensor of shape {list(shape)} cannot be made")


def torch_dtype(code: int) -> torch.dtype:
    """Return the torch type of an ONNX data type."""
    try:
        return _DTYPES[ir.DataType(code)]
    except (KeyError, ValueError):
        known_types = {int(kind): kind.name for kind in ir.DataType}
        name = known_types.get(code, str(code))
        raise OnnxReadError(f"its data type {name} has no equivalent in torch") from None


def tensor_from_array(array: np.ndarray) -> Tensor:
    """Convert numpy's values, including those of ml_dtypes, to a tensor with memory of its own or the array's."""
    array = np.asarray(array)
    if array.dtype in _SAME_BITS:
        bits, dtype = _SAME_BITS[array.dtype]
        return torch.from_numpy(np.array(array).view(bits)).view(dtype)
    if array.dtype in _SMALL_INTEGERS:
        array = array.astype(_SMALL_INTEGERS[array.dtype])
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        raise OnnxReadError(f"values of type {array.dtype} cannot be read")
    is_shared = array.flags.writeable and array.flags.c_contiguous
    return torch.from_numpy(array if is_shared else np.array(array, order="C"))


def as_constant(tensor: Tensor) -> Value:
    """Return a constant as a KnownArray if it has one number, or a few whole ones."""
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    if tensor.is_complex() or tensor.numel() > (MAX_KNOWN_INTEGERS if is_whole else 1) or tensor.dtype.itemsize == 0:
        return tensor
    if tensor.is_floating_point() and tensor.numel() == 0:
        return tensor
    return known_from_tensor(tensor)


def known_from_tensor(tensor: Tensor) -> KnownArray:
    plain = tensor.float() if tensor.dtype.is_floating_point and tensor.dtype != torch.float64 else tensor
    return known(plain.reshape(-1).tolist(), tuple(tensor.shape), tensor.dtype)
