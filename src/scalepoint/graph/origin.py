"""What a captured graph remembers of its capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

_KEY = "scalepoint.origin"


@dataclass(frozen=True)
class Origin:
    """`fixed_batch`: the inputs whose first axis the model computes with, and its size. `is_widened`: an example of one
    was captured as two, so the recorded work is twice the example's. `leave`: modules that were not looked into.
    `uncast`: where torch.autocast would have cast, and to which type."""

    fixed_batch: Mapping[str, int] = field(default_factory=dict)
    is_widened: bool = False
    leave: tuple[str, ...] = ()
    uncast: tuple[str, ...] = ()


def origin_of(model: nn.Module) -> Origin:
    """Of a captured graph, and of what was made from it."""
    found = getattr(model, "meta", {}).get(_KEY)
    return found if isinstance(found, Origin) else Origin()


def note_origin(model: fx.GraphModule, **known: Any) -> None:
    model.meta[_KEY] = replace(origin_of(model), **known)
