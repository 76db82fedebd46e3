"""Find calibration data that never changes: tensors that have one and the same value in every batch.

A range of one point gives a scale that fits no other value, and the result looks exact on the same data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree
from scalepoint.quantize.quantizers import QuantStub, get_consumer_name

SAMPLE_SIZE = 64  # values that are compared first: real data differs among them, so that the rest is not read
MAX_NAMES = 5


class _ValueTracker:
    """The one value of a tensor over all batches, as long as there is only one."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.is_constant = True
        self.count = 0

    def add(self, tensor: Tensor) -> None:
        if not self.is_constant or not tensor.numel():
            return
        flat = tensor.detach().reshape(-1)
        self.count += flat.numel()
        if self.value is None:
            self.value = flat[0].clone()
        few = flat[:: max(1, flat.numel() // SAMPLE_SIZE)]
        self.is_constant = all(bool((each == self.value).all()) for each in (few, flat))

    @property
    def summary(self) -> list[Any]:
        """[count, is_constant, value], for the other ranks."""
        return [self.count, self.is_constant, 0.0 if self.value is None else float(self.value) + 0.0]  # never -0.0


class ConstantDataCheck:
    """Watches the inputs of a model and what its stubs observe, while the model is calibrated."""

    def __init__(self, model: nn.Module, stubs: Sequence[QuantStub]) -> None:
        self._model = model
        self._stubs = [stub for stub in stubs if not stub.is_fixed]
        self._seen = [_ValueTracker() for _ in self._stubs]
        self._inputs: dict[str, _ValueTracker] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        handles = [self._model.register_forward_pre_hook(self._track_inputs, with_kwargs=True)]
        for stub, values in zip(self._stubs, self._seen, strict=True):
            handles.append(stub.register_forward_pre_hook(lambda _, args, values=values: values.add(args[0])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _track_inputs(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        places = module.graph.find_nodes(op="placeholder") if isinstance(module, fx.GraphModule) else []
        leaves = pytree.tree_leaves(args)
        names = [str(node.target) for node in places] if places else [f"input {at}" for at in range(len(leaves))]
        named = {**dict(zip(names, leaves, strict=False)), **kwargs}
        for name, value in named.items():
            if isinstance(value, Tensor) and not value.is_complex():
                self._inputs.setdefault(name, _ValueTracker()).add(value)

    def warning(self) -> str:
        """What had one value only, in a sentence; "" where all changed. Every rank calls it."""
        own = [{name: each.summary for name, each in self._inputs.items()}, [each.summary for each in self._seen]]
        summaries = distributed.gather_values("looking for constant data", own)
        names = list(dict.fromkeys(name for inputs, _ in summaries for name in inputs))
        found = {name: _get_common_value([inputs[name] for inputs, _ in summaries if name in inputs]) for name in names}
        stubs = [_get_common_value(list(each)) for each in zip(*(seen for _, seen in summaries), strict=True)]
        said = []
        if found and None not in found.values():  # a mask or a step may be constant where the rest is not
            said += [f"input {name} is always {value:.6g}" for name, value in found.items()]
        readers: dict[float, list[str]] = {}
        for stub, value in zip(self._stubs, stubs, strict=True):
            if value is not None:
                readers.setdefault(value, []).extend(map(get_consumer_name, stub.consumers))
        said += [f"the activation at {_list_names(layers)} is always {value:.6g}" for value, layers in readers.items()]
        if not said:
            return ""
        return (
            f"the calibration data is constant: {'; '.join(said)}. The range there is a single point, and its scale "
            "fits no other value: calibrate with samples of real data"
        )


def _get_common_value(said: Sequence[Sequence[Any]]) -> float | None:
    """The one value that all ranks saw; None where there were several, or fewer than two numbers to compare."""
    seen = [(is_constant, value) for count, is_constant, value in said if count]
    is_point = bool(seen) and all(is_constant and value == seen[0][1] for is_constant, value in seen)
    return float(seen[0][1]) if is_point and sum(each[0] for each in said) > 1 else None


def _list_names(names: Sequence[str]) -> str:
    known = list(dict.fromkeys(names))
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(known[:MAX_NAMES]) + more
