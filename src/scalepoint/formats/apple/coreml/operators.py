"""Translate our operators to MIL, the intermediate language of Core ML programs.

    our operator  MIL operation                                     used for
    quantize      quantize                                          activations
    dequantize    dequantize                                        activations
                  constexpr_affine_dequantize                       int8 weights, per tensor or per channel
                  constexpr_blockwise_shift_scale (iOS 18)          4-bit weights, and weights in blocks
                  constexpr_sparse_blockwise_shift_scale (iOS 18)   pruned weights, stored without their zeros
    look_up       constexpr_lut_to_dense (iOS 18)                   palettized weights

Each operation is named after its module, so that compare.py can match a file with its model.
"""

from typing import Any

import numpy as np

from scalepoint.formats.apple.stored import operation_label

WEIGHT_PREFIX = "held_"  # the graph layer puts it before the names of buffers and parameters of a program


def register_operators(for_ios18: bool, sparse: frozenset[str] = frozenset()) -> None:
    """Register the translation of our operators with coremltools.

    Args:
        for_ios18: Whether operations of iOS 18 may be used.
        sparse: Labels of the weights that are stored without their zeros.
    """
    from coremltools.converters.mil.frontend.torch import torch_op_registry  # noqa: PLC0415

    registry = torch_op_registry._TORCH_OPS_REGISTRY
    translations = _Translations(for_ios18, sparse)
    for name in ("quantize", "dequantize", "look_up"):
        registry.set_func_by_name(getattr(translations, name), f"scalepoint::{name}")
    for name, translation in ACTIVATIONS.items():
        registry.set_func_by_name(translation, name)


def _celu(context: Any, node: Any) -> None:
    """alpha elu(x / alpha)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, alpha = _read_operand_and_setting(context, node, 1.0)
    elu = Builder.elu(x=Builder.mul(x=x, y=np.float32(1 / alpha)), alpha=1.0)
    context.add(Builder.mul(x=elu, y=np.float32(alpha), name=node.name))


def _hardshrink(context: Any, node: Any) -> None:
    """x where |x| > lambda, else 0"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, limit = _read_operand_and_setting(context, node, 0.5)
    is_outside = Builder.greater(x=Builder.abs(x=x), y=np.float32(limit))
    context.add(Builder.mul(x=x, y=Builder.cast(x=is_outside, dtype="fp32"), name=node.name))


def _softshrink(context: Any, node: Any) -> None:
    """x - clip(x, -lambda, lambda)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, limit = _read_operand_and_setting(context, node, 0.5)
    clipped = Builder.clip(x=x, alpha=np.float32(-limit), beta=np.float32(limit))
    context.add(Builder.sub(x=x, y=clipped, name=node.name))


def _log_sigmoid(context: Any, node: Any) -> None:
    """-softplus(-x)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, _ = _read_operand_and_setting(context, node, 0.0)
    softplus = Builder.softplus(x=Builder.mul(x=x, y=np.float32(-1)))
    context.add(Builder.mul(x=softplus, y=np.float32(-1), name=node.name))


def _hardtanh(context: Any, node: Any) -> None:
    """clip(x, low, high): coremltools keeps integer limits as integers, and its own clip rejects those."""
    from coremltools.converters.mil import Builder  # noqa: PLC0415
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

    x, *limits = _get_inputs(context, node)
    low, high = (float(limit.val) for limit in limits) if limits else (-1.0, 1.0)
    context.add(Builder.clip(x=x, alpha=np.float32(low), beta=np.float32(high), name=node.name))


ACTIVATIONS = {
    "celu": _celu,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "log_sigmoid": _log_sigmoid,
    "hardtanh": _hardtanh,
}
"""Activations of torch that coremltools 9 does not translate, or translates only for some settings."""


def _read_operand_and_setting(context: Any, node: Any, default: float) -> tuple[Any, float]:
    """Return the input tensor and the number that follows it among the arguments."""
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

    x, *settings = _get_inputs(context, node)
    return x, float(settings[0].val) if settings and settings[0] is not None else default


