"""Calibration batches of sizes that the file will not take: its axes are fixed at the example's, but for free ones."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.blame import user_level
from scalepoint.graph.free import is_free
from scalepoint.graph.nodes import tensor_of
from scalepoint.graph.origin import origin_of

Place = tuple[str, int]  # an input, and one of its axes


@contextmanager
def telling_of_sizes(model: fx.GraphModule) -> Iterator[None]:
    """Warn at the end, where a batch had another size on an axis that is fixed than the model was captured with."""
    fixed = _fixed(model)
    others: dict[Place, set[int]] = {}

    def look(module: Any, args: Any, kwargs: Any) -> None:
        for name, value in _named(model, args, kwargs).items():
            for axis, size in enumerate(value.shape):
                if fixed.get((name, axis), size) != size:
                    others.setdefault((name, axis), set()).add(size)

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    except Exception as error:  # most often because of them
        if others:
            error.add_note(f"the graph is fixed to the example's sizes: let others be free: {_setting(model, others)}")
        raise
    finally:
        handle.remove()
    if others:
        told = "; ".join(
            f"{name!r} has {_few(sizes)} on axis {axis}, {fixed[name, axis]} in the example"
            for (name, axis), sizes in sorted(others.items())
        )
        message = (
            f"the data has sizes that the file will not take: {told}. It is calibrated with all of them, but fixed to "
            "the example's: pad or resize to it, deploy once for each size, or let them be free: "
            f"{_setting(model, others)}"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _setting(model: fx.GraphModule, others: Iterable[Place]) -> str:
    """What would let these axes be free, beside those that are."""
    axes: dict[str, dict[int, str]] = {name: dict(own) for name, own in origin_of(model).axes.items()}
    for name, axis in sorted(others):
        axes.setdefault(name, {})[axis] = f"{name}_{axis}"
    return f"dynamic_axes={axes}"


def _fixed(model: fx.GraphModule) -> dict[Place, int]:
    places = [(str(node.target), tensor_of(node)) for node in model.graph.find_nodes(op="placeholder")]
    sizes = [(name, axis, size) for name, value in places if value is not None for axis, size in enumerate(value.shape)]
    return {(name, axis): int(size) for name, axis, size in sizes if axis and not is_free(size)}


def _named(model: fx.GraphModule, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Tensors by the inputs of the graph; what is nested in a keyword is left out."""
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    given = {**dict(zip(names, pytree.tree_leaves(args), strict=False)), **kwargs}
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _few(sizes: set[int]) -> str:
    found = sorted(sizes)
    return ", ".join(map(str, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
