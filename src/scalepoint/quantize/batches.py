"""Batches of the user's data: what counts as data, and how a batch becomes the inputs of a model.

    tensor              the only input
    tuple or list       the inputs in order; entries after the model's inputs (labels) are dropped
    dict                the inputs by name; other keys are dropped

Batches are read under the default dtype of the caller, as in a loop of the caller.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils.data import Dataset

from scalepoint.errors import CalibrationError, UsageError, short_repr
from scalepoint.graph.capture import as_tensor
from scalepoint.graph.example_inputs import check_values
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.support.torch_state import caller_dtype

ForwardLoop = Callable[[nn.Module], Any]
Data = ForwardLoop | Iterable[Any]


def check_data(data: Any, *, passes: int = 1) -> None:
    """Raise UsageError if the data is neither batches nor a function, or cannot be read `passes` times."""
    if isinstance(data, Tensor | Mapping):
        raise UsageError(
            f"the data must be an iterable of batches or a function, got {type(data).__name__}: wrap it in a list"
        )
    if isinstance(data, str | bytes) or (not callable(data) and not isinstance(data, Iterable)):
        hint = ": wrap it in a DataLoader" if isinstance(data, Dataset) else ""
        raise UsageError(f"the data must be an iterable of batches or a function, got {short_repr(data)}{hint}")
    if callable(data) and not _accepts_one_argument(data):
        raise UsageError(
            f"{short_repr(data)} cannot be called with the model: a function for data gets the model and calls it; if "
            "the function returns batches, pass list(function())"
        )
    if passes > 1 and isinstance(data, Iterator):
        raise UsageError(
            "the data is read more than once, but an iterator can be read only once: pass a list, loader or function"
        )


def _accepts_one_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function written in C has no signature
        return True
    return True


def count_batches(data: Any, max_batches: int | None = None) -> int | None:
    """Return the number of batches, at most `max_batches`; None if it is known only after reading them."""
    try:
        length = None if callable(data) else len(data)
    except TypeError:
        length = None
    if length is None or max_batches is None:
        return max_batches if length is None else length
    return min(length, max_batches)


def iterate_batches(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, each read under the default dtype of the caller."""
    with caller_dtype():
        batches = iter(data)
    while True:
        with caller_dtype():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def read_first_inputs(model: nn.Module, data: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the first batch."""
    for batch in iterate_batches(data):
        return to_model_inputs(batch, model)
    raise CalibrationError("the data is empty: 0 batches")


def to_model_inputs(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as args and kwargs of the model. Entries after the model's inputs, such as labels, are dropped."""
    names, required = get_input_names(model)
    if isinstance(batch, Mapping):
        missing = [name for name in required if name not in batch]
        if missing:
            raise CalibrationError(
                f"the batch has {', '.join(map(str, batch))}; the model also needs {', '.join(missing)}"
            )
        return (), {name: _to_tensor(batch[name]) for name in names if name in batch}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if len(batch) < len(required):
            raise CalibrationError(f"the batch has {len(batch)} inputs, the model takes {', '.join(names)}")
        return tuple(_to_tensor(value) for value in batch[: len(names)]), {}
    return (_to_tensor(batch),), {}


def _to_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | Tensor):
        tensor = as_tensor(value)
        check_values(tensor)
        return tensor
    if isinstance(value, int | float | bool | type(None) | list | tuple | Mapping):
        return value
    raise CalibrationError(f"a batch must contain tensors or arrays, got {short_repr(value)}")


def get_input_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the inputs of forward, and of those without a default."""
    if isinstance(model, fx.GraphModule):
        signature = inspect.signature(model.forward)
    else:
        signature = inspect.signature(MethodType(type(model).forward, model))  # removes self, whatever its name
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return [parameter.name for parameter in parameters], [parameter.name for parameter in required]


def drop_extra_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop positional inputs that forward does not take: an example may be a batch of a loader, with its labels."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return args, kwargs
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(positional) - 1  # without self
    return args[: max(count, 1)], kwargs


def describe_batch(batch: Any) -> str:
    if isinstance(batch, Tensor | np.ndarray):
        return f"{tuple(batch.shape)} {batch.dtype}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {describe_batch(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(describe_batch, batch)) + ")"
    return short_repr(batch)


def describe_captured_inputs(model: nn.Module) -> str:
    """Describe the inputs that a captured model takes; * is a dynamic axis."""
    captured = _get_captured_inputs(model)
    descriptions = [f"{name} {_format_shape(tensor)} {tensor.dtype}" for name, tensor in captured.items()]
    return f"; the model was captured with {', '.join(descriptions)}" if descriptions else ""


def _format_shape(tensor: Tensor) -> str:
    sizes = [
        "*" if isinstance(size, torch.SymInt) and not is_concrete_int(size) else str(size) for size in tensor.shape
    ]
    return f"({', '.join(sizes)})"


def differs_from_capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an input has a dtype, a number of axes or a fixed size that the model was not captured with."""
    captured = _get_captured_inputs(model)
    inputs = {**dict(zip(captured, args, strict=False)), **kwargs}
    for name, expected in captured.items():
        tensor = inputs.get(name)
        if not isinstance(tensor, Tensor):
            continue
        if tensor.dtype != expected.dtype or tensor.ndim != expected.ndim:
            return True
        sizes = zip(tensor.shape, expected.shape, strict=True)
        if any(is_concrete_int(expected_size) and expected_size != size for size, expected_size in sizes):
            return True
    return False


def _get_captured_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return the fake tensors of the inputs that the model was captured with, by name; {} if there are none."""
    placeholders = model.graph.find_nodes(op="placeholder") if isinstance(model, fx.GraphModule) else []
    fake_tensors = {str(node.target): get_fake_tensor(node) for node in placeholders}
    return {name: tensor for name, tensor in fake_tensors.items() if tensor is not None}
