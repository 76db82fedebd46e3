"""Block views: a tensor divided into blocks is the same memory, with every divided axis split in two.

    shape (N, K), block (1, 32)  ->  view (N, K/32, 32), parameters (N, K/32, 1)

An axis with blocks of size 1 or of the size of the axis is not split. A shorter last block is a second, smaller view.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from scalepoint.errors import BlockSizeMismatchError


@dataclass(frozen=True)
class BlockView:
    """Shapes in which a tensor and its parameters broadcast.

    Attributes:
        tensor: Shape of the view of the tensor.
        params: Shape of the view of the parameters.
        spans: The axes of the view that lie inside a block.
        counts: Number of blocks along each axis of the tensor.
    """

    tensor: tuple[int, ...]
    params: tuple[int, ...]
    spans: tuple[int, ...]
    counts: tuple[int, ...]


def block_view(shape: Sequence[int], block: Sequence[int]) -> BlockView:
    """Describe how a tensor is viewed block by block.

    Args:
        shape: Shape of the tensor; axes are multiples of their blocks.
        block: Size of a block along each axis.
    """
    tensor: list[int] = []
    params: list[int] = []
    spans: list[int] = []
    for size, extent in zip(shape, block, strict=True):
        if extent == size:
            spans.append(len(tensor))
            tensor.append(size)
            params.append(1)
        elif extent == 1:
            tensor.append(size)
            params.append(size)
        else:
            tensor += [size // extent, extent]
            params += [size // extent, 1]
            spans.append(len(tensor) - 1)
    return BlockView(tuple(tensor), tuple(params), tuple(spans), block_counts(shape, block))


def block_counts(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Count the blocks along each axis: the shape of scale, zero point and minval.

    Args:
        shape: Shape of the tensor.
        block: Size of a block along each axis. A last, shorter block counts.
    """
    return tuple(-(-size // extent) if extent else 0 for size, extent in zip(shape, block, strict=True))


def is_ragged(shape: Sequence[int], block: Sequence[int]) -> bool:
    return any(extent and size % extent for size, extent in zip(shape, block, strict=True))


def check_divides(shape: Sequence[int], block: Sequence[int]) -> None:
    """Check that blocks divide a shape.

    Args:
        shape: Shape of the tensor.
        block: Size of a block along each axis.

    Raises:
        BlockSizeMismatchError: The first axis that its block does not divide.
    """
    for axis, (size, extent) in enumerate(zip(shape, block, strict=True)):
        if extent and size % extent:
            raise BlockSizeMismatchError(
                f"axis {axis} of shape {tuple(shape)} has {size} elements, which blocks of {extent} do not divide: "
                f"choose a divisor of {size}, or a ragged last block with pad=True"
            )


Slices = tuple[slice, ...]


def split_ragged(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[Slices, Slices, tuple[int, ...]]]:
    """Yield the parts of a tensor that their block sizes divide: (slices of tensor, slices of parameters, block)."""
    axes: list[list[tuple[slice, slice, int]]] = []
    for size, extent in zip(shape, block, strict=True):
        full_blocks = size // extent
        covered = full_blocks * extent
        parts = [(slice(0, covered), slice(0, full_blocks), extent)] if full_blocks else []
        if size % extent:
            parts.append((slice(covered, size), slice(full_blocks, full_blocks + 1), size % extent))
        axes.append(parts)
    for parts_of_axes in product(*axes):
        tensor, params, extents = zip(*parts_of_axes, strict=True)
        yield tensor, params, extents


def as_blocks(tensor: Tensor, block: Sequence[int]) -> Tensor:
    """Arrange a tensor as one row per block.

    Args:
        tensor: Any tensor whose axes are multiples of their blocks.
        block: Size of a block along each axis.

    Returns:
        Shape (number of blocks, elements of a block), in the order of scale and zero point.
    """
    if tensor.ndim == 0:
        return tensor.reshape(1, 1)
    view = block_view(tensor.shape, block)
    block_axes = [axis for axis in range(len(view.tensor)) if axis not in view.spans]
    rows = 1
    for count in view.counts:
        rows *= count
    return tensor.view(view.tensor).permute(*block_axes, *view.spans).reshape(rows, -1)


def as_memory_order(tensor: Tensor) -> Tensor:
    """Flatten a tensor in the order of its memory if that needs no copy (channels last), else in the usual order."""
    if tensor.is_contiguous() or tensor.ndim < 2:
        return tensor.reshape(-1)
    strides, sizes = tensor.stride(), tensor.shape
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], -sizes[axis]))).reshape(-1)
