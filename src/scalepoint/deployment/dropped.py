"""Inputs of forward that the calibration data has and the example does not: the file will not have them."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.blame import user_level
from scalepoint.quantize.feeding import batches_of, input_names


class DroppedInputs:
    """Collects, batch by batch, the names of inputs that the model would take and the captured graph does not."""

    def __init__(self, model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
        self.names = input_names(model)[0]
        self.in_example = _names_of_example(model, inputs)
        self.found: dict[str, None] = {}

    def look(self, batch: Any) -> None:
        for name, value in self._named(batch).items():
            if name not in self.in_example and value is not None:
                self.found[name] = None

    def look_at_first(self, data: Any) -> None:
        """The first batch of data that can be read again: a model that needs no calibration reads none."""
        if isinstance(data, Iterable) and not callable(data) and not isinstance(data, Iterator):
            for batch in islice(batches_of(data), 1):
                self.look(batch)

    def _named(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self.names if name in batch}
        if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
            named = dict(zip(self.names, batch, strict=False))
            return {name: value for name, value in named.items() if not _is_labels(value)}
        return {}

    @contextmanager
    def warned_about(self) -> Iterator[None]:
        """Warn at the end, once for all batches."""
        yield
        if self.found:
            names = ", ".join(map(repr, self.found))
            message = (
                f"the data has inputs of the model that the example does not: {names}. They are left out of "
                "calibration, and the file has no such inputs: to keep them, give them in example_inputs= too (the "
                "first batch of the data is an example that has all)"
            )
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _names_of_example(model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> set[str]:
    try:
        bound = inspect.signature(model.forward).bind(*inputs[0], **inputs[1])
    except TypeError:  # the example does not fit forward: capturing the model says how
        return set(input_names(model)[0])
    return {name for name, value in bound.arguments.items() if value is not None}


def _is_labels(value: Any) -> bool:
    """Whether a value without a name looks like class labels that follow the inputs: one whole number per sample."""
    integers = (torch.int64, torch.int32)
    return isinstance(value, int) or (isinstance(value, Tensor) and value.ndim < 2 and value.dtype in integers)
