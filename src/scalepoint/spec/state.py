"""The state of quantizers, so that save, load, copy, move, compile and export work.

- A switch is a one-byte buffer, so it is in the state_dict. Its value is also stored in Python: reading that needs no
  device sync, and a compiler sees a constant. The version counter of the buffer shows whether it was written to.
- Buffers are empty at first and get their shape from the first tensor, or from a checkpoint.
- Scales and statistics stay float32 when the model is cast.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn


class Stateful(nn.Module):
    """An nn.Module with switches and with buffers that get their shape later."""

    def __init__(self) -> None:
        super().__init__()
        self._switch_values: dict[str, bool] = {}
        self._switch_versions: dict[str, tuple[Tensor | None, int]] = {}

    def add_empty(self, name: str, dtype: torch.dtype | None = torch.float32) -> None:
        """Add a buffer that gets its shape later, or None if this module does not use it (dtype=None)."""
        with torch.inference_mode(False):  # tensors of inference mode cannot be written to later
            self.register_buffer(name, None if dtype is None else torch.empty(0, dtype=dtype))

    def add_counter(self, name: str) -> None:
        with torch.inference_mode(False):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def add_switch(self, name: str, on: bool) -> None:
        with torch.inference_mode(False):
            self.register_buffer(name, torch.tensor([int(on)], dtype=torch.uint8))
        self._store_switch(name, on)

    def _store_switch(self, name: str, on: bool) -> None:
        """Store the value of a switch, and the version of its buffer."""
        buffer = self._buffers[name]
        self._switch_values[name] = on
        has_version = buffer is not None and not buffer.is_inference()
        self._switch_versions[name] = (buffer, buffer._version) if has_version and buffer is not None else (None, 0)

    def is_on(self, name: str) -> bool:
        """Return the value of a switch. It is a constant in a compiled or exported graph."""
        return self.are_on((name,))[0]

    def are_on(self, names: Sequence[str]) -> list[bool]:
        """Return the values of several switches. Takes little longer than reading one."""
        if not torch.compiler.is_compiling():
            buffers, versions = self._buffers, self._switch_versions
            for name in names:
                buffer = buffers[name]
                known_buffer, version = versions[name]
                if buffer is None:
                    continue
                has_no_version = torch.is_inference_mode_enabled() and buffer.is_inference()
                if known_buffer is not buffer or has_no_version or version != buffer._version:
                    self._read_switch(name, buffer)
        values = self._switch_values
        return [values[name] for name in names]

    def _read_switch(self, name: str, buffer: Tensor) -> None:
        """Read a buffer that was written to or replaced. Ignores tensors without values (fake, meta)."""
        if type(buffer) is Tensor and not buffer.is_meta:
            self._store_switch(name, bool(buffer.item()))

    def switch(self, name: str, on: bool) -> None:
        buffer = self._buffers[name]
        if buffer is not None and not buffer.is_meta:
            with torch.no_grad():
                buffer.fill_(int(on))
        self._store_switch(name, bool(on))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load the state. A buffer that is empty here or in the checkpoint first gets the shape in the checkpoint."""
        for name, buffer in [*self._buffers.items(), *self._parameters.items()]:
            saved = state_dict.get(prefix + name)
            if buffer is None or not isinstance(saved, Tensor) or saved.shape == buffer.shape:
                continue
            if buffer.numel() == 0 or saved.numel() == 0:
                buffer.data = torch.empty(saved.shape, dtype=buffer.dtype, device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.are_on(tuple(self._switch_values))  # a graph that is captured next must contain the loaded values
