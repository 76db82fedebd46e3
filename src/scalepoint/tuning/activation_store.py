"""Where the walk keeps values: in memory as far as the limit goes, then in files of a temporary folder.

What a quantizer gave is kept as its codes, a byte an element, and comes back bit for bit.
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
    """Values by key; what is no plain tensor stays in memory as it is."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.values: dict[Any, Any] = {}
        self._folder: TemporaryFolder | None = None
        self._count = 0

    def put(self, key: Any, value: Any, quantizer: QuantStub | None = None) -> None:
        """Keep a value; with the quantizer that gave it, as codes."""
        self.drop(key)
        if isinstance(value, Tensor) and quantizer is not None and _can_store_codes(quantizer, value):
            value = _QuantizedTensor(value, quantizer)
        tensor = value.codes if isinstance(value, _QuantizedTensor) else value
        size = tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
        if isinstance(tensor, Tensor) and size and self.held + size > self.limit:
            on_disk = self._spilled(tensor.contiguous())
            value = value.moved(on_disk) if isinstance(value, _QuantizedTensor) else on_disk
        else:
            self.held += size
        self.values[key] = value

    def __contains__(self, key: Any) -> bool:
        return key in self.values

    def get(self, key: Any) -> Any:
        value = self.values[key]
        if isinstance(value, _QuantizedTensor):
            return value.values()
        return value.read() if isinstance(value, _TensorOnDisk) else value

    def drop(self, key: Any) -> None:
        value = self.values.pop(key, None)
        value = value.codes if isinstance(value, _QuantizedTensor) else value
        if isinstance(value, _TensorOnDisk):
            value.path.unlink(missing_ok=True)
        elif isinstance(value, Tensor):
            self.held -= value.numel() * value.element_size()

    def _spilled(self, value: Tensor) -> "_TensorOnDisk":
        if self._folder is None:
            self._folder = TemporaryFolder()
        self._count += 1
        path = self._folder.path / str(self._count)
        value.detach().reshape(-1).view(torch.uint8).numpy().tofile(path)
        return _TensorOnDisk(path, value.dtype, value.shape)

    def close(self) -> None:
        self.values.clear()
        if self._folder is not None:
            self._folder.close()


class _TensorOnDisk:
    def __init__(self, path: Path, dtype: torch.dtype, shape: torch.Size) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape

    def read(self) -> Tensor:
        size = self.path.stat().st_size
        return torch.from_file(str(self.path), size=size, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


class _QuantizedTensor:
    """A tensor as its quantizer's codes, with the parameters that it had then."""

    def __init__(self, value: Tensor, quantizer: QuantStub) -> None:
        self.impl, self.dtype = quantizer.quantizer, value.dtype
        self.qparams = QParams(quantizer.scale.clone(), quantizer.zero_point.clone(), None)
        self.codes: Tensor | _TensorOnDisk = self.impl.quantize(value, *self.qparams)

    def moved(self, place: _TensorOnDisk) -> "_QuantizedTensor":
        self.codes = place
        return self

    def values(self) -> Tensor:
        codes = self.codes.read() if isinstance(self.codes, _TensorOnDisk) else self.codes
        found: Tensor = self.impl.dequantize(codes, *self.qparams, output_dtype=self.dtype)
        return found


def _can_store_codes(quantizer: QuantStub, value: Tensor) -> bool:
    """Whether one byte an element says it all."""
    spec, on = quantizer.spec, quantizer.enabled and not quantizer.quantizer.is_disabled()
    is_plain = isinstance(quantizer.calculator.granularity, PerTensorGranularity) and spec.qformulation == "zp"
    is_static = not quantizer.calculator.always_called
    is_small = spec.n_bits <= 8 and not quantizer.quantizer.grid.format.is_float
    return on and is_plain and is_static and is_small and value.is_floating_point() and value.numel() > 0
