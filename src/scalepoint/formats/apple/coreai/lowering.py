"""Translate our operators to operations of Core AI.

    our operator  operation                 used for
    quantize      quantize                  activations
    dequantize    dequantize                activations
                  blockwise_shift_scale     weights: the scale has as many axes as the codes and divides their shape
    look_up       lut_to_dense              palettes: a table of (groups, .., 2^n, 1)

All but look_up compute (code - offset1) * scale + offset2. With a zero point offset1 is the zero point and offset2 is
zero; with a minimum (quantize_minval, dequantize_minval) they are the lowest code of the dtype and the minimum.

Codes, scales, zero points and tables are constants named after their buffers, for example "layer.fc.codes", so that
compare.py finds them in a file. Offsets that are zero stay without a name: the compiler removes them only then.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.formats.apple.coreai.elements import element_type, to_bytes
from scalepoint.numerics import E8M0, dtype_name, get_format
from scalepoint.spec.spec import to_dtype
from scalepoint.support.coreai_text import OWN_PREFIX


def constant_name(buffer_path: str) -> str:
    """Return the name of the constant that stores a buffer of the stored graph."""
    return OWN_PREFIX + re.sub(r"[^A-Za-z0-9_.]", "_", buffer_path)


def register_operators(converter: Any, program: ExportedProgram) -> None:
    """Register the translation of our operators with a TorchConverter, for the constants of one program."""
    lowerings = _Lowerings(program)
    for name in ("quantize", "dequantize", "quantize_minval", "dequantize_minval", "look_up"):
        for overload in ("", ".default"):
            converter.register_torch_lowering(f"scalepoint::{name}{overload}")(getattr(lowerings, name))


class _Lowerings:
    """Lowerings of our operators, as TorchConverter calls them: (values by node name, node, location)."""

    def __init__(self, program: ExportedProgram) -> None:
        self.constants: dict[str, tuple[str, Tensor]] = {}  # by node name: path of the buffer, and its value
        for spec in program.graph_signature.input_specs:
            if spec.target is not None:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                if isinstance(value, Tensor):
                    self.constants[spec.arg.name] = (spec.target, value)
        self.emitted: dict[str, Any] = {}  # constants that the graph already has, by name

    def quantize(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        x, scale, zero_point, axis, _, _, fmt = node.args
        shape = self._shape(scale)
        offsets = self._offset(zero_point, str(fmt), shape), _zeros("float32", shape)
        return self._activation("quantize", values, x, scale, offsets, axis, location)

    def quantize_minval(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        x, scale, minval, axis, _, _, fmt = node.args
        offsets = _lowest_codes(str(fmt), self._shape(scale)), self._constant(minval, "float32", self._shape(scale))
        return self._activation("quantize", values, x, scale, offsets, axis, location)

    def dequantize(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        codes, scale, zero_point, axis, _, fmt = node.args
        shape = self._parameter_shape(codes, scale, axis)
        offsets = self._offset(zero_point, str(fmt), shape), _zeros("float32", shape)
        return self._dequantize(values, node, offsets, location)

    def dequantize_minval(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        codes, scale, minval, axis, _, fmt = node.args
        shape = self._parameter_shape(codes, scale, axis)
        offsets = _lowest_codes(str(fmt), shape), self._constant(minval, "float32", shape)
        return self._dequantize(values, node, offsets, location)

    def _dequantize(self, values: Mapping[str, Any], node: fx.Node, offsets: tuple[Any, Any], location: Any) -> Any:
        """Emit the operation for codes of an activation, or for codes that are a constant."""
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        codes, scale, _, axis, _, fmt = node.args
        if _name(codes) not in self.constants:
            return self._activation("dequantize", values, codes, scale, offsets, axis, location)
        scales = self._constant(scale, self._scale_format(scale), self._parameter_shape(codes, scale, axis))
        return coreai.blockwise_shift_scale(self._constant(codes, str(fmt)), scales, *offsets, loc=location)

    def _activation(
        self,
        kind: str,
        values: Mapping[str, Any],
        x: Any,
        scale: Any,
        offsets: tuple[Any, Any],
        axis: Any,
        location: Any,
    ) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        axis_constant = coreai.constant(np.array(axis, np.int32))
        operands = values[_name(x)], self._constant(scale, "float32"), *offsets, axis_constant
        return getattr(coreai, kind)(*operands, loc=location)

    def look_up(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        codes, tables, axis, fmt = node.args
        shape = table_shape(self._shape(codes), self._shape(tables), int(str(axis)))
        vector_axis = coreai.constant(np.array(0, np.int16))
        indices, entries = self._constant(codes, str(fmt)), self._constant(tables, "float32", shape)
        return coreai.lut_to_dense(indices, entries, vector_axis, loc=location)

    def _parameter_shape(self, codes: Any, scale: Any, axis: Any) -> tuple[int, ...]:
        """Return the shape of scales and offsets: that of the scale for activations, one axis per axis for weights."""
        if _name(codes) not in self.constants:
            return self._shape(scale)
        return blockwise_shape(self._shape(codes), self._shape(scale), int(axis))

    def _scale_format(self, scale: Any) -> str:
        return scale_format(self.constants[_name(scale)][1], "float32")

    def _shape(self, node: Any) -> tuple[int, ...]:
        return tuple(self.constants[_name(node)][1].shape)

    def _constant(self, node: Any, fmt: str, shape: tuple[int, ...] | None = None) -> Any:
        path, value = self.constants[_name(node)]
        name = constant_name(path)
        if name not in self.emitted:
            self.emitted[name] = _emit_constant(name, value if shape is None else value.reshape(shape), fmt)
        return self.emitted[name]

    def _offset(self, zero_point: Any, fmt: str, shape: tuple[int, ...]) -> Any:
        """Return the zero point as a constant. Zeros have no name."""
        if zero_point is None or not bool(self.constants[_name(zero_point)][1].to(torch.float32).any()):
            return _zeros(fmt, shape)
        return self._constant(zero_point, fmt, shape)


def scale_format(scale: Tensor, float_format: str) -> str:
    """Return the dtype of a weight's scale in a file: e8m0, or that of all float tensors."""
    return dtype_name(scale.dtype) if scale.dtype == E8M0 else float_format


