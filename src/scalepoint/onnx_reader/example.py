"""Example inputs from the shapes that a file declares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.errors import UsageError, did_you_mean

# Default size of a free axis by the number of axes of the input: images have 4, videos and volumes 5. Other inputs get
# OTHER_DEFAULT_SIZE. The first axis is the batch: it gets the size 1.
DEFAULT_SIZES = {4: 224, 5: 32}
OTHER_DEFAULT_SIZE = 64


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the file.

    Attributes:
        name: Its name in the file.
        dtype: Its type in the module.
        shape: The size of each axis; a free axis has its name instead, or "". None if the file does not declare it.
        file_dtype: Its type in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...] | None
    file_dtype: torch.dtype


def choose_shapes(
    inputs: Mapping[str, TensorInfo], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Choose a size for every axis.

    Args:
        inputs: The inputs of the file.
        shapes: Shapes that the user chose, by the name of the input.

    Returns:
        The shapes by argument name, and the default sizes that were chosen, by the name of the axis.
    """
    by_name = {info.name: name for name, info in inputs.items()} | {name: name for name in inputs}
    for name in shapes:
        if name not in by_name:
            raise UsageError(f"shape: the file has no input {name!r}: {did_you_mean(name, by_name)}")
    requested = {by_name[name]: tuple(shape) for name, shape in shapes.items()}
    sizes: dict[str, int] = {}  # name of an axis -> its size: axes with the same name have the same size
    for name, shape in requested.items():
        _check_shape(inputs[name], shape)
        declared = inputs[name].shape or ()
        sizes |= {axis: size for axis, size in zip(declared, shape, strict=False) if isinstance(axis, str) and axis}
    chosen: dict[str, tuple[int, ...]] = {}
    defaults: dict[str, int] = {}
    for name, info in inputs.items():
        if name not in requested and info.shape is None:
            raise UsageError(
                f"the file does not declare the shape of {info.name!r}: pass it, such as shape={{{name!r}: (1, 3)}}"
            )
        chosen[name] = requested.get(name) or tuple(
            _choose_size(size, axis, info, sizes, defaults) for axis, size in enumerate(info.shape or ())
        )
    return chosen, defaults


def _choose_size(size: int | str, axis: int, info: TensorInfo, sizes: dict[str, int], defaults: dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size in sizes:
        return sizes[size]
    default = DEFAULT_SIZES.get(len(info.shape or ()), OTHER_DEFAULT_SIZE) if axis else 1
    defaults[size or f"axis {axis} of {info.name}"] = default
    if size:
        sizes[size] = default
    return default


def _check_shape(info: TensorInfo, shape: Sequence[int]) -> None:
    declared = info.shape
    if any(size < 1 for size in shape):
        raise UsageError(f"shape of {info.name!r}: sizes must be at least 1, got {tuple(shape)}")
    if declared is None:
        return
    fits = len(declared) == len(shape)
    for size, requested_size in zip(declared, shape, strict=False):
        if isinstance(size, int) and size != requested_size:
            fits = False
    if not fits:
        sizes = ", ".join(str(size) or "?" for size in declared)
        raise UsageError(f"shape of {info.name!r}: {tuple(shape)} does not fit the file, which declares [{sizes}]")


def example_inputs(
    inputs: Mapping[str, TensorInfo], shapes: Mapping[str, Sequence[int]], seed: int
) -> dict[str, Tensor]:
    """Make random inputs. The same seed gives the same inputs; shapes that are missing are chosen."""
    generator = torch.Generator().manual_seed(seed)
    chosen, _ = choose_shapes(inputs, shapes)
    return {name: _random_tensor(inputs[name], shape, generator) for name, shape in chosen.items()}


def _random_tensor(info: TensorInfo, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if info.dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(info.dtype)
    if info.dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=torch.bool)
    if not shape:
        return torch.tensor(1, dtype=info.dtype)
    is_image = info.dtype == torch.uint8 and len(shape) > 2
    largest = 255 if is_image else 1  # 0 and 1 are valid token ids and masks
    return torch.randint(0, largest + 1, tuple(shape), generator=generator).to(info.dtype)
