"""What a quantizer becomes in a plain torch.onnx.export: QuantizeLinear and DequantizeLinear, by either exporter."""

from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import Grid, QParams, QuantizationFormulation, QuantizationScheme
from scalepoint.spec.export_form import FORMS, in_onnx_export
from scalepoint.spec.granularity import PerChannelGranularity, PerTensorGranularity, QuantizationGranularity

_STORED_AS_IS = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def quantize_linear(
    tensor: Tensor, qparams: QParams, grid: Grid, granularity: QuantizationGranularity, where: str
) -> Tensor:
    """Q and DQ with constant parameters; what plain ONNX nodes cannot say is an error, never another model."""
    check_plain(grid, granularity, where)
    axis = 0
    if isinstance(granularity, PerChannelGranularity) and granularity.axis is not None:
        axis = granularity.axis % tensor.ndim
    is_single = isinstance(granularity, PerTensorGranularity)
    scale = qparams.scale.detach().reshape(() if is_single else (-1,))
    zero = torch.zeros_like(scale) if qparams.zero_point is None else qparams.zero_point.reshape(scale.shape)
    least = qparams.minval if grid.formulation == QuantizationFormulation.MINVAL else None
    if least is not None:  # x' = (codes - lowest code) * scale + minval
        least = least.detach().reshape(()) if is_single else least.detach()
        zero = torch.full_like(scale, grid.low)
        return _quantized((tensor - least).clamp(min=0), scale, zero, axis, grid, where) + least
    if grid.scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING and not grid.format.is_float:
        tensor = _clipped(tensor, scale if is_single else qparams.scale, grid)
    return _quantized(tensor, scale, zero, axis, grid, where)


def _quantized(tensor: Tensor, scale: Tensor, zero: Tensor, axis: int, grid: Grid, where: str) -> Tensor:
    dtype = grid.format.storage
    if torch.compiler.is_exporting() or not in_onnx_export():
        return _by_dynamo(tensor, scale, zero.to(dtype), axis, dtype)
    if grid.format.is_float:
        raise SpecError(f"{where}: torch's older exporter has no {grid.format.name}: use dynamo=True")
    result: Tensor = _ByTorchScript.apply(tensor, scale, zero.to(dtype), axis)  # type: ignore[no-untyped-call]
    return result


def check_plain(grid: Grid, granularity: QuantizationGranularity, where: str) -> None:
    """Refuse what QuantizeLinear cannot say of an activation."""
    dtype = grid.format.storage
    if grid.format.bits != 8 or dtype not in _STORED_AS_IS:
        raise SpecError(
            f"{where}: torch.onnx.export cannot write {grid.format.name}: use 8 bits, or scalepoint.export, which "
            "writes every format"
        )
    if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity):
        raise SpecError(f"{where}: torch.onnx.export writes one scale a tensor or a channel, not {granularity!r}")


def _clipped(tensor: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The lowest code of the dtype is not in use, which QuantizeLinear does not know."""
    middle = grid.middle
    return torch.maximum(torch.minimum(tensor, scale * (grid.high - middle)), scale * (grid.low - middle))


def _by_dynamo(tensor: Tensor, scale: Tensor, zero: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    def node(name: str, value: Tensor, gives: torch.dtype) -> Tensor:
        attributes: dict[str, Any] = {"axis": axis} if scale.ndim else {}
        made: Tensor = torch.onnx.ops.symbolic(
            name, (value, scale, zero), attributes, dtype=gives, shape=tensor.shape, version=None
        )
        return made

    return node("DequantizeLinear", node("QuantizeLinear", tensor, dtype), tensor.dtype)


class _ByTorchScript(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Tensor, zero: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    @staticmethod
    def symbolic(g: Any, tensor: Any, scale: Any, zero: Any, axis: int) -> Any:
        codes = g.op("QuantizeLinear", tensor, scale, zero, axis_i=axis)
        return g.op("DequantizeLinear", codes, scale, zero, axis_i=axis)


FORMS["onnx"] = quantize_linear
