"""Stores the values of the walk: in memory up to a limit, then in files of a temporary folder.

The output of a quantizer is stored as its codes, one byte per element, and is restored bit for bit.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import PerTensorGranularity
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
        if isinstance(value, Tensor) and quantizer is not None and _can_store_codes(quantizer, value):
            value = _QuantizedTensor(value, quantizer)
        tensor = value.codes if isinstance(value, _QuantizedTensor) else value
        size = tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
        if isinstance(tensor, Tensor) and size and self.bytes_in_memory + size > self.max_bytes:
            on_disk = self._write_to_disk(tensor.contiguous())
            if isinstance(value, _QuantizedTensor):
                value.codes = on_disk
            else:
                value = on_disk
        else:
            self.bytes_in_memory += size
        self.values[key] = value

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


class _TensorOnDisk:
    """A file with the bytes of a tensor."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: torch.Size) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape

    def read(self) -> Tensor:
        """Map the file into memory."""
        size = self.path.stat().st_size
        return torch.from_file(str(self.path), size=size, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


class _QuantizedTensor:
    """The codes of a quantizer's output, with its parameters at that time: they may change later."""

    def __init__(self, value: Tensor, quantizer: QuantStub) -> None:
        self.impl, self.dtype = quantizer.quantizer, value.dtype
        self.qparams = QParams(quantizer.scale.clone(), quantizer.zero_point.clone(), None)
        self.codes: Tensor | _TensorOnDisk = self.impl.quantize(value, *self.qparams)

    def dequantize(self) -> Tensor:
        codes = self.codes.read() if isinstance(self.codes, _TensorOnDisk) else self.codes
        value: Tensor = self.impl.dequantize(codes, *self.qparams, output_dtype=self.dtype)
        return value


def _can_store_codes(quantizer: QuantStub, value: Tensor) -> bool:
    """Whether one byte per element and one scale restore the value exactly."""
    spec = quantizer.spec
    is_on = quantizer.enabled and not quantizer.quantizer.is_disabled()
    is_per_tensor = isinstance(quantizer.calculator.granularity, PerTensorGranularity) and spec.qformulation == "zp"
    is_static = not quantizer.calculator.always_called
    fits_in_byte = spec.n_bits <= 8 and not quantizer.quantizer.grid.format.is_float
    return is_on and is_per_tensor and is_static and fits_in_byte and value.is_floating_point() and value.numel() > 0
