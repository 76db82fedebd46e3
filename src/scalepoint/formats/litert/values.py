"""Tensors of a model and their form in a .tflite file.

LiteRT's kernels take images with their channels last; PyTorch has them first. A `Value` has the shape that the model
sees, and one or more tensors in the file that contain the same numbers with permuted axes: axis i of a tensor stored
in `order` is axis order[i] of the value. A permute of the model changes only the orders, so it costs nothing. An
operation asks for the order that it needs; a TRANSPOSE is written only if no tensor has that order yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.litert.schema import DynamicExtent, QuantizationParameters

Order = tuple[int, ...]


class FixedBatchError(Exception):
    """An operation prevents a dynamic batch: the file must have the batch size of the example."""


class DataDependentSizeError(Exception):
    """A size depends on the data, but LiteRT plans all shapes before it runs."""


def model_order(rank: int) -> Order:
    """Return the order of axes that the model has."""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    return (0, *range(2, rank), 1) if rank > 2 else model_order(rank)


def permute_order(order: Order, axes: Sequence[int]) -> Order:
    """Return the order of the same stored tensor, seen from a value whose axis i was axis axes[i] before."""
    new_axis = {old: new for new, old in enumerate(axes)}
    return tuple(new_axis[axis] for axis in order)


@dataclass(eq=False)
class Value:
    """A tensor that is computed when the file runs."""

    shape: tuple[int, ...]
    dtype: str  # numpy name of the dtype in the model
    tensors: dict[Order, int] = field(default_factory=dict)  # index of the tensor in the file, for each stored order
    quantization: QuantizationParameters | None = None  # if set, the tensors contain int8 codes
    is_quantized_per_row: bool = False  # the operation that reads it quantizes each row to int8
    dequantized: "Value | None" = None  # the float value, once a DEQUANTIZE is written

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def order(self) -> Order:
        """The order in which the value was stored first."""
        return next(iter(self.tensors))

    def permuted(self, axes: Sequence[int]) -> "Value":
        result = Value(tuple(self.shape[axis] for axis in axes), self.dtype, {}, self.quantization)
        result.tensors = {permute_order(order, axes): tensor for order, tensor in self.tensors.items()}
        if self.dequantized is not None:
            result.dequantized = self.dequantized.permuted(axes)
        return result


@dataclass(frozen=True)
class QuantizedConstant:
    """A constant that is stored as integer codes."""

    name: str
    codes: np.ndarray  # int8; int32 for biases
    dtype: str  # int8, int4 or int32
    quantization: QuantizationParameters

    @property
    def values(self) -> np.ndarray:
        """The dequantized codes, in float32."""
        scale = self.quantization.scale.astype(np.float32)
        if self.quantization.block:
            scale = scale.repeat(self.quantization.block, 1)
        elif scale.ndim:
            scale = scale.reshape([-1 if axis == self.quantization.axis else 1 for axis in range(self.codes.ndim)])
        zero_point = np.float32(self.quantization.zero_point)
        return ((self.codes.astype(np.float32) - zero_point) * scale).astype(np.float32)


def read_shape(value: Tensor, batch_size: int) -> tuple[int, ...]:
    """Return the shape for the example, with a DynamicExtent for each axis that depends on the batch size."""
    return tuple(read_extent(size, batch_size) for size in value.shape)


def read_extent(size: Any, batch_size: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression: Any = size.node.expr
    if not expression.free_symbols:
        return int(expression)
    # torch names sizes that depend on the data u0, u1, ...; sizes of inputs are s0, s1, ...
    if any(str(symbol).startswith("u") for symbol in expression.free_symbols):
        raise DataDependentSizeError("has a size that depends on the data")
    return DynamicExtent(int(expression.subs(dict.fromkeys(expression.free_symbols, batch_size))))
