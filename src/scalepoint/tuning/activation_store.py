"""Stores the values of the walk: in memory up to a limit, then in files of a temporary folder.

The output of a quantizer is stored as its codes, one byte per element, and is restored bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import FakeQuantizeImplBase, PerTensorGranularity
from scalepoint.support.files import TemporaryFolder


class ActivationStore:
    """Values by key. A value that is not a tensor stays in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes_in_memory = max_bytes, 0
        self.values: dict[Any, Any] = {}
        self._folder: TemporaryFolder | None = None
        self._file_count = 0

    def put(self, key: Any, value: Any, quantizer: QuantStub | None = None) -> None:
        """Store a value; as codes if it is the output of `quantizer`."""
        self.drop(key)
        if not isinstance(value, Tensor):
            self.values[key] = value
        elif quantizer is not None and _can_store_codes(quantizer, value):
            qparams = QParams(quantizer.scale.clone(), quantizer.zero_point.clone(), None)  # they may change later
            codes = quantizer.quantizer.quantize(value, *qparams)
            self.values[key] = _QuantizedTensor(quantizer.quantizer, qparams, value.dtype, self._store_tensor(codes))
        else:
            self.values[key] = self._store_tensor(value)

    def _store_tensor(self, tensor: Tensor) -> "Tensor | _TensorOnDisk":
        """Return the tensor if there is memory left, else a file with its values."""
        size = tensor.numel() * tensor.element_size()
        if size and self.bytes_in_memory + size > self.max_bytes:
            return self._write_to_disk(tensor.contiguous())
        self.bytes_in_memory += size
        return tensor

    def __contains__(self, key: Any) -> bool:
        return key in self.values

    def get(self, key: Any) -> Any:
        value = self.values[key]
        if isinstance(value, _QuantizedTensor):
            return value.dequantize()
        return value.read() if isinstance(value, _TensorOnDisk) else value

    def drop(self, key: Any) -> None:
        value = self.values.pop(key, None)
        value = value.codes if isinstance(value, _QuantizedTensor) else value
        if isinstance(value, _TensorOnDisk):
            value.path.unlink(missing_ok=True)
        elif isinstance(value, Tensor):
            self.bytes_in_memory -= value.numel() * value.element_size()

    def _write_to_disk(self, value: Tensor) -> "_TensorOnDisk":
        if self._folder is None:
            self._folder = TemporaryFolder()
        self._file_count += 1
        path = self._folder.path / str(self._file_count)
        value.detach().reshape(-1).view(torch.uint8).numpy().tofile(path)
        return _TensorOnDisk(path, value.dtype, value.shape)

    def close(self) -> None:
        self.values.clear()
        if self._folder is not None:
            self._folder.close()


@dataclass(frozen=True)
class _TensorOnDisk:
    """A file with the bytes of a tensor."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size

    def read(self) -> Tensor:
        """Map the file into memory."""
        size = self.path.stat().st_size
        return torch.from_file(str(self.path), size=size, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class _QuantizedTensor:
    """The codes of a quantizer's output, and what restores the output."""

    quantizer: FakeQuantizeImplBase
    qparams: QParams
    dtype: torch.dtype
    codes: Tensor | _TensorOnDisk

    def dequantize(self) -> Tensor:
        codes = self.codes.read() if isinstance(self.codes, _TensorOnDisk) else self.codes
        return self.quantizer.dequantize(codes, *self.qparams, output_dtype=self.dtype)


def _can_store_codes(quantizer: QuantStub, value: Tensor) -> bool:
    """Whether one byte per element and one scale restore the value exactly."""
    spec = quantizer.spec
    is_on = quantizer.enabled and not quantizer.quantizer.is_disabled()
    is_per_tensor = isinstance(quantizer.calculator.granularity, PerTensorGranularity) and spec.qformulation == "zp"
    is_static = not quantizer.calculator.always_called
    fits_in_byte = spec.n_bits <= 8 and not quantizer.quantizer.grid.format.is_float
    return is_on and is_per_tensor and is_static and fits_in_byte and value.is_floating_point() and value.numel() > 0
