"""Initializers of a graph, written into its data file as they come: one tensor in memory at a time."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor

MAX_INLINE_BYTES = 1024  # bytes up to which a tensor lies in the graph itself
ALIGNMENT = 4096  # where tensors begin, so that they can be mapped


def to_array(tensor: Tensor) -> np.ndarray:
    """A tensor for numpy, which knows bfloat16 by another package."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(bfloat16)
    return tensor.contiguous().numpy()


class InitializerFile:
    """The data file beside a graph."""

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
        """Under a name, which is given back."""
        return self.add_pieces(name, array.shape, array.dtype, [array])

    def add_pieces(self, name: str, shape: tuple[int, ...], dtype: Any, pieces: Iterable[np.ndarray]) -> str:
        """A tensor that comes piece by piece along its first axis."""
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

    def add_view(self, name: str, of: str, shape: tuple[int, ...]) -> str:
        """The same bytes in another shape: stored once."""
        from onnx import TensorProto  # noqa: PLC0415

        tensor = TensorProto()
        tensor.CopyFrom(self.tensors[of])
        tensor.name, tensor.dims[:] = name, shape
        self.tensors[name] = tensor
        return name


def _set_external_data(tensor: Any, location: str, offset: int, length: int) -> None:
    from onnx import TensorProto  # noqa: PLC0415

    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
