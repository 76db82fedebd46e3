"""Constants of a plain torch.onnx.export: what a layer deploys, computed outside of the tracer.

While torch records a model, its parameters are stand-ins without values, and whatever is computed from them becomes
nodes of the file: a batch norm that is folded into a weight became Mul(weight, factor) before QuantizeLinear, which
compilers do not fold. So a layer remembers its tensors while they are real, and computes with those.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


class _Place(NamedTuple):
    """A parameter or buffer of a module, and the tensor that stood there."""

    held: dict[str, Any]  # module._parameters or module._buffers
    name: str
    tensor: Tensor


class RealTensors:
    """The parameters and buffers of some modules, by reference: nothing is copied."""

    def __init__(self, places: Iterable[_Place]) -> None:
        self._places = tuple(places)

    @classmethod
    def of(cls, whole: Iterable[nn.Module], owners: Iterable[nn.Module]) -> Self | None:
        """The tensors of modules with their submodules, and those of owners without: an attention module owns its
        input weight, and other layers are its submodules. None if a tensor has no values, or is a stand-in already."""
        found: dict[tuple[int, str], _Place] = {}
        for module in (*(inner for outer in whole for inner in outer.modules()), *owners):
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        found[id(held), name] = _Place(held, name, tensor)
        is_real = all(
            type(place.tensor) in (Tensor, nn.Parameter) and not place.tensor.is_meta for place in found.values()
        )
        return cls(found.values()) if is_real else None

    def fit(self) -> bool:
        """Whether the same places hold tensors of the same shapes now, real or not."""
        present = [place.held.get(place.name) for place in self._places]
        tables = {id(place.held): place.held for place in self._places}.values()
        count = sum(tensor is not None for held in tables for tensor in held.values())
        with _not_traced():  # a traced shape consists of tensors
            return count == len(self._places) and all(
                tensor is not None and tensor.shape == place.tensor.shape
                for place, tensor in zip(self._places, present, strict=True)
            )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put them back where stand-ins are now, and record nothing."""
        present = [place.held.get(place.name) for place in self._places]
        try:
            for place in self._places:
                place.held[place.name] = place.tensor
            with _not_traced(), _disable_current_modes(), torch._C.DisableTorchFunction():
                yield
        finally:
            for place, tensor in zip(self._places, present, strict=True):
                place.held[place.name] = tensor


@contextmanager
def _not_traced() -> Iterator[None]:
    """Turn the tracer of the older ONNX exporter off."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
