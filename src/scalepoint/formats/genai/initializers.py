"""Writes initializers into the data file of a graph as they are added, so that one tensor is in memory at a time."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor

MAX_INLINE_BYTES = 1024  # smaller tensors are stored in the graph itself
ALIGNMENT = 4096  # bytes; aligned tensors can be memory-mapped


def to_array(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to numpy, with bfloat16 from ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(bfloat16)
    return tensor.contiguous().numpy()


class InitializerFile:
    """The data file next to a graph, and the initializers that refer to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Any] = {}
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, name: str, array: np.ndarray) -> str:
        """Write an array as initializer `name`, and return the name."""
        return self.add_pieces(name, array.shape, array.dtype, [array])

    def add_pieces(self, name: str, shape: tuple[int, ...], dtype: Any, pieces: Iterable[np.ndarray]) -> str:
        """Write an initializer that is computed piece by piece along its first axis."""
        from onnx import TensorProto, helper  # noqa: PLC0415  # only an export needs it

        dtype = np.dtype(dtype)
        tensor = TensorProto(name=name, dims=shape, data_type=helper.np_dtype_to_tensor_dtype(dtype))
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size <= MAX_INLINE_BYTES:
            tensor.raw_data = b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)
        else:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            _set_external_data(tensor, self.path.name, self._file.tell(), size)
            for piece in pieces:
                self._file.write(np.ascontiguousarray(piece).view(np.uint8).data)
        self.tensors[name] = tensor
        return name

    def add_view(self, name: str, source: str, shape: tuple[int, ...]) -> str:
        """Add an initializer with the bytes of `source` in another shape; the bytes are stored once."""
        from onnx import TensorProto  # noqa: PLC0415

        tensor = TensorProto()
        tensor.CopyFrom(self.tensors[source])
        tensor.name, tensor.dims[:] = name, shape
        self.tensors[name] = tensor
        return name


def _set_external_data(tensor: Any, location: str, offset: int, length: int) -> None:
    from onnx import TensorProto  # noqa: PLC0415

    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
