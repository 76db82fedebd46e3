"""Warnings about calibration data that the exported file will not accept.

DroppedInputs             inputs of the model that the data has and the example does not have
warn_about_other_sizes    sizes that differ from those of the example, on axes that are not dynamic
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import ScalepointWarning
from scalepoint.graph.dynamic_axes import is_dynamic
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.graph.origin import get_origin
from scalepoint.graph.user_traceback import user_level
from scalepoint.pipeline.inputs import Example
from scalepoint.quantize.batches import get_input_names, iterate_batches

InputAxis = tuple[str, int]  # name of an input, and one of its axes


@dataclass
class DroppedInputs:
    """Collects inputs of `forward` that the data has and the example does not have: the file will not have them."""

    model: nn.Module
    example: Example
    dropped: dict[str, None] = field(default_factory=dict)  # names, in the order of their appearance

    def __post_init__(self) -> None:
        self._names = get_input_names(self.model)[0]
        self._in_example = self._example_names()

    def check_batch(self, batch: Any) -> None:
        for name, value in self._values_by_name(batch).items():
            if name not in self._in_example and value is not None:
                self.dropped[name] = None

    def check_first_batch(self, data: Any) -> None:
        """Check the first batch, for models that need no calibration and so read no data."""
        if isinstance(data, Iterable) and not callable(data) and not isinstance(data, Iterator):
            for batch in islice(iterate_batches(data), 1):
                self.check_batch(batch)

    def _example_names(self) -> set[str]:
        try:
            bound = inspect.signature(self.model.forward).bind(*self.example.args, **self.example.kwargs)
        except TypeError:  # the example does not fit forward; capture raises the error
            return set(self._names)
        return {name for name, value in bound.arguments.items() if value is not None}

    def _values_by_name(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self._names if name in batch}
        if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):  # a namedtuple is a single input
            values = dict(zip(self._names, batch, strict=False))
            return {name: value for name, value in values.items() if not _looks_like_labels(value)}
        return {}

    @contextmanager
    def warn_at_end(self) -> Iterator[None]:
        """Warn at the end of the block, once for all batches."""
        yield
        if self.dropped:
            names = ", ".join(map(repr, self.dropped))
            message = (
                f"the data has inputs of the model that the example does not have: {names}. They are dropped from "
                "calibration and from the file: to keep them, pass them in example_inputs= too (for example the first "
                "batch of the data)"
            )
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _looks_like_labels(value: Any) -> bool:
    """Whether a value without a name looks like class labels after the inputs: one whole number per sample."""
    integers = (torch.int64, torch.int32)
    return isinstance(value, int) or (isinstance(value, Tensor) and value.ndim < 2 and value.dtype in integers)


@contextmanager
def warn_about_other_sizes(model: fx.GraphModule) -> Iterator[None]:
    """Warn at the end of the block if a batch had a size that the file will not accept.

    Axes of the file are fixed to the example's sizes, except the dynamic ones.
    """
    fixed_sizes = _fixed_sizes(model)
    other_sizes: dict[InputAxis, set[int]] = {}

    def record_sizes(module: Any, args: Any, kwargs: Any) -> None:
        for name, value in _tensors_by_input(model, args, kwargs).items():
            for axis, size in enumerate(value.shape):
                if fixed_sizes.get((name, axis), size) != size:
                    other_sizes.setdefault((name, axis), set()).add(size)

    handle = model.register_forward_pre_hook(record_sizes, with_kwargs=True)
    try:
        yield
    except Exception as error:
        if other_sizes:  # the most frequent cause of errors in a captured graph
            hint = _dynamic_axes_hint(model, other_sizes)
            error.add_note(f"the graph is fixed to the example's sizes: make the other sizes dynamic: {hint}")
        raise
    finally:
        handle.remove()
    if other_sizes:
        listed = "; ".join(
            f"{name!r} has {_first_three(sizes)} on axis {axis}, {fixed_sizes[name, axis]} in the example"
            for (name, axis), sizes in sorted(other_sizes.items())
        )
        message = (
            f"the data has sizes that the file will not accept: {listed}. All of them are used for calibration, but "
            "the file is fixed to the example's sizes: pad or resize the inputs, deploy once for each size, or make "
            f"them dynamic: {_dynamic_axes_hint(model, other_sizes)}"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _dynamic_axes_hint(model: fx.GraphModule, new_axes: Iterable[InputAxis]) -> str:
    """Return the option that makes these axes dynamic, in addition to those that already are."""
    axes: dict[str, dict[int, str]] = {name: dict(names) for name, names in get_origin(model).axes.items()}
    for name, axis in sorted(new_axes):
        axes.setdefault(name, {})[axis] = f"{name}_{axis}"
    return f"dynamic_axes={axes}"


def _fixed_sizes(model: fx.GraphModule) -> dict[InputAxis, int]:
    """Return the sizes of the file's inputs that are constants, without those of axis 0, the batch."""
    fixed_sizes: dict[InputAxis, int] = {}
    for node in model.graph.find_nodes(op="placeholder"):
        value = get_fake_tensor(node)
        for axis, size in enumerate(() if value is None else value.shape):
            if axis and not is_dynamic(size):
                fixed_sizes[str(node.target), axis] = int(size)
    return fixed_sizes


def _tensors_by_input(model: fx.GraphModule, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return tensors by the name of their graph input. Tensors nested in a keyword input are omitted."""
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    values = {**dict(zip(names, pytree.tree_leaves(args), strict=False)), **kwargs}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _first_three(sizes: set[int]) -> str:
    ordered = sorted(sizes)
    text = ", ".join(map(str, ordered[:3]))
    return f"{text} and {len(ordered) - 3} more" if len(ordered) > 3 else text