class _Translations:
    """Translation functions for our three operators, as coremltools calls them."""

    def __init__(self, for_ios18: bool, sparse: frozenset[str]) -> None:
        self.for_ios18 = for_ios18
        self.sparse = sparse

    def quantize(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415

        x, scale, zero_point, *_, dtype = self._read_operands(context, node)
        quantized = Builder.quantize(
            input=x,
            scale=np.float32(scale),
            zero_point=_to_zero_point(zero_point, dtype),
            output_dtype=dtype,
            name=_module_label(node.inputs[1], "_scale"),
        )
        context.add(quantized, node.name)

    def dequantize(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415

        codes, scale, zero_point, axis, block, dtype = self._read_operands(context, node)
        if isinstance(codes, np.ndarray):
            label = _module_label(node.inputs[0], "_codes")
            values = self._weight(codes, scale, zero_point, axis, block, dtype, label)
        else:
            values = Builder.dequantize(
                input=codes, scale=np.float32(scale), zero_point=_to_zero_point(zero_point, dtype)
            )
        context.add(values, node.name)

    def look_up(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415
        from coremltools.converters.mil.mil import types  # noqa: PLC0415

        codes, tables, axis, dtype = self._read_operands(context, node)
        shape = [1] * codes.ndim
        shape[axis] = tables.shape[0]
        index_type = types.nptype_from_builtin(types.string_to_builtin(dtype))
        values = Builder.constexpr_lut_to_dense(
            indices=codes.astype(index_type),
            lut=np.asarray(tables, np.float32).reshape(*shape, tables.shape[1], -1),
            vector_axis=None if tables.ndim == 2 else np.int32(axis),
            name=_module_label(node.inputs[0], "_codes"),
        )
        context.add(values, node.name)

    def _weight(self, codes: Any, scale: Any, zero_point: Any, axis: int, block: int, dtype: str, label: str) -> Any:
        from coremltools.converters.mil import Builder  # noqa: PLC0415
        from coremltools.converters.mil.mil import types  # noqa: PLC0415

        code_type = types.nptype_from_builtin(types.string_to_builtin(dtype))
        data = codes.astype(code_type)
        scale = np.asarray(scale, np.float32)
        if not self.for_ios18:
            zero_point = np.zeros(scale.shape, codes.dtype) if zero_point is None else np.asarray(zero_point)
            return Builder.constexpr_affine_dequantize(
                quantized_data=data, scale=scale, zero_point=zero_point, axis=np.int32(axis), name=label
            )
        if not block:  # these operations take a scale with as many axes as the codes
            shape = [1] * codes.ndim
            if scale.ndim:
                shape[axis] = -1
            scale = scale.reshape(shape)
        offset = None if zero_point is None else np.asarray(zero_point).reshape(scale.shape).astype(code_type)
        if label not in self.sparse:
            return Builder.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=offset, name=label)
        is_nonzero = codes != 0
        mask_bits = is_nonzero.astype(types.nptype_from_builtin(types.uint1))
        mask, nonzero_values = Builder.constexpr_sparse_blockwise_shift_scale(
            data_mask=mask_bits, nonzero_data=data[is_nonzero], scale=scale, name=label
        )
        return Builder.constexpr_sparse_to_dense(nonzero_data=nonzero_values, mask=mask, name=f"{label}_dense")

    def _read_operands(self, context: Any, node: Any) -> list[Any]:
        """Return the operands of a node: the value of each constant, the variable of every other operand."""
        from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

        operands = _get_inputs(context, node)
        return [operand if getattr(operand, "val", None) is None else operand.val for operand in operands]


def _module_label(buffer_name: str, suffix: str) -> str:
    """Return the label of the module that owns a buffer: held_fc_codes -> layer_fc."""
    return operation_label(buffer_name.removeprefix(WEIGHT_PREFIX).removesuffix(suffix))


def _to_zero_point(zero_point: Any, dtype: str) -> Any:
    """Return a zero point as a scalar of `dtype`; None for zero, which MIL omits."""
    return None if zero_point is None or not int(zero_point) else np.asarray(zero_point).astype(dtype)[()]