def blockwise_shape(codes: tuple[int, ...], scale: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of a weight's scale in a file, which has one axis for each axis of the codes."""
    if len(scale) == len(codes):
        return scale
    return tuple(scale[0] if scale and index == axis else 1 for index in range(len(codes)))


def table_shape(codes: tuple[int, ...], tables: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of tables in a file: their number along each axis of the indices, entries, vector length."""
    groups, entries = tables
    return (*(groups if index == axis else 1 for index in range(len(codes))), entries, 1)


def _name(node: Any) -> str:
    assert isinstance(node, fx.Node)  # noqa: S101  # tensor arguments of our operators are nodes
    return node.name


def _emit_constant(name: str, value: Tensor, fmt: str) -> Any:
    from coreai._compiler.dialects import coreai  # noqa: PLC0415
    from coreai._compiler.ir import DenseResourceElementsAttr, RankedTensorType, Type  # noqa: PLC0415

    data = np.frombuffer(to_bytes(value, fmt), np.uint8)
    tensor_type = RankedTensorType.get(list(value.shape), Type.parse(element_type(fmt)))
    return coreai.ConstantOp(value=DenseResourceElementsAttr.get_from_buffer(data, name, tensor_type)).result


def _zeros(fmt: str, shape: tuple[int, ...]) -> Any:
    return _filled("0.0" if fmt.startswith("float") else "0", fmt, shape)


def _lowest_codes(fmt: str, shape: tuple[int, ...]) -> Any:
    return _filled(str(int(get_format(to_dtype(fmt)).low)), fmt, shape)


def _filled(number: str, fmt: str, shape: tuple[int, ...]) -> Any:
    """Emit a constant with one value everywhere."""
    from coreai._compiler.dialects import coreai  # noqa: PLC0415
    from coreai._compiler.ir import Attribute  # noqa: PLC0415

    tensor_type = f"tensor<{''.join(f'{size}x' for size in shape)}{element_type(fmt)}>"
    return coreai.ConstantOp(value=Attribute.parse(f"dense<{number}> : {tensor_type}")).result
