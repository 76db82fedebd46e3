"""What a captured graph remembers of its capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from scalepoint.graph.dynamic_axes import Axes
from scalepoint.graph.nodes import get_state, set_state


@dataclass(frozen=True)
class Origin:
    """`fixed_batch`: the inputs whose first axis the model computes with, and its size. `is_widened`: an example of one
    was captured as two, so the recorded work is twice the example's. `leave`: modules that were not looked into.
    `axes`: those that are free by name; `steps` in which the sizes of that name may change, and others at which the
    graph was seen to do what the model does, `tried`.
    `uncast`: where torch.autocast would have cast, and to which type."""

    fixed_batch: Mapping[str, int] = field(default_factory=dict)
    is_widened: bool = False
    leave: tuple[str, ...] = ()
    axes: Axes = field(default_factory=dict)
    size_steps: Mapping[str, int] = field(default_factory=dict)
    compared_sizes: Mapping[str, int] = field(default_factory=dict)
    ignored_autocast: tuple[str, ...] = ()


def get_origin(model: nn.Module) -> Origin:
    """Of a captured graph, and of what was made from it."""
    return get_state(model, Origin) or Origin()


def set_origin(model: fx.GraphModule, **known: Any) -> None:
    set_state(model, replace(get_origin(model), **known))
