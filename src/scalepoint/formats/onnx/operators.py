"""Translations of torch operators to ONNX that torch.onnx does not have.

scalepoint::quantize, scalepoint::dequantize    QuantizeLinear and DequantizeLinear
grouped products of a mixture of experts        rows are sorted by expert; one MatMul per expert:
    y[start_e : end_e] = x[start_e : end_e] W_e,    start_e = offsets[e - 1], end_e = offsets[e]
"""

from typing import Any, NamedTuple

import torch

from scalepoint.errors import ExportError


class OnnxType(NamedTuple):
    """The name of a type in onnx.TensorProto, and the first opset in which QuantizeLinear has it."""

    name: str
    first_opset: int


# by the name of the format in `numerics`
ONNX_TYPES = {
    "int8": OnnxType("INT8", 18),
    "uint8": OnnxType("UINT8", 18),
    "int32": OnnxType("INT32", 18),
    "float8_e4m3fn": OnnxType("FLOAT8E4M3FN", 19),
    "float8_e5m2": OnnxType("FLOAT8E5M2", 19),
    "int4": OnnxType("INT4", 21),
    "uint4": OnnxType("UINT4", 21),
    "float4_e2m1fn_x2": OnnxType("FLOAT4E2M1", 23),
    "int2": OnnxType("INT2", 25),
    "uint2": OnnxType("UINT2", 25),
}
FIRST_OPSET_WITH_BLOCKS = 21  # DequantizeLinear has the attribute block_size
SIGNED_LIMITS = {"int8": (-128, 127)}  # of QuantizeLinear; symmetric activations may use fewer codes


def check_has_type(fmt: str, where: str) -> None:
    """Raise ExportError for a format without an ONNX type."""
    if fmt not in ONNX_TYPES:
        supported = ", ".join(name for name in ONNX_TYPES if name != "int32")
        raise ExportError(f"{where}: ONNX has no type for {fmt}, so it can only be simulated: use {supported}")


def operator_translations(opset: int) -> dict[Any, Any]:
    """Return the functions by which torch.onnx.export translates these operators."""
    from onnxscript.values import Opset  # noqa: PLC0415  # only an export needs it

    op: Any = Opset("", opset)
    grouped_products = [torch.ops.aten._grouped_mm.default]
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # exists once transformers is imported
        grouped_products.append(torch.ops.transformers.grouped_mm_fallback.default)
    return {**_quantizer_translations(op), **dict.fromkeys(grouped_products, _grouped_product_translation(op))}


def _quantizer_translations(op: Any) -> dict[Any, Any]:
    import onnx  # noqa: PLC0415

    def get_onnx_type(fmt: str) -> int:
        return int(getattr(onnx.TensorProto, ONNX_TYPES[fmt].name))

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


def _grouped_product_translation(op: Any) -> Any:
    import onnx  # noqa: PLC0415

    def translate_product(x: Any, weight: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        has_supported_shapes = offsets is not None and len(x.shape) == 2 and len(weight.shape) == 3
        if not has_supported_shapes or bias is not None or out_dtype is not None:
            raise ExportError(_describe_unsupported(x, weight, bias, out_dtype))
        ends = op.Cast(offsets, to=onnx.TensorProto.INT64)
        end = op.Constant(value_ints=[0])
        products = []
        for expert in range(int(weight.shape[0])):
            start = end
            end = op.Gather(ends, op.Constant(value_ints=[expert]))
            rows = op.Slice(x, start, end, op.Constant(value_ints=[0]))
            products.append(op.MatMul(rows, op.Gather(weight, op.Constant(value_int=expert))))
        return op.Concat(*products, axis=0)

    return translate_product


def _describe_unsupported(x: Any, weight: Any, bias: Any, out_dtype: Any) -> str:
    extras = [name for name, value in (("a bias", bias), ("an out_dtype", out_dtype)) if value is not None]
    shapes = " x ".join(f"({', '.join(map(str, tensor.shape))})" for tensor in (x, weight))
    return (
        f"a grouped product of {shapes}{' with ' if extras else ''}{' and '.join(extras)} cannot be written to ONNX, "
        "only (rows, in) x (experts, in, out) with offsets: sort the rows by expert, and add a bias after the product"
    )
