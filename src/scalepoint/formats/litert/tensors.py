"""The tensors of a file as forms ask for them: in an order of axes, as floats, in another shape; and operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.litert.schema import TYPES, LiteRtFile, QuantizationParameters
from scalepoint.formats.litert.values import (
    DynamicExtent,
    FixedBatchError,
    Order,
    QuantizedConstant,
    Value,
    model_order,
)


class TensorWriter:
    """A file as it grows, value by value."""

    def __init__(self) -> None:
        self.file = LiteRtFile()
        self.constants: dict[tuple[int, Order], int] = {}
        self.held: dict[tuple[Any, ...], int] = {}
        self.alive: list[Any] = []  # an id is that of one constant as long as it lives
        self.names: dict[int, str] = {}
        self.inputs: dict[str, Value] = {}

    def name_constant(self, value: Tensor, name: str) -> Tensor:
        """The same constant, which has a name in the file."""
        self.alive.append(value)
        self.names[id(value)] = name
        return value

    def constant(self, data: Tensor | np.ndarray, name: str = "constant") -> int:
        array = data.detach().cpu().contiguous().numpy() if isinstance(data, Tensor) else data
        return self.file.constant(name, array)

    def ints(self, values: Sequence[int]) -> int:
        return self.file.constant("sizes", np.array(values, np.int32))

    def take(self, value: Any, order: Order | None = None) -> int:
        """The place of a tensor whose axes stand in this order: as the model has them unless told."""
        if isinstance(value, QuantizedConstant):
            return self._store_quantized(value)
        if isinstance(value, Tensor):
            return self._constant(value, order or model_order(value.ndim))
        stored: dict[Order, int] = value.stored
        wanted = order or model_order(value.rank)
        if wanted not in stored:
            stored[wanted] = self._write_transpose(value, wanted)
        return stored[wanted]

    def _store_quantized(self, value: QuantizedConstant) -> int:
        """Once, also where several operations multiply by it."""
        data = value.data
        key = (data.__array_interface__["data"][0], data.shape, data.strides, value.kind, value.quantized.axis)
        if key not in self.held:
            self.alive.append(data)
            self.held[key] = self.file.constant(value.name, data, value.quantized, value.kind)
        return self.held[key]

    def _constant(self, value: Tensor, order: Order) -> int:
        key = (id(value), order)
        if key not in self.constants:
            name = self.names.get(id(value), "constant")
            self.alive.append(value)
            self.constants[key] = self.constant(value.permute(order), name)
        return self.constants[key]

    def _write_transpose(self, value: Value, wanted: Order) -> int:
        before = value.order
        shape = [value.shape[axis] for axis in wanted]
        source = value.stored[before]
        made = self.file.tensor("transposed", shape, "int8" if value.codes else value.kind, value.codes)
        is_integer = value.codes is not None
        if _axes_longer_than_one(before, value.shape) == _axes_longer_than_one(wanted, value.shape):
            self.file.operation("RESHAPE", [source, self.ints(reshape_sizes(shape))], [made], is_integer, {})
        else:
            axes = self.ints([before.index(axis) for axis in wanted])
            self.file.operation("TRANSPOSE", [source, axes], [made], is_integer, {})
        return made

    def dequantized(self, value: Any) -> Any:
        """Where codes stand for floats, the floats."""
        if isinstance(value, QuantizedConstant):
            return self.name_constant(torch.from_numpy(value.values), value.name)
        if not isinstance(value, Value) or value.codes is None:
            return value
        if value.as_float is None:
            order = value.order
            value.as_float = self.emit("DEQUANTIZE", [value.stored[order]], value.shape, value.kind, order=order)
        return value.as_float

    def emit(
        self,
        operator: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        kind: str,
        *,
        order: Order | None = None,
        codes: QuantizationParameters | None = None,
        name: str = "",
        is_integer: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Value:
        """An operator, and what it gives: a value of this shape, stored in this order."""
        order = order or model_order(len(shape))
        place = self.file.tensor(
            name or operator.lower(), [shape[axis] for axis in order], "int8" if codes else kind, codes
        )
        integer = codes is not None if is_integer is None else is_integer
        self.file.operation(operator, inputs, [place], integer, options or {})
        return Value(tuple(shape), kind, {order: place}, codes)

    def reshaped(self, value: Value, shape: Sequence[int], order: Order | None = None) -> Value:
        """The same numbers, row by row as the model sees them, in another shape, stored in this order."""
        order = order or model_order(len(shape))
        same = next((each for each in value.stored if _is_model_order(each, value.shape)), model_order(value.rank))
        source = self.take(value, same)
        target = [shape[axis] for axis in order]
        return self.emit(
            "RESHAPE", [source, self.ints(reshape_sizes(target))], shape, value.kind, order=order, codes=value.codes
        )

    def batch_of_zeros(self, rank: int) -> Value:
        """As long as the batch, with extents of one besides: what is added to it is repeated for every sample."""
        source = next(
            (each for each in self.inputs.values() if each.rank and isinstance(each.shape[0], DynamicExtent)), None
        )
        if source is None:
            raise FixedBatchError("no input has a batch")
        ones = [source.shape[0], *[1] * (source.rank - 1)]
        begin, end, steps = [0] * source.rank, ones, [1] * source.rank
        inputs = [self.take(source), *(self.ints([int(size) for size in each]) for each in (begin, end, steps))]
        masks = {"beginMask": 1, "endMask": 1}  # all of the batch
        made = self.emit("STRIDED_SLICE", inputs, ones, source.kind, options=masks)
        flat = self.same("MUL", self.cast(made, "float32"), [self.number(0, "float32")])
        return self.reshaped(flat, [source.shape[0], *[1] * (rank - 1)])

    def same(
        self, operator: str, x: Value, beside: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> Value:
        """An operator that works element by element, in whichever order they are stored."""
        return self.emit(operator, [x.stored[x.order], *beside], x.shape, x.kind, order=x.order, options=options)

    def cast(self, x: Value, kind: str) -> Value:
        if x.kind == kind:
            return x
        types = self.file.schema.TensorType
        options = {"inDataType": getattr(types, TYPES[x.kind]), "outDataType": getattr(types, TYPES[kind])}
        return self.emit("CAST", [x.stored[x.order]], x.shape, kind, order=x.order, options=options)

    def number(self, value: float, kind: str) -> int:
        return self.file.constant("number", np.full(1, value, np.dtype(kind)))


def reshape_sizes(shape: Sequence[int]) -> list[int]:
    """Of a RESHAPE: one extent may be free."""
    found = [-1 if isinstance(each, DynamicExtent) else int(each) for each in shape]
    if found.count(-1) > 1:
        raise FixedBatchError(f"a reshape to {found}")
    return found


def _axes_longer_than_one(order: Order, shape: Sequence[int]) -> list[int]:
    """The axes that are longer than one, in order."""
    return [axis for axis in order if isinstance(shape[axis], DynamicExtent) or shape[axis] != 1]


def _is_model_order(order: Order, shape: Sequence[int]) -> bool:
    return _axes_longer_than_one(order, shape) == _axes_longer_than_one(model_order(len(shape)), shape)
