"""The table from a stored graph to MIL, the language of Core ML programs.

    quantize      quantize                                            of activations
    dequantize    dequantize                                          of activations
                  constexpr_affine_dequantize                         of weights in int8, a scale a tensor or a channel
                  constexpr_blockwise_shift_scale (iOS 18)            of weights in 4 bits, or in blocks
                  constexpr_sparse_blockwise_shift_scale (iOS 18)     of pruned weights, without their zeros
    look_up       constexpr_lut_to_dense (iOS 18)                     of palettized weights

Each stands under the name of the module that it was made from, so that a file can be compared with its model.
"""

from typing import Any

import numpy as np

from scalepoint.formats.apple.stored import operation_label

WEIGHT_PREFIX = "held_"  # of what a program holds, as the graph layer writes it down


def register_operators(is_new: bool, sparse: frozenset[str] = frozenset()) -> None:
    """Tell coremltools how our operators are written, for iOS 18 or before, and which weights leave their zeros away.

    It narrows float32 itself.
    """
    from coremltools.converters.mil.frontend.torch import torch_op_registry  # noqa: PLC0415

    registry = torch_op_registry._TORCH_OPS_REGISTRY
    made = _Translations(is_new, sparse)
    for name in ("quantize", "dequantize", "look_up"):
        registry.set_func_by_name(getattr(made, name), f"scalepoint::{name}")
    for name, translation in ACTIVATIONS.items():
        registry.set_func_by_name(translation, name)


def _celu(context: Any, node: Any) -> None:
    """alpha elu(x / alpha)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, alpha = _read_operand_and_setting(context, node, 1.0)
    curved = Builder.elu(x=Builder.mul(x=x, y=np.float32(1 / alpha)), alpha=1.0)
    context.add(Builder.mul(x=curved, y=np.float32(alpha), name=node.name))


def _hardshrink(context: Any, node: Any) -> None:
    """x where |x| > lambda, else 0"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, limit = _read_operand_and_setting(context, node, 0.5)
    kept = Builder.greater(x=Builder.abs(x=x), y=np.float32(limit))
    context.add(Builder.mul(x=x, y=Builder.cast(x=kept, dtype="fp32"), name=node.name))


def _softshrink(context: Any, node: Any) -> None:
    """x - clip(x, -lambda, lambda)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, limit = _read_operand_and_setting(context, node, 0.5)
    inner = Builder.clip(x=x, alpha=np.float32(-limit), beta=np.float32(limit))
    context.add(Builder.sub(x=x, y=inner, name=node.name))


def _log_sigmoid(context: Any, node: Any) -> None:
    """-softplus(-x)"""
    from coremltools.converters.mil import Builder  # noqa: PLC0415

    x, _ = _read_operand_and_setting(context, node, 0.0)
    soft = Builder.softplus(x=Builder.mul(x=x, y=np.float32(-1)))
    context.add(Builder.mul(x=soft, y=np.float32(-1), name=node.name))


def _hardtanh(context: Any, node: Any) -> None:
    """clip(x, low, high): coremltools passes whole numbers on as integers, which its clip refuses."""
    from coremltools.converters.mil import Builder  # noqa: PLC0415
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

    x, *limits = _get_inputs(context, node)
    low, high = (float(each.val) for each in limits) if limits else (-1.0, 1.0)
    context.add(Builder.clip(x=x, alpha=np.float32(low), beta=np.float32(high), name=node.name))


ACTIVATIONS = {
    "celu": _celu,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "log_sigmoid": _log_sigmoid,
    "hardtanh": _hardtanh,
}
"""Activations of torch that coremltools 9 does not translate, or not with every setting."""


def _read_operand_and_setting(context: Any, node: Any, default: float) -> tuple[Any, float]:
    """The tensor, and the number that follows it."""
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

    x, *settings = _get_inputs(context, node)
    return x, float(settings[0].val) if settings and settings[0] is not None else default


class _Translations:
    def __init__(self, is_new: bool, sparse: frozenset[str]) -> None:
        self.is_new, self.sparse = is_new, sparse

    def quantize(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415

        x, scale, zero, *_, fmt = self._read_operands(context, node)
        made = Builder.quantize(
            input=x,
            scale=np.float32(scale),
            zero_point=_to_zero_point(zero, fmt),
            output_dtype=fmt,
            name=_strip_prefix(node.inputs[1], "_scale"),
        )
        context.add(made, node.name)

    def dequantize(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415

        codes, scale, zero, axis, block, fmt = self._read_operands(context, node)
        if isinstance(codes, np.ndarray):
            made = self._weight(codes, scale, zero, (axis, block, fmt), _strip_prefix(node.inputs[0], "_codes"))
        else:
            made = Builder.dequantize(input=codes, scale=np.float32(scale), zero_point=_to_zero_point(zero, fmt))
        context.add(made, node.name)

    def look_up(self, context: Any, node: Any) -> None:
        from coremltools.converters.mil import Builder  # noqa: PLC0415
        from coremltools.converters.mil.mil import types  # noqa: PLC0415

        codes, tables, axis, fmt = self._read_operands(context, node)
        shape = [1] * codes.ndim
        shape[axis] = tables.shape[0]
        kind = types.nptype_from_builtin(types.string_to_builtin(fmt))
        made = Builder.constexpr_lut_to_dense(
            indices=codes.astype(kind),
            lut=np.asarray(tables, np.float32).reshape(*shape, -1, 1),
            name=_strip_prefix(node.inputs[0], "_codes"),
        )
        context.add(made, node.name)

    def _weight(self, codes: Any, scale: Any, zero: Any, form: tuple[int, int, str], name: str) -> Any:
        from coremltools.converters.mil import Builder  # noqa: PLC0415
        from coremltools.converters.mil.mil import types  # noqa: PLC0415

        axis, block, fmt = form
        kind = types.nptype_from_builtin(types.string_to_builtin(fmt))
        data, scale = codes.astype(kind), np.asarray(scale, np.float32)
        if not self.is_new:
            zero = np.zeros(scale.shape, codes.dtype) if zero is None else np.asarray(zero)
            return Builder.constexpr_affine_dequantize(
                quantized_data=data, scale=scale, zero_point=zero, axis=np.int32(axis), name=name
            )
        shape = [1] * codes.ndim
        if scale.ndim:
            shape[axis] = -1
        whole = scale if block else scale.reshape(shape)
        offset = None if zero is None else np.asarray(zero).reshape(whole.shape).astype(kind)
        if name not in self.sparse:
            return Builder.constexpr_blockwise_shift_scale(data=data, scale=whole, offset=offset, name=name)
        is_kept = codes != 0
        bits = is_kept.astype(types.nptype_from_builtin(types.uint1))
        mask, kept = Builder.constexpr_sparse_blockwise_shift_scale(
            data_mask=bits, nonzero_data=data[is_kept], scale=whole, name=name
        )
        return Builder.constexpr_sparse_to_dense(nonzero_data=kept, mask=mask, name=f"{name}_dense")

    def _read_operands(self, context: Any, node: Any) -> list[Any]:
        """The operands: values where they are known, variables where they are not."""
        from coremltools.converters.mil.frontend.torch.ops import _get_inputs  # noqa: PLC0415

        given = _get_inputs(context, node)
        return [each if getattr(each, "val", None) is None else each.val for each in given]


def _strip_prefix(held: str, ending: str) -> str:
    return operation_label(held.removeprefix(WEIGHT_PREFIX).removesuffix(ending))


def _to_zero_point(zero: Any, fmt: str) -> Any:
    return None if zero is None or not int(zero) else np.asarray(zero).astype(fmt)[()]
