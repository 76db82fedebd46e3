"""State that survives: what a quantizer needs so that save, load, copy, move, compile and export just work.

- A switch is a one-byte buffer, so it is in the state_dict, with a Python mirror, so that reading it costs no
  device sync and a compiler sees a constant. A write to the buffer is noticed by its version counter.
- Buffers start empty and take their shape from the first tensor seen, or from a checkpoint.
- Scales and statistics stay float32 when the model is cast.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn


class Stateful(nn.Module):
    """An nn.Module with switches and buffers that take their shape late."""

    def __init__(self) -> None:
        super().__init__()
        self._mirror: dict[str, bool] = {}
        self._mirrored: dict[str, tuple[Tensor | None, int]] = {}

    def add_empty(self, name: str, dtype: torch.dtype | None = torch.float32) -> None:
        """A buffer that takes its shape later; None for one that this module does not have."""
        with torch.inference_mode(False):  # a state that can be written later, wherever the module was made
            self.register_buffer(name, None if dtype is None else torch.empty(0, dtype=dtype))

    def add_counter(self, name: str) -> None:
        with torch.inference_mode(False):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def add_switch(self, name: str, on: bool) -> None:
        with torch.inference_mode(False):
            self.register_buffer(name, torch.tensor([int(on)], dtype=torch.uint8))
        self._remember(name, on)

    def _remember(self, name: str, on: bool) -> None:
        """Mirror a switch, and what its buffer looked like then."""
        buffer = self._buffers[name]
        self._mirror[name] = on
        known = buffer is not None and not buffer.is_inference()
        self._mirrored[name] = (buffer, buffer._version) if known and buffer is not None else (None, 0)

    def is_on(self, name: str) -> bool:
        """The value of a switch. Inside a compiled or exported graph it is a constant of that graph."""
        return self.are_on((name,))[0]

    def are_on(self, names: Sequence[str]) -> list[bool]:
        """The values of several switches, at the price of little more than one."""
        if not torch.compiler.is_compiling():
            buffers, mirrored = self._buffers, self._mirrored
            for name in names:
                buffer = buffers[name]
                known, version = mirrored[name]
                if buffer is None:
                    continue
                is_blind = torch.is_inference_mode_enabled() and buffer.is_inference()  # without a version
                if known is not buffer or is_blind or version != buffer._version:
                    self._read_switch(name, buffer)
        mirror = self._mirror
        return [mirror[name] for name in names]

    def _read_switch(self, name: str, buffer: Tensor) -> None:
        """Read a switch that was written or replaced; a stand-in without a value keeps the last one."""
        if type(buffer) is Tensor and not buffer.is_meta:
            self._remember(name, bool(buffer.item()))

    def switch(self, name: str, on: bool) -> None:
        buffer = self._buffers[name]
        if buffer is not None and not buffer.is_meta:
            with torch.no_grad():
                buffer.fill_(int(on))
        self._remember(name, bool(on))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Give a buffer that is still empty, here or in the checkpoint, the checkpoint's shape; then load."""
        for name, buffer in [*self._buffers.items(), *self._parameters.items()]:
            saved = state_dict.get(prefix + name)
            if buffer is None or not isinstance(saved, Tensor) or saved.shape == buffer.shape:
                continue
            if buffer.numel() == 0 or saved.numel() == 0:
                buffer.data = torch.empty(saved.shape, dtype=buffer.dtype, device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.are_on(tuple(self._mirror))  # a graph captured next must see the loaded switches
