"""TensorWriter: adds tensors and simple operators to a .tflite file.

It stores constants once and writes the RESHAPE, TRANSPOSE, CAST and DEQUANTIZE operators that an operand needs before
an operation can read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.formats.litert.schema import TYPES, DynamicExtent, LiteRtFile, QuantizationParameters
from scalepoint.formats.litert.values import FixedBatchError, Order, QuantizedConstant, Value, model_order
from scalepoint.numerics import dtype_name


class TensorWriter:
    """A file under construction, with methods that take and return values instead of tensor indices."""

    def __init__(self) -> None:
        self.file = LiteRtFile()
        self.inputs: dict[str, Value] = {}
        self.constant_names: dict[int, str] = {}  # by id of the tensor
        self._constants: dict[tuple[int, Order], int] = {}  # (id of the tensor, order) -> index in the file
        self._quantized_constants: dict[tuple[Any, ...], int] = {}
        self._referenced: list[Any] = []  # keeps constants alive: the dicts above are keyed by id or address

    def name_constant(self, value: Tensor, name: str) -> Tensor:
        """Set the name that a constant has in the file. Returns the constant."""
        self._referenced.append(value)
        self.constant_names[id(value)] = name
        return value

    def add_constant(self, data: Tensor | np.ndarray, name: str = "constant") -> int:
        array = data.detach().cpu().contiguous().numpy() if isinstance(data, Tensor) else data
        return self.file.add_constant(name, array)

    def add_int_list(self, values: Sequence[int]) -> int:
        return self.file.add_constant("sizes", np.array(values, np.int32))

    def add_number(self, value: float, dtype: str) -> int:
        return self.file.add_constant("number", np.full(1, value, np.dtype(dtype)))

    def materialize(self, value: Any, order: Order | None = None) -> int:
        """Return the index of a tensor that contains the value, with its axes in `order` (default: as in the model).

        Stores a constant, or writes a TRANSPOSE, if the file has no such tensor yet.
        """
        if isinstance(value, QuantizedConstant):
            return self._store_quantized_constant(value)
        if isinstance(value, Tensor):
            return self._store_constant(value, order or model_order(value.ndim))
        tensors: dict[Order, int] = value.tensors
        order = order or model_order(value.rank)
        if order not in tensors:
            tensors[order] = self._write_transpose(value, order)
        return tensors[order]

    def as_value(self, value: Value | Tensor) -> Value:
        """Return a value; a constant is stored."""
        if isinstance(value, Value):
            return value
        order = model_order(value.ndim)
        return Value(tuple(value.shape), dtype_name(value.dtype), {order: self.materialize(value)})

    def _store_quantized_constant(self, constant: QuantizedConstant) -> int:
        """Store the codes once, even if several operations read them."""
        codes = constant.codes
        address = codes.__array_interface__["data"][0]
        key = (address, codes.shape, codes.strides, constant.dtype, constant.quantization.axis)
        if key not in self._quantized_constants:
            self._referenced.append(codes)
            self._quantized_constants[key] = self.file.add_constant(
                constant.name, codes, constant.quantization, constant.dtype
            )
        return self._quantized_constants[key]

    def _store_constant(self, value: Tensor, order: Order) -> int:
        key = (id(value), order)
        if key not in self._constants:
            name = self.constant_names.get(id(value), "constant")
            self._referenced.append(value)
            self._constants[key] = self.add_constant(value.permute(order), name)
        return self._constants[key]

    def _write_transpose(self, value: Value, order: Order) -> int:
        shape = [value.shape[axis] for axis in order]
        source_order = value.order
        source = value.tensors[source_order]
        is_integer = value.quantization is not None
        result = self.file.add_tensor("transposed", shape, "int8" if is_integer else value.dtype, value.quantization)
        # If only axes of extent 1 move, the numbers stay in the same order in memory: a RESHAPE is enough.
        if _axes_longer_than_one(source_order, value.shape) == _axes_longer_than_one(order, value.shape):
            inputs = [source, self.add_int_list(reshape_sizes(shape))]
            self.file.add_operator("RESHAPE", inputs, [result], is_integer, {})
        else:
            inputs = [source, self.add_int_list([source_order.index(axis) for axis in order])]
            self.file.add_operator("TRANSPOSE", inputs, [result], is_integer, {})
        return result

    def dequantize(self, value: Any) -> Any:
        """Return the value in float; a value without codes is returned unchanged."""
        if isinstance(value, QuantizedConstant):
            return self.name_constant(torch.from_numpy(value.values), value.name)
        if not isinstance(value, Value) or value.quantization is None:
            return value
        if value.dequantized is None:
            order = value.order
            value.dequantized = self.emit("DEQUANTIZE", [value.tensors[order]], value.shape, value.dtype, order=order)
        return value.dequantized

    def emit(
        self,
        operator: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        dtype: str,
        *,
        order: Order | None = None,
        quantization: QuantizationParameters | None = None,
        name: str = "",
        is_integer: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Value:
        """Write an operator with one output and return the output.

        Args:
            operator: The name in the schema.
            inputs: Indices of the input tensors.
            shape: The shape of the output as the model sees it.
            dtype: The dtype of the output in the model.
            order: The order in which the output is stored; default: as in the model.
            quantization: The parameters of an int8 output.
            name: The name of the output tensor; default: the name of the operator.
            is_integer: Whether the operator computes in integers, which selects its version; default: whether the
                output is int8.
            options: Fields of the operator's options.
        """
        order = order or model_order(len(shape))
        stored_shape = [shape[axis] for axis in order]
        stored_dtype = "int8" if quantization is not None else dtype
        output = self.file.add_tensor(name or operator.lower(), stored_shape, stored_dtype, quantization)
        if is_integer is None:
            is_integer = quantization is not None
        self.file.add_operator(operator, inputs, [output], is_integer, options or {})
        return Value(tuple(shape), dtype, {order: output}, quantization)

    def emit_elementwise(
        self, operator: str, x: Value, more_inputs: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> Value:
        """Write an operator that works on each element alone, in the order in which `x` is stored."""
        order = x.order
        return self.emit(operator, [x.tensors[order], *more_inputs], x.shape, x.dtype, order=order, options=options)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Write a RESHAPE of the value as the model sees it."""
        source_order = next(
            (stored for stored in value.tensors if _is_model_order(stored, value.shape)), model_order(value.rank)
        )
        source = self.materialize(value, source_order)
        return self.reshape_stored(value, source, shape, model_order(len(shape)))

    def reshape_stored(self, value: Value, source: int, shape: Sequence[int], order: Order) -> Value:
        """Write a RESHAPE of one stored tensor of the value. Its numbers are those of `shape`, stored in `order`."""
        inputs = [source, self.add_int_list(reshape_sizes([shape[axis] for axis in order]))]
        return self.emit("RESHAPE", inputs, shape, value.dtype, order=order, quantization=value.quantization)

    def quantize(self, value: Value, quantization: QuantizationParameters) -> Value:
        """Write a QUANTIZE of floats, or of codes with other parameters."""
        order, is_integer = value.order, value.quantization is not None
        return self.emit(
            "QUANTIZE",
            [value.tensors[order]],
            value.shape,
            "float32",
            order=order,
            quantization=quantization,
            is_integer=is_integer,
        )

    def cast(self, x: Value, dtype: str) -> Value:
        if x.dtype == dtype:
            return x
        types = self.file.schema.TensorType
        options = {"inDataType": getattr(types, TYPES[x.dtype]), "outDataType": getattr(types, TYPES[dtype])}
        return self.emit("CAST", [x.tensors[x.order]], x.shape, dtype, order=x.order, options=options)

    def zeros_per_sample(self, rank: int) -> Value:
        """Return float zeros of shape (batch, 1, 1, ..). Adding a tensor to them repeats it for every sample."""
        has_batch = (x for x in self.inputs.values() if x.rank and isinstance(x.shape[0], DynamicExtent))
        source = next(has_batch, None)
        if source is None:
            raise FixedBatchError("no input has a batch")
        slice_shape = [source.shape[0], *[1] * (source.rank - 1)]
        begin, end, steps = [0] * source.rank, [int(size) for size in slice_shape], [1] * source.rank
        inputs = [self.materialize(source), *map(self.add_int_list, (begin, end, steps))]
        masks = {"beginMask": 1, "endMask": 1}  # bit 0: the whole of axis 0, the batch
        first_elements = self.emit("STRIDED_SLICE", inputs, slice_shape, source.dtype, options=masks)
        zeros = self.emit_elementwise("MUL", self.cast(first_elements, "float32"), [self.add_number(0, "float32")])
        return self.reshape(zeros, [source.shape[0], *[1] * (rank - 1)])


def reshape_sizes(shape: Sequence[int]) -> list[int]:
    """Return the sizes that RESHAPE takes: -1 for the dynamic extent, of which it allows one."""
    sizes = [-1 if isinstance(size, DynamicExtent) else int(size) for size in shape]
    if sizes.count(-1) > 1:
        raise FixedBatchError(f"a reshape to {sizes}")
    return sizes


def _axes_longer_than_one(order: Order, shape: Sequence[int]) -> list[int]:
    """Return the axes with more than one element, in `order`. A dynamic extent counts as longer than one."""
    return [axis for axis in order if isinstance(shape[axis], DynamicExtent) or shape[axis] != 1]


def _is_model_order(order: Order, shape: Sequence[int]) -> bool:
    """Whether a tensor in `order` has its numbers in memory as the model has them."""
    return _axes_longer_than_one(order, shape) == _axes_longer_than_one(model_order(len(shape)), shape)
