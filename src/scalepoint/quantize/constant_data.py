"""Finds calibration data that never changes: tensors with the same single value in every batch.

A range of one point gives a scale that is wrong for every other value, and the result looks exact on the same data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree
from scalepoint.quantize.quantizers import QuantStub, get_consumer_name

SAMPLE_SIZE = 64  # values that are compared first; real data differs among them, and the rest is not read
MAX_NAMES = 5


class _ValueTracker:
    """Checks whether a tensor has one and the same value in all batches."""

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
        sample = flat[:: max(1, flat.numel() // SAMPLE_SIZE)]
        self.is_constant = all(bool((values == self.value).all()) for values in (sample, flat))

    @property
    def summary(self) -> list[Any]:
        """[count, is_constant, value], which a rank sends to the others."""
        value = 0.0 if self.value is None else float(self.value) + 0.0  # adding 0.0 turns -0.0 into 0.0
        return [self.count, self.is_constant, value]


class ConstantDataCheck:
    """Observes the inputs of a model and of its quantizers during calibration."""

    def __init__(self, model: nn.Module, stubs: Sequence[QuantStub]) -> None:
        self._model = model
        self._stubs = [stub for stub in stubs if not stub.is_fixed]
        self._stub_trackers = [_ValueTracker() for _ in self._stubs]
        self._input_trackers: dict[str, _ValueTracker] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        handles = [self._model.register_forward_pre_hook(self._track_inputs, with_kwargs=True)]
        for stub, tracker in zip(self._stubs, self._stub_trackers, strict=True):
            handles.append(stub.register_forward_pre_hook(lambda _, args, tracker=tracker: tracker.add(args[0])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _track_inputs(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        placeholders = module.graph.find_nodes(op="placeholder") if isinstance(module, fx.GraphModule) else []
        values = pytree.tree_leaves(args)
        if placeholders:
            names = [str(node.target) for node in placeholders]
        else:
            names = [f"input {index}" for index in range(len(values))]
        for name, value in {**dict(zip(names, values, strict=False)), **kwargs}.items():
            if isinstance(value, Tensor) and not value.is_complex():
                self._input_trackers.setdefault(name, _ValueTracker()).add(value)

    def make_warning(self) -> str:
        """Return a sentence about the tensors with a single value; "" if all values changed. All ranks call it."""
        local = [
            {name: tracker.summary for name, tracker in self._input_trackers.items()},
            [tracker.summary for tracker in self._stub_trackers],
        ]
        per_rank = distributed.gather_values("looking for constant data", local)
        names = list(dict.fromkeys(name for inputs, _ in per_rank for name in inputs))
        input_values = {}
        for name in names:
            input_values[name] = _get_common_value([inputs[name] for inputs, _ in per_rank if name in inputs])
        stubs_by_rank = [stubs for _, stubs in per_rank]
        stub_values = [_get_common_value(list(summaries)) for summaries in zip(*stubs_by_rank, strict=True)]
        findings = []
        # A mask or a step number may be constant while the other inputs change.
        if input_values and None not in input_values.values():
            findings += [f"input {name} is always {value:.6g}" for name, value in input_values.items()]
        readers: dict[float, list[str]] = {}
        for stub, value in zip(self._stubs, stub_values, strict=True):
            if value is not None:
                readers.setdefault(value, []).extend(map(get_consumer_name, stub.consumers))
        findings += [
            f"the activation at {_list_names(layers)} is always {value:.6g}" for value, layers in readers.items()
        ]
        if not findings:
            return ""
        return (
            f"the calibration data is constant: {'; '.join(findings)}. The range of such a tensor is a single point, "
            "and its scale is wrong for every other value: calibrate with samples of real data"
        )


def _get_common_value(summaries: Sequence[Sequence[Any]]) -> float | None:
    """Return the one value that all ranks observed; None if there were several, or fewer than two to compare."""
    observed = [(is_constant, value) for count, is_constant, value in summaries if count]
    total = sum(count for count, _, _ in summaries)
    is_single = bool(observed) and all(is_constant and value == observed[0][1] for is_constant, value in observed)
    return float(observed[0][1]) if is_single and total > 1 else None


def _list_names(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - MAX_NAMES} more" if len(unique) > MAX_NAMES else ""
    return ", ".join(unique[:MAX_NAMES]) + more
