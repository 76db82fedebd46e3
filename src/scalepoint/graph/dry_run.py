"""Run the user's model without side effects: inputs and buffers are copies during the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.support.torch_state import caller_dtype

BoundInputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword inputs


def dry_run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the model on copies of the inputs and return its outputs."""
    args, kwargs = clone_tensors((args, kwargs))
    with buffers_restored(model), caller_dtype():
        return model(*args, **kwargs)


def clone_tensors(values: Any) -> Any:
    """Copy nested values with every tensor cloned, so that a model that writes into its inputs changes the copy."""
    return pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Discard what a run writes into buffers: inside, the modules have copies of their buffers."""
    originals = [(module, module._buffers) for module in model.modules()]
    for module, buffers in originals:
        copies = {name: None if value is None else value.clone() for name, value in buffers.items()}
        vars(module)["_buffers"] = copies
    try:
        yield
    finally:
        for module, buffers in originals:
            vars(module)["_buffers"] = buffers
