"""The table from a stored graph to ONNX: QuantizeLinear and DequantizeLinear, over real integers."""

from typing import Any

import torch

from scalepoint.errors import ExportError

# name of a format -> (ONNX type, opset that brought it)
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
SIGNED_LIMITS = {"int8": (-128, 127)}  # of activations, where a scheme may leave codes unused


def check_has_type(fmt: str, where: str) -> None:
    """Refuse a format that ONNX has no type for."""
    if fmt not in ONNX_TYPES:
        known = ", ".join(name for name in ONNX_TYPES if name != "int32")
        raise ExportError(f"{where}: ONNX has no type for {fmt}, which can only be simulated. It has: {known}")


def operator_translations(opset: int) -> dict[Any, Any]:
    """What torch.onnx.export makes of the operators of a stored graph."""
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnxscript.values import Opset  # noqa: PLC0415

    op: Any = Opset("", opset)

    def kind_of(fmt: str) -> int:
        return int(getattr(onnx.TensorProto, ONNX_TYPES[fmt][0]))

    def settings(scale: Any, axis: int, block: int = 0) -> dict[str, int]:
        is_single = scale.shape is not None and len(scale.shape) == 0
        return ({} if is_single else {"axis": axis}) | ({"block_size": block} if block else {})

    def to_dequantize(codes: Any, scale: Any, zero_point: Any, axis: int, block: int, fmt: str) -> Any:
        kind, said = kind_of(fmt), settings(scale, axis, block)
        stored = codes if codes.dtype == kind else op.Cast(codes, to=kind)
        if zero_point is None:
            return op.DequantizeLinear(stored, scale, **said)
        zero = zero_point if zero_point.dtype == kind else op.Cast(zero_point, to=kind)
        return op.DequantizeLinear(stored, scale, zero, **said)

    def to_quantize(x: Any, scale: Any, zero_point: Any, axis: int, low: float, high: float, fmt: str) -> Any:
        limits = SIGNED_LIMITS.get(fmt)
        if limits is not None and (low, high) != limits:  # QuantizeLinear knows no narrower range; the zero point is 0
            x = op.Max(op.Min(x, op.Mul(scale, _make_constant(op, high))), op.Mul(scale, _make_constant(op, low)))
        return op.QuantizeLinear(x, scale, zero_point, **settings(scale, axis))

    ours = torch.ops.scalepoint
    return {ours.quantize.default: to_quantize, ours.dequantize.default: to_dequantize}


def _make_constant(op: Any, value: float) -> Any:
    return op.Constant(value_float=float(value))
