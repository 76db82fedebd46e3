"""What a tensor of the model is in a file: one tensor or several, each with its axes in an order of its own.

LiteRT's kernels take pictures with their channels last, PyTorch has them first. A value is the tensor as the model sees
it; its `stored` forms hold the same numbers with permuted axes: axis i of a form with the order o is axis o[i] of the
value. A permute of the model is then another order of the same form, and costs nothing. An operation asks for the order
that it takes, and only where no form has it is a TRANSPOSE written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.litert.schema import QuantizationParameters

Order = tuple[int, ...]


class DynamicExtent(int):
    """An extent that follows the batch; as a number it is that of the example."""

    is_free = True


class FixedBatchError(Exception):
    """The batch cannot be free in this file."""


class DataDependentSizeError(Exception):
    """A size that is only known once the data is there: shapes of a file are planned."""


def model_order(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    return (0, *range(2, rank), 1) if rank > 2 else model_order(rank)


def permute_order(order: Order, axes: Sequence[int]) -> Order:
    """The order of the same form for the value whose axis i is axis axes[i]."""
    place = {axis: new for new, axis in enumerate(axes)}
    return tuple(place[axis] for axis in order)


@dataclass(eq=False)
class Value:
    """A tensor that is computed when the file runs; with `codes` its forms hold integers that stand for floats."""

    shape: tuple[int, ...]
    kind: str  # of the values, as numpy names it
    stored: dict[Order, int] = field(default_factory=dict)
    codes: QuantizationParameters | None = None
    is_rows: bool = False  # whether who multiplies it finds a scale for each of its rows
    as_float: "Value | None" = None  # once it is dequantized

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def order(self) -> Order:
        """Of the form that was there first."""
        return next(iter(self.stored))

    def permuted(self, axes: Sequence[int]) -> "Value":
        made = Value(tuple(self.shape[axis] for axis in axes), self.kind, {}, self.codes)
        made.stored = {permute_order(order, axes): place for order, place in self.stored.items()}
        if self.as_float is not None:
            made.as_float = self.as_float.permuted(axes)
        return made


@dataclass(frozen=True)
class QuantizedConstant:
    """A constant of codes."""

    name: str
    data: np.ndarray  # int8
    kind: str  # int8, int4 or int32
    quantized: QuantizationParameters

    @property
    def values(self) -> np.ndarray:
        """What they stand for."""
        scale = self.quantized.scale.astype(np.float32)
        if self.quantized.block:
            scale = scale.repeat(self.quantized.block, 1)
        elif scale.ndim:
            scale = scale.reshape([-1 if axis == self.quantized.axis else 1 for axis in range(self.data.ndim)])
        zero = np.float32(self.quantized.zero_point)
        return ((self.data.astype(np.float32) - zero) * scale).astype(np.float32)


def read_shape(value: Tensor, batch: int) -> tuple[int, ...]:
    """With the extents of the example; what follows from the batch is free."""
    return tuple(read_extent(each, batch) for each in value.shape)


def read_extent(size: Any, batch: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression: Any = size.node.expr
    if not expression.free_symbols:
        return int(expression)
    if any(str(symbol).startswith("u") for symbol in expression.free_symbols):  # as torch names what it cannot know
        raise DataDependentSizeError("has a size that depends on the data")
    return DynamicExtent(int(expression.subs(dict.fromkeys(expression.free_symbols, batch))))


def to_numpy_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
