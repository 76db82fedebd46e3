"""Modules that represent quantized layers and quantizers in the graph that becomes a .tflite file.

Weights are integer codes; biases are int32 with the scale s_x * s_w.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.layers import INT8_MAX, INT8_MIN, WeightedOperation, int8_module_factories
from scalepoint.formats.operators import dequantize, quantize, quantize_rows
from scalepoint.numerics import dtype_name
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity


class LiteRtStoredWeight(WeightedOperation):
    """An operation with a weight of codes, stored as (out, in, ..)."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__(source)
        quant, deployed = source.weight_quant, source.get_deployed()
        granularity = quant.calculator.granularity
        if not isinstance(granularity, PerChannelGranularity | PerBlockGranularity):
            raise ExportError(f"{quant.name}: a weight for LiteRT must have scales per channel or per block")
        self.fmt = dtype_name(quant.spec.dtype)
        self.axis = int(granularity.axis or 0)
        self.block = int(granularity.block_size) if isinstance(granularity, PerBlockGranularity) else 0  # type: ignore[arg-type]
        self.register_buffer("codes", deployed.codes.detach().to(torch.int8).contiguous())
        self.register_buffer("scale", quant.scale.detach().to(torch.float32).contiguous().clone())
        bias, bias_scale = deployed.bias, deployed.bias_scale
        if bias is not None:
            bias = bias.detach().clone() if bias_scale is None else bias.to(torch.int32).contiguous()
        self.register_buffer("bias", bias)
        self.register_buffer("bias_scale", None if bias_scale is None else bias_scale.detach().contiguous())

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None  # None: the bias is a float tensor

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize(self.codes, self.scale, zero_point=None, axis=self.axis, block=self.block, fmt=self.fmt)
        bias = self.bias
        if bias is not None and self.bias_scale is not None:
            bias = dequantize(bias, self.bias_scale, zero_point=None, axis=0, block=0, fmt="int32")
        return self.product(x, weight, bias)


class LiteRtStoredTable(nn.Module):
    """An embedding table of codes. LiteRT's EMBEDDING_LOOKUP multiplies each row by its scale."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__()
        self.register_buffer("codes", source.get_deployed().codes.detach().to(torch.int8).contiguous())
        self.register_buffer("scale", source.weight_quant.scale.detach().to(torch.float32).reshape(-1).clone())

    codes: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        table = dequantize(self.codes, self.scale, zero_point=None, axis=0, block=0, fmt="int8")
        return F.embedding(x, table)


class LiteRtStoredStub(nn.Module):
    """A quantizer of activations with constant parameters."""

    def __init__(self, stub: QuantStub, factor: float) -> None:
        super().__init__()
        self.register_buffer("scale", (stub.scale.detach() * factor).to(torch.float32).reshape(()))
        self.register_buffer("zero_point", stub.zero_point.detach().to(torch.int8).reshape(()))

    scale: Tensor
    zero_point: Tensor

    def forward(self, x: Tensor) -> Tensor:
        codes = quantize(x, self.scale, self.zero_point, axis=0, low=INT8_MIN, high=INT8_MAX, fmt="int8")
        values: Tensor = dequantize(codes, self.scale, self.zero_point, axis=0, block=0, fmt="int8")
        return values


class LiteRtDynamicStub(nn.Module):
    """A quantizer that computes scale and zero point of each row when the file runs; the next kernel does this."""

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = quantize_rows(x)
        return values


LITERT_FACTORIES = int8_module_factories(
    "LiteRT", weight=LiteRtStoredWeight, table=LiteRtStoredTable, stub=LiteRtStoredStub, row_stub=LiteRtDynamicStub
)
