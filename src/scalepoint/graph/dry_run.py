"""One run of the user's model that leaves no trace: its inputs and buffers are copies for the time of the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.support.torch_state import caller_dtype


def dry_run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the model gives for these inputs."""
    args, kwargs = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, kwargs))
    with buffers_restored(model), caller_dtype():
        return model(*args, **kwargs)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """What a run writes into buffers is gone afterwards."""
    buffers = [(module, module._buffers) for module in model.modules()]
    for module, own in buffers:
        vars(module)["_buffers"] = {name: None if value is None else value.clone() for name, value in own.items()}
    try:
        yield
    finally:
        for module, own in buffers:
            vars(module)["_buffers"] = own
