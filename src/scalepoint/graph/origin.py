"""How a graph was captured, stored on the graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from scalepoint.graph.dynamic_axes import Axes
from scalepoint.graph.nodes import get_state, set_state
from scalepoint.support.interface_names import InterfaceNames


@dataclass(frozen=True)
class Origin:
    """How a graph was captured.

    Attributes:
        fixed_batch: Size of the first axis, by input, where the model computes with that size as a number.
        is_widened: Whether an example with batch 1 was captured with batch 2, so that recorded MACs are doubled.
        leave: Submodules that were not captured and are called as they are.
        axes: Free axes by input, axis and name.
        size_steps: The step in which the size of each named axis may change.
        compared_sizes: Other sizes, at which the graph was compared with the model.
        ignored_autocast: Lines where torch.autocast would have cast, and the dtype.
        interface_names: Names of inputs and outputs in the file that the model was read from.
    """

    fixed_batch: Mapping[str, int] = field(default_factory=dict)
    is_widened: bool = False
    leave: tuple[str, ...] = ()
    axes: Axes = field(default_factory=dict)
    size_steps: Mapping[str, int] = field(default_factory=dict)
    compared_sizes: Mapping[str, int] = field(default_factory=dict)
    ignored_autocast: tuple[str, ...] = ()
    interface_names: InterfaceNames = field(default_factory=InterfaceNames)


def get_origin(model: nn.Module) -> Origin:
    """Return the origin of a captured graph, or of a graph that was made from one."""
    return get_state(model, Origin) or Origin()


def set_origin(model: fx.GraphModule, **changes: Any) -> None:
    """Change fields of the origin of a graph."""
    set_state(model, replace(get_origin(model), **changes))
