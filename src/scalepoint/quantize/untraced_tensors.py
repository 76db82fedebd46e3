"""Computes the constants of a plain torch.onnx.export outside of the tracer.

While torch traces a model, parameters are replaced by fake tensors without values, and everything computed from them
becomes nodes of the file. A folded batch norm became Mul(weight, factor) before QuantizeLinear, which compilers do not
fold. So a layer keeps references to its tensors from before the trace, and computes its constants with those.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from scalepoint.compat.outside_tracing import run_untraced

Result = TypeVar("Result")


class _TensorSlot(NamedTuple):
    """A parameter or buffer of a module, and the untraced tensor in it."""

    table: dict[str, Any]  # module._parameters or module._buffers
    name: str
    tensor: Tensor


class UntracedTensors:
    """References to the parameters and buffers of some modules from before torch traces the model."""

    def __init__(self, slots: Iterable[_TensorSlot]) -> None:
        self._slots = tuple(slots)

    @classmethod
    def collect(cls, trees: Iterable[nn.Module], owners: Iterable[nn.Module]) -> Self | None:
        """Collect the tensors of modules.

        Args:
            trees: Modules that are read with their submodules.
            owners: Modules that are read without: an attention module owns its input weight, and has other layers as
                submodules.

        Returns:
            None if a tensor has no values, or is a fake tensor already.
        """
        slots: dict[tuple[int, str], _TensorSlot] = {}
        for module in (*(inner for tree in trees for inner in tree.modules()), *owners):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        slots[id(table), name] = _TensorSlot(table, name, tensor)
        have_values = all(
            type(slot.tensor) in (Tensor, nn.Parameter) and not slot.tensor.is_meta for slot in slots.values()
        )
        return cls(slots.values()) if have_values else None

    def have_same_shapes(self) -> bool:
        """Return whether the modules have the same tensors, untraced or fake, with the same shapes now."""
        current = [slot.table.get(slot.name) for slot in self._slots]
        tables = {id(slot.table): slot.table for slot in self._slots}.values()
        count = sum(tensor is not None for table in tables for tensor in table.values())
        if count != len(self._slots):  # a tensor was added or removed
            return False

        def compare() -> bool:
            return all(
                tensor is not None and tensor.shape == slot.tensor.shape
                for slot, tensor in zip(self._slots, current, strict=True)
            )

        return run_untraced(compare)

    def compute(self, function: Callable[[], Result]) -> Result:
        """Call a function outside the tracer, with the untraced tensors in their modules."""
        current = [slot.table.get(slot.name) for slot in self._slots]
        try:
            for slot in self._slots:
                slot.table[slot.name] = slot.tensor
            return run_untraced(function)
        finally:
            for slot, tensor in zip(self._slots, current, strict=True):
                slot.table[slot.name] = tensor
