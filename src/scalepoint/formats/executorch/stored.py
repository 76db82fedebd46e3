"""Modules of the graph that is written for XNNPACK: `quantized_decomposed` operators around every operation.

static activations     [quantize, dequantize]_per_tensor on the input
dynamic activations    [quantize, dequantize]_per_token with parameters from choose_qparams_per_token_asymmetric
per-channel weights    dequantize_per_channel(codes)
weights in groups      dequantize_per_channel_group(codes); XNNPACK stores these scales in bfloat16
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.layers import INT8_MAX, INT8_MIN, WeightedOperation, int8_module_factories
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity


def quantized_decomposed() -> Any:
    """Return torch.ops.quantized_decomposed, whose operators exist once ExecuTorch is imported."""
    return torch.ops.quantized_decomposed


class XnnpackStoredWeight(WeightedOperation):
    """An operation whose weight is stored as codes, per channel or in groups."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__(source)
        quant, deployed = source.weight_quant, source.get_deployed()
        granularity = quant.calculator.granularity
        self.low, self.high = int(quant.quantizer.grid.low), int(quant.quantizer.grid.high)
        if self.high == 7:  # XNNPACK recognizes 4-bit weights by the range -8 .. 7
            self.low = -8
        self.axis = int(granularity.axis or 0) if isinstance(granularity, PerChannelGranularity) else 0
        self.block = int(granularity.block_size) if isinstance(granularity, PerBlockGranularity) else 0  # type: ignore[arg-type]
        scale = quant.scale.detach().to(torch.float32)
        if self.block:
            scale = scale.to(torch.bfloat16).to(torch.float32)
        elif not isinstance(granularity, PerChannelGranularity):
            raise ExportError(f"{quant.name}: XNNPACK needs weights with one scale per channel or per group")
        bias, bias_scale = deployed.bias, deployed.bias_scale
        if bias is not None:
            bias = (bias.detach() if bias_scale is None else bias * bias_scale).to(torch.float32)
        self.is_transposed = source.is_input_first
        self.register_buffer("codes", deployed.codes.detach().to(torch.int8).contiguous())
        self.register_buffer("scale", scale.contiguous().clone())
        self.register_buffer("zero_point", torch.zeros_like(scale, dtype=torch.int64))
        self.register_buffer("bias", None if bias is None else bias.contiguous().clone())

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        parameters = (self.codes, self.scale, self.zero_point)
        if self.block:
            limits = (self.low, self.high, torch.int8, self.block, torch.float32)
            weight = quantized_decomposed().dequantize_per_channel_group(*parameters, *limits)
        else:
            weight = quantized_decomposed().dequantize_per_channel(
                *parameters, self.axis, self.low, self.high, torch.int8
            )
        return self.product(x, weight, self.bias)


class XnnpackStoredTable(nn.Module):
    """An embedding table: looks up rows of codes and their scales, and multiplies them."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__()
        self.register_buffer("codes", source.get_deployed().codes.detach().contiguous())
        self.register_buffer("scale", source.weight_quant.scale.detach().to(torch.float32).reshape(-1, 1).clone())

    codes: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.codes).to(torch.float32) * F.embedding(x, self.scale)


class XnnpackStoredStub(nn.Module):
    """A quantizer of activations with constant parameters."""

    def __init__(self, stub: QuantStub, factor: float) -> None:
        super().__init__()
        self.scale, self.zero_point = float(stub.scale) * factor, int(stub.zero_point)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.codes(x))

    def codes(self, x: Tensor) -> Tensor:
        codes: Tensor = quantized_decomposed().quantize_per_tensor(
            x, self.scale, self.zero_point, INT8_MIN, INT8_MAX, torch.int8
        )
        return codes

    def values(self, codes: Tensor) -> Tensor:
        values: Tensor = quantized_decomposed().dequantize_per_tensor(
            codes, self.scale, self.zero_point, INT8_MIN, INT8_MAX, torch.int8
        )
        return values


class XnnpackDynamicStub(nn.Module):
    """A quantizer that computes scale and zero point of every row at run time."""

    def forward(self, x: Tensor) -> Tensor:
        scale, zero_point = quantized_decomposed().choose_qparams_per_token_asymmetric(x, torch.int8)
        codes = quantized_decomposed().quantize_per_token(x, scale, zero_point, INT8_MIN, INT8_MAX, torch.int8)
        values: Tensor = quantized_decomposed().dequantize_per_token(
            codes, scale, zero_point, INT8_MIN, INT8_MAX, torch.int8, torch.float32
        )
        return values


XNNPACK_FACTORIES = int8_module_factories(
    "XNNPACK",
    weight=XnnpackStoredWeight,
    table=XnnpackStoredTable,
    stub=XnnpackStoredStub,
    row_stub=XnnpackDynamicStub,
)
