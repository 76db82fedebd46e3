"""Translate our operators to operations of Core AI.

    our operator    operation                       used for
    quantize        quantize                        activations
    dequantize      dequantize                      activations
                    blockwise_shift_scale           weights: the scale has as many axes as the codes, and divides them
                    sparse_with_bitmask_to_dense    pruned weights: the codes that are not zero, and a bit per weight
    look_up         lut_to_dense                    palettes: a table of (groups, .., 2^n, length of a vector)
    look_up_kept    lut_to_sparse_with_bitmask      pruned palettes: the indices of kept weights, and a bit per weight
    symmetric_rows  symmetric_quantization_statistics, quantize, dequantize    activations with a scale for each row

quantize, dequantize and blockwise_shift_scale compute (code - offset1) * scale + offset2. With a zero point offset1 is
the zero point and offset2 is zero; with a minimum (quantize_minval, dequantize_minval) they are the lowest code of the
dtype and the minimum.

Codes, scales, zero points and tables are constants named after their buffers, for example "layer.fc.codes", so that
compare.py finds them in a file. Offsets that are zero stay without a name: the compiler removes them only then.
"""

import math
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

MIN_SCALE = float(torch.finfo(torch.float32).eps)


def constant_name(buffer_path: str) -> str:
    """Return the name of the constant that stores a buffer of the stored graph."""
    return OWN_PREFIX + re.sub(r"[^A-Za-z0-9_.]", "_", buffer_path)


def register_operators(converter: Any, program: ExportedProgram, sparse_codes: frozenset[str]) -> None:
    """Register the translation of our operators with a TorchConverter, for the constants of one program.

    Args:
        converter: The TorchConverter.
        program: The decomposed program.
        sparse_codes: Paths of the codes that are stored without their zeros.
    """
    lowerings = _Lowerings(program, sparse_codes)
    for name in (
        "quantize",
        "dequantize",
        "quantize_minval",
        "dequantize_minval",
        "look_up",
        "look_up_kept",
        "symmetric_rows",
    ):
        for overload in ("", ".default"):
            converter.register_torch_lowering(f"scalepoint::{name}{overload}")(getattr(lowerings, name))


class _Lowerings:
    """Lowerings of our operators, as TorchConverter calls them: (values by node name, node, location)."""

    def __init__(self, program: ExportedProgram, sparse_codes: frozenset[str]) -> None:
        self.sparse_codes = sparse_codes
        self.constants: dict[str, tuple[str, Tensor]] = {}  # by node name: path of the buffer, and its value
        for spec in program.graph_signature.input_specs:
            if spec.target is not None:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                if isinstance(value, Tensor):
                    self.constants[spec.arg.name] = (spec.target, value)
        self.emitted: dict[str, Any] = {}  # constants that the graph already has, by name

    def quantize(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        _, scale, zero_point, _, _, _, fmt = node.args
        shape = self._shape(scale)
        offsets = self._offset(zero_point, str(fmt), shape), _zeros("float32", shape)
        return self._quantize(values, node, offsets, location)

    def quantize_minval(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        _, scale, minval, _, _, _, fmt = node.args
        offsets = _lowest_codes(str(fmt), self._shape(scale)), self._constant(minval, "float32", self._shape(scale))
        return self._quantize(values, node, offsets, location)

    def _quantize(self, values: Mapping[str, Any], node: fx.Node, offsets: tuple[Any, Any], location: Any) -> Any:
        x, scale, _, axis, *_ = node.args
        del node.meta["val"]  # coreai-torch would compare its dtype with that of the result, which may be int4
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
        return coreai.blockwise_shift_scale(self._codes(codes, str(fmt)), scales, *offsets, loc=location)

    def _codes(self, codes: Any, fmt: str) -> Any:
        """Emit the codes of a weight; with a mask if they are stored without zeros."""
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        path, value = self.constants[_name(codes)]
        if path not in self.sparse_codes:
            return self._constant(codes, fmt)
        nonzero, mask = split_sparse(value)
        names = constant_name(path), constant_name(mask_path(path))
        operands = _emit_constant(names[0], nonzero, fmt), _emit_constant(names[1], mask, "uint1")
        return coreai.sparse_with_bitmask_to_dense(coreai.build_sparse_with_bitmask(*operands))

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
        vector_axis = coreai.constant(np.array(axis, np.int16))
        indices, entries = self._constant(codes, str(fmt)), self._constant(tables, "float32", shape)
        return coreai.lut_to_dense(indices, entries, vector_axis, loc=location)

    def look_up_kept(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        codes, mask, tables, axis, fmt = node.args
        shape = table_shape(self._shape(codes), self._shape(tables), int(str(axis)))
        (codes_path, indices), (mask_name, mask_bits) = self.constants[_name(codes)], self.constants[_name(mask)]
        operands = (
            _emit_constant(constant_name(codes_path), indices[mask_bits != 0], str(fmt)),
            _emit_constant(constant_name(mask_name), mask_bits, "uint1"),
        )
        entries = self._constant(tables, "float32", shape)
        sparse_axis = coreai.constant(np.array(axis, np.int16))
        sparse = coreai.lut_to_sparse_with_bitmask(
            coreai.build_sparse_with_bitmask(*operands), entries, sparse_axis, loc=location
        )
        return coreai.sparse_with_bitmask_to_dense(sparse)

    def symmetric_rows(self, values: Mapping[str, Any], node: fx.Node, location: Any) -> Any:
        """Emit the quantization of each row. The statistics have one axis, so all others become one."""
        from coreai._compiler.dialects import coreai  # noqa: PLC0415

        x = values[_name(node.args[0])]
        shape = [int(size) for size in node.meta["val"].shape]
        rows = math.prod(shape[:-1])
        matrix = coreai.reshape(x, [rows, shape[-1]])
        axis, low_and_high = coreai.constant(np.array(0, np.int32)), coreai.constant(np.array([-128, 127], np.float32))
        statistics = coreai.symmetric_quant_stats(matrix, low_and_high, axis, loc=location)
        # A row of zeros has the scale 0, and 0 / 0 is not a number.
        scale = coreai.broadcasting_maximum(statistics, _filled(f"{MIN_SCALE:.8e}", "float32", ()))
        parameters = scale, _zeros("int8", (rows,)), _zeros("float32", (rows,)), axis
        codes = coreai.quantize(matrix, *parameters, loc=location)
        return coreai.reshape(coreai.dequantize(codes, *parameters, loc=location), shape)

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


def mask_path(codes_path: str) -> str:
    """Return the path under which the mask of sparse codes is stored."""
    return f"{codes_path.removesuffix('codes')}mask"


def split_sparse(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes that are not zero as a vector, and a mask with 1 at their places."""
    mask = codes != 0
    return codes[mask], mask.to(torch.uint8)


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
    groups, entries, *length = tables
    return (*(groups if index == axis else 1 for index in range(len(codes))), entries, *(length or [1]))


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
