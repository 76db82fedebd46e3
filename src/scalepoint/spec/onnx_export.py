"""Q/DQ nodes of a quantizer in a plain `torch.onnx.export(model.eval(), ...)`.

torch.onnx.export has no table of operators that a package could extend. A quantizer therefore checks
`in_onnx_export()` in its forward and returns QuantizeLinear and DequantizeLinear nodes, for torch's dynamo exporter
and for its older TorchScript exporter.
"""

from typing import Any

import torch
from torch import Tensor

from scalepoint.compat.dynamo import assume_constant_result
from scalepoint.errors import SpecError
from scalepoint.numerics import Grid, QParams, QuantizationFormulation, QuantizationScheme
from scalepoint.spec.granularity import PerChannelGranularity, PerTensorGranularity, QuantizationGranularity

_STORED_AS_IS = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@assume_constant_result
def in_onnx_export() -> bool:
    """Whether torch.onnx.export is tracing. torch.compile treats torch's own function as False even inside it."""
    return torch.onnx.is_in_onnx_export()


def quantize_linear(
    tensor: Tensor, qparams: QParams, grid: Grid, granularity: QuantizationGranularity, where: str
) -> Tensor:
    """Apply Q and DQ nodes with constant parameters; SpecError for what these nodes cannot express."""
    check_expressible(grid, granularity, where)
    axis = 0
    if isinstance(granularity, PerChannelGranularity) and granularity.axis is not None:
        axis = granularity.axis % tensor.ndim
    is_single = isinstance(granularity, PerTensorGranularity)
    scale = qparams.scale.detach().reshape(() if is_single else (-1,))
    zero_point = torch.zeros_like(scale) if qparams.zero_point is None else qparams.zero_point.reshape(scale.shape)
    minval = qparams.minval if grid.formulation == QuantizationFormulation.MINVAL else None
    if minval is not None:  # x' = (codes - lowest code) * scale + minval
        minval = minval.detach().reshape(()) if is_single else minval.detach()
        zero_point = torch.full_like(scale, grid.low)
        return _quantize_dequantize((tensor - minval).clamp(min=0), scale, zero_point, axis, grid, where) + minval
    if grid.scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING and not grid.format.is_float:
        tensor = _clip(tensor, scale if is_single else qparams.scale, grid)
    return _quantize_dequantize(tensor, scale, zero_point, axis, grid, where)


def _quantize_dequantize(
    tensor: Tensor, scale: Tensor, zero_point: Tensor, axis: int, grid: Grid, where: str
) -> Tensor:
    dtype = grid.format.storage
    if torch.compiler.is_exporting() or not in_onnx_export():
        return _quantize_in_dynamo(tensor, scale, zero_point.to(dtype), axis, dtype)
    if grid.format.is_float:
        raise SpecError(f"{where}: torch's TorchScript exporter does not support {grid.format.name}: use dynamo=True")
    result: Tensor = _QuantizeInTorchScript.apply(tensor, scale, zero_point.to(dtype), axis)  # type: ignore[no-untyped-call]
    return result


def check_expressible(grid: Grid, granularity: QuantizationGranularity, where: str) -> None:
    """Raise SpecError for formats and granularities that QuantizeLinear does not have for activations."""
    dtype = grid.format.storage
    if grid.format.bits != 8 or dtype not in _STORED_AS_IS:
        raise SpecError(
            f"{where}: torch.onnx.export cannot write {grid.format.name}: use 8 bits, or scalepoint.export, which "
            "writes every format"
        )
    if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity):
        raise SpecError(f"{where}: torch.onnx.export writes one scale per tensor or per channel, not {granularity!r}")


def _clip(tensor: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Clip to the codes in use. The scheme does not use the lowest code of the dtype, but QuantizeLinear does."""
    middle = grid.middle
    return torch.maximum(torch.minimum(tensor, scale * (grid.high - middle)), scale * (grid.low - middle))


def _quantize_in_dynamo(tensor: Tensor, scale: Tensor, zero_point: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    def add_node(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        attributes: dict[str, Any] = {"axis": axis} if scale.ndim else {}
        result: Tensor = torch.onnx.ops.symbolic(
            name, (value, scale, zero_point), attributes, dtype=dtype, shape=tensor.shape, version=None
        )
        return result

    return add_node("DequantizeLinear", add_node("QuantizeLinear", tensor, dtype), tensor.dtype)


class _QuantizeInTorchScript(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    @staticmethod
    def symbolic(g: Any, tensor: Any, scale: Any, zero_point: Any, axis: int) -> Any:
        codes = g.op("QuantizeLinear", tensor, scale, zero_point, axis_i=axis)
        return g.op("DequantizeLinear", codes, scale, zero_point, axis_i=axis)
