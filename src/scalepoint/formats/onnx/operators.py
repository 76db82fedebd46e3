"""Translates scalepoint::quantize and scalepoint::dequantize to QuantizeLinear and DequantizeLinear."""

from typing import Any

import torch

from scalepoint.errors import ExportError

# numerics format -> (ONNX type, first opset with it)
ONNX_TYPES = {
    "int8": ("INT8", 18),
    "uint8": ("UINT8", 18),
    "int32": ("INT32", 18),
    "float8_e4m3fn": ("FLOAT8E4M3FN", 19),
    "float8_e5m2": ("FLOAT8E5M2", 19),
    "int4": ("INT4", 21),
    "uint4": ("UINT4", 21),
    "float4_e2m1fn_x2": ("FLOAT4E2M1", 23),
    "int2": ("INT2", 25),
    "uint2": ("UINT2", 25),
}
FIRST_OPSET_WITH_BLOCKS = 21
SIGNED_LIMITS = {"int8": (-128, 127)}  # of QuantizeLinear; symmetric activations may use fewer codes


def check_has_type(fmt: str, where: str) -> None:
    """Raise ExportError for a format without an ONNX type."""
    if fmt not in ONNX_TYPES:
        supported = ", ".join(name for name in ONNX_TYPES if name != "int32")
        raise ExportError(f"{where}: ONNX has no type for {fmt}, so it can only be simulated: use {supported}")


def operator_translations(opset: int) -> dict[Any, Any]:
    """Return the functions by which torch.onnx.export translates the operators of a stored graph."""
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnxscript.values import Opset  # noqa: PLC0415

    op: Any = Opset("", opset)

    def get_onnx_type(fmt: str) -> int:
        return int(getattr(onnx.TensorProto, ONNX_TYPES[fmt][0]))

    def cast_to(value: Any, onnx_type: int) -> Any:
        return value if value.dtype == onnx_type else op.Cast(value, to=onnx_type)

    def get_attributes(scale: Any, axis: int, block: int = 0) -> dict[str, int]:
        is_scalar = scale.shape is not None and len(scale.shape) == 0
        attributes = {} if is_scalar else {"axis": axis}
        return attributes | ({"block_size": block} if block else {})

    def translate_dequantize(codes: Any, scale: Any, zero_point: Any, axis: int, block: int, fmt: str) -> Any:
        onnx_type, attributes = get_onnx_type(fmt), get_attributes(scale, axis, block)
        codes = cast_to(codes, onnx_type)
        if zero_point is None:
            return op.DequantizeLinear(codes, scale, **attributes)
        return op.DequantizeLinear(codes, scale, cast_to(zero_point, onnx_type), **attributes)

    def translate_quantize(x: Any, scale: Any, zero_point: Any, axis: int, low: float, high: float, fmt: str) -> Any:
        limits = SIGNED_LIMITS.get(fmt)
        if limits is not None and (low, high) != limits:
            # QuantizeLinear clips only to the whole range of the type, so x is clipped before. The zero point is 0.
            x = op.Max(op.Min(x, op.Mul(scale, _make_constant(op, high))), op.Mul(scale, _make_constant(op, low)))
        return op.QuantizeLinear(x, scale, zero_point, **get_attributes(scale, axis))

    operators = torch.ops.scalepoint
    return {operators.quantize.default: translate_quantize, operators.dequantize.default: translate_dequantize}


def _make_constant(op: Any, value: float) -> Any:
    return op.Constant(value_float=float(value))
