"""Translate our operators to operations of Core AI.

    our operator  operation                 used for
    quantize      quantize                  activations
    dequantize    dequantize                activations
                  blockwise_shift_scale     weights: the scale has as many axes as the codes and divides their shape
    look_up       lut_to_dense              palettes: a table of (groups, .., 2^n, 1)

Codes, scales, zero points and tables are constants named after their buffers, for example "layer.fc.codes", so that
compare.py finds them in a file. Offsets that are zero stay without a name: the compiler removes them only then.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.formats.apple.coreai.elements import element_type, to_bytes
from scalepoint.support.coreai_text import OWN_PREFIX


def constant_name(buffer_path: str) -> str:
    """Return the name of the constant that stores a buffer of the stored graph."""
    return OWN_PREFIX + re.sub(r"[^A-Za-z0-9_.]", "_", buffer_path)


def register_operators(converter: Any, program: ExportedProgram) -> None:
    """Register the translation of our operators with a TorchConverter, for the constants of one program."""
    lowerings = _Lowerings(program)
    for name in ("quantize", "dequantize", "look_up"):
        for overload in ("", ".default"):
            converter.register_torch_lowering(f"scalepoint::{name}{overload}")(getattr(lowerings, name))


class _Lowerings:
    """Lowerings of our three operators, as TorchConverter calls them: (values by node name, node, location)."""

    def __init__(self, program: ExportedProgram) -> None:
        self.constants: dict[str, tuple[str, Tensor]] = {}  # by node name: path of the buffer, and its value
        for spec in program.graph_signature.input_specs:
            if spec.target is not None:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                if isinstance(value, Tensor):
                    self.constants[spec.arg.name] = (spec.target, value)
        self.emitted: dict[str, Any] = {}  # constants that the graph already has, by name

    def quantize(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        x, scale, zero_point, axis, _, _, fmt = node.args
        return coreai.quantize(
            values[_name(x)],
            self._constant(scale, "float32"),
            self._offset(zero_point, str(fmt), self._shape(scale)),
            _zeros("float32", self._shape(scale)),
            coreai.constant(np.array(axis, np.int32)),
            loc=location,
        )

    def dequantize(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        codes, scale, zero_point, axis, _, fmt = node.args
        fmt = str(fmt)
        if _name(codes) not in self.constants:
            return coreai.dequantize(
                values[_name(codes)],
                self._constant(scale, "float32"),
                self._offset(zero_point, fmt, self._shape(scale)),
                _zeros("float32", self._shape(scale)),
                coreai.constant(np.array(axis, np.int32)),
                loc=location,
            )
        shape = blockwise_shape(self._shape(codes), self._shape(scale), int(str(axis)))
        return coreai.blockwise_shift_scale(
            self._constant(codes, fmt),
            self._constant(scale, "float32", shape),
            self._offset(zero_point, fmt, shape),
            _zeros("float32", shape),
            loc=location,
        )

    def look_up(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        codes, tables, axis, fmt = node.args
        shape = table_shape(self._shape(codes), self._shape(tables), int(str(axis)))
        vector_axis = coreai.constant(np.array(0, np.int16))
        indices, entries = self._constant(codes, str(fmt)), self._constant(tables, "float32", shape)
        return coreai.lut_to_dense(indices, entries, vector_axis, loc=location)

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
        if zero_point is None or not bool(self.constants[_name(zero_point)][1].any()):
            return _zeros(fmt, shape)
        return self._constant(zero_point, fmt, shape)


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
    from coreai._compiler.dialects import coreai  # noqa: PLC0415
    from coreai._compiler.ir import Attribute  # noqa: PLC0415

    zero = "0.0" if fmt == "float32" else "0"
    tensor_type = f"tensor<{''.join(f'{size}x' for size in shape)}{element_type(fmt)}>"
    return coreai.ConstantOp(value=Attribute.parse(f"dense<{zero}> : {tensor_type}")).result
