"""Constants of a plain torch.onnx.export: what a layer deploys, computed outside of the tracer.

While torch records a model, its parameters are stand-ins without values, and whatever is computed from them becomes
nodes of the file: a batch norm that is folded into a weight became Mul(weight, factor) before QuantizeLinear, which
compilers do not fold. So a layer remembers its tensors while they are real, and computes with those.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from scalepoint.compat.outside_tracing import run_untraced

Result = TypeVar("Result")


class _TensorSlot(NamedTuple):
    """A parameter or buffer of a module, and the tensor that stood there."""

    held: dict[str, Any]  # module._parameters or module._buffers
    name: str
    tensor: Tensor


class RealTensors:
    """The parameters and buffers of some modules, by reference: nothing is copied."""

    def __init__(self, places: Iterable[_TensorSlot]) -> None:
        self._places = tuple(places)

    @classmethod
    def collect(cls, whole: Iterable[nn.Module], owners: Iterable[nn.Module]) -> Self | None:
        """The tensors of modules with their submodules, and those of owners without: an attention module owns its
        input weight, and other layers are its submodules. None if a tensor has no values, or is a stand-in already."""
        found: dict[tuple[int, str], _TensorSlot] = {}
        for module in (*(inner for outer in whole for inner in outer.modules()), *owners):
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        found[id(held), name] = _TensorSlot(held, name, tensor)
        is_real = all(
            type(place.tensor) in (Tensor, nn.Parameter) and not place.tensor.is_meta for place in found.values()
        )
        return cls(found.values()) if is_real else None

    def have_same_shapes(self) -> bool:
        """Whether the same places hold tensors of the same shapes now, real or not."""
        present = [place.held.get(place.name) for place in self._places]
        tables = {id(place.held): place.held for place in self._places}.values()
        count = sum(tensor is not None for held in tables for tensor in held.values())
        return count == len(self._places) and run_untraced(
            lambda: all(
                tensor is not None and tensor.shape == place.tensor.shape
                for place, tensor in zip(self._places, present, strict=True)
            )
        )

    def compute(self, function: Callable[[], Result]) -> Result:
        """Call a function that reads the real tensors, and record nothing of what it computes."""
        present = [place.held.get(place.name) for place in self._places]
        try:
            for place in self._places:
                place.held[place.name] = place.tensor
            return run_untraced(function)
        finally:
            for place, tensor in zip(self._places, present, strict=True):
                place.held[place.name] = tensor
