"""Smaller inputs for a file that takes too long to run: one sample, then also parts of its size.

A file has the sizes of its example, so it cannot run with these inputs itself. `verify` writes another file of the same
model for them.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from scalepoint.compat.torch_names import pytree
from scalepoint.graph.dry_run import BoundInputs

HALVINGS = 3  # down to an eighth of each size
IMAGE_STEP = 32  # most networks need image sizes that are multiples of this
MIN_IMAGE_SIZE, MIN_SEQUENCE_LENGTH = 32, 8


def shrink_inputs(inputs: BoundInputs) -> Iterator[BoundInputs]:
    """Yield smaller inputs, the largest first. Values are cut off at the end of their axes."""
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.ndim > 1]
    batch = max((len(value) for value in tensors), default=1)
    previous = describe_sizes(inputs)
    for halvings in range(HALVINGS + 1):
        divisor = 2**halvings
        smaller = pytree.tree_map(lambda value, divisor=divisor: _shrink(value, batch, divisor), inputs)
        sizes = describe_sizes(smaller)
        if sizes != previous:
            yield smaller
        previous = sizes


def _shrink(value: Any, batch: int, divisor: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    value = value[:1] if len(value) == batch else value
    # Images (N, C, H, W) shrink along all spatial axes, tokens (N, L) or (N, L, C) along L.
    for axis in range(2, value.ndim) if value.ndim > 3 else (1,):
        size = value.shape[axis]
        if value.ndim > 3:
            least = max(size // divisor // IMAGE_STEP * IMAGE_STEP, MIN_IMAGE_SIZE)
        else:
            least = max(size // divisor, MIN_SEQUENCE_LENGTH)
        if divisor > 1 and least < size:
            value = value.narrow(axis, 0, least)
    return value.contiguous()


def is_cropped(inputs: BoundInputs, smaller: BoundInputs) -> bool:
    """Whether smaller inputs are only a part of one sample, instead of a whole sample."""
    pairs = zip(pytree.tree_leaves(inputs), pytree.tree_leaves(smaller), strict=True)
    return any(isinstance(value, Tensor) and value.shape[1:] != part.shape[1:] for value, part in pairs)


def describe_sizes(inputs: BoundInputs) -> str:
    """Return the sizes of all tensors, for example "1x3x112x112"."""
    leaves = pytree.tree_leaves(inputs)
    return ", ".join("x".join(map(str, value.shape)) for value in leaves if isinstance(value, Tensor))
