"""A stored weight in the exported graph: one operator of our own that becomes DequantizeLinear over real integers."""

from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import ExportError

# name of a format -> (ONNX type, opset that brought it)
TYPES = {
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
BLOCKS_SINCE = 21


def check_has_type(fmt: str, where: str) -> None:
    """Refuse a format that ONNX has no type for."""
    if fmt not in TYPES:
        known = ", ".join(name for name in TYPES if name != "int32")
        raise ExportError(f"{where}: ONNX has no type for {fmt}, which can only be simulated. It has: {known}")


@torch.library.custom_op("scalepoint::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    """(codes - zero_point) * scale; axis says which one has a scale each, block > 0 how many share one along it."""
    zero = torch.zeros_like(scale) if zero_point is None else zero_point.to(torch.float32)
    shape = [1] * codes.ndim
    if block:
        scale, zero = (value.repeat_interleave(block, axis) for value in (scale, zero))
    elif scale.ndim:
        shape[axis] = -1
        scale, zero = scale.view(shape), zero.view(shape)
    return (codes.to(torch.float32) - zero) * scale


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int, fmt: str) -> Tensor:
    return torch.empty(codes.shape, dtype=scale.dtype, device=codes.device)


def translations(opset: int) -> dict[Any, Any]:
    """What torch.onnx.export makes of the operator."""
    import onnx  # noqa: PLC0415  # only an export needs it
    from onnxscript.values import Opset  # noqa: PLC0415

    op: Any = Opset("", opset)

    def to_onnx(codes: Any, scale: Any, zero_point: Any, axis: int, block: int, fmt: str) -> Any:
        kind = getattr(onnx.TensorProto, TYPES[fmt][0])
        settings = {"axis": axis} | ({"block_size": block} if block else {})
        if zero_point is None:
            return op.DequantizeLinear(codes if fmt == "int32" else op.Cast(codes, to=kind), scale, **settings)
        return op.DequantizeLinear(op.Cast(codes, to=kind), scale, op.Cast(zero_point, to=kind), **settings)

    return {torch.ops.scalepoint.dequantize.default: to_onnx}
