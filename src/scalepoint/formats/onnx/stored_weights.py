"""Modules that represent quantized layers and quantizers in the graph that becomes an ONNX file.

Weights are integer codes, biases are int32 or float as the target needs them, quantizers are Q/DQ pairs. The names of
buffers become names of initializers in the file.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.onnx.operators import FIRST_OPSET_WITH_BLOCKS, ONNX_TYPES, check_has_type
from scalepoint.formats.operators import dequantize, quantize
from scalepoint.numerics import dtype_name, get_format
from scalepoint.quantize.operations import run_with_weight
from scalepoint.quantize.quantized_layers import DeployedTensors, QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, PerTensorGranularity
from scalepoint.spec.onnx_export import check_expressible
from scalepoint.spec.spec import to_dtype

INT4 = 22  # onnx.TensorProto.INT4


class OnnxStored(nn.Module):
    """A module that can be written to ONNX from some opset on."""

    @property
    @abstractmethod
    def opset(self) -> int:
        """The first opset that has all of its types and operators."""


class OnnxStoredWeight(OnnxStored):
    """An operation with a weight of codes. Those of a linear layer are stored as (in, out), the layout of MatMul.

    Zero points of blocks are omitted if all are zero: kernels for narrow weights are faster without them.

    A subclass may override `store_weight`, which the constructor calls last but for the bias, and `weight`, which
    `forward` calls. Both can use what the constructor has set before: `kind`, `fmt` (the format of the codes), `axis`
    (of the scales) and `block` (the size of a block; 0 without blocks).
    """

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__()
        quant = source.weight_quant
        deployed = source.get_deployed()
        self.references = {"operation": source.operation}
        self.kind = source.kind
        self.fmt = dtype_name(quant.spec.dtype)
        check_has_type(self.fmt, quant.name)
        granularity = quant.calculator.granularity
        if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity | PerBlockGranularity):
            raise ExportError(f"{quant.name}: weights with {granularity!r} cannot be written to ONNX")
        self.axis = 0 if isinstance(granularity, PerTensorGranularity) else int(granularity.axis or 0)
        self.block = int(granularity.block_size) if isinstance(granularity, PerBlockGranularity) else 0  # type: ignore[arg-type]
        self.store_weight(quant, deployed.codes.detach())
        self._store_bias(deployed)

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None  # added to the dequantized codes
    bias: Tensor | None
    bias_scale: Tensor | None

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        """Register codes, which have the shape (out, in, ..), and their parameters as buffers."""
        scale, zero_point, minval = quant.scale, quant.zero_point, quant.minval
        if minval is not None:  # w = (codes - lowest code) * scale + minval
            zero_point = torch.full_like(scale, quant.spec.quant_min)
        elif zero_point.shape != scale.shape:  # never set: the dtype has no zero points
            zero_point = torch.zeros_like(scale)
        if self.kind == "linear":
            codes = codes.transpose(0, 1)
            self.axis = 1 - self.axis if scale.ndim else 0
            if self.block:
                scale, zero_point = scale.transpose(0, 1), zero_point.transpose(0, 1)
                minval = None if minval is None else minval.transpose(0, 1)
        elif self.kind == "head":  # a linear layer as a 1x1 convolution, see quantize/operations.py
            codes = codes.flatten(2)[:, :, :, None]
        is_transposed_on_write = self.kind == "linear" and self.fmt == "int8"  # save.py writes a view without a copy
        self.register_buffer("codes", codes if is_transposed_on_write else codes.contiguous())
        self.register_buffer("scale", scale.detach().to(torch.float32).contiguous().clone())
        is_integer = not codes.is_floating_point()
        zero_point = zero_point.to(codes.dtype if is_integer else torch.float32)
        can_omit_zero_point = self.block and is_integer and not zero_point.any()
        self.register_buffer("zero_point", None if can_omit_zero_point else zero_point)
        if minval is not None:
            minval = minval.detach().to(torch.float32).contiguous().clone()
        self.register_buffer("minval", minval)

    def weight(self) -> Tensor:
        """Return the dequantized weight in the layout of the operation."""
        values: Tensor = dequantize(
            self.codes, self.scale, self.zero_point, axis=self.axis, block=self.block, fmt=self.fmt
        )
        return values if self.minval is None else _add_minimum(values, self.minval, self.axis, self.block)

    def _store_bias(self, deployed: DeployedTensors) -> None:
        bias, bias_scale = deployed.bias, deployed.bias_scale
        if bias is not None:
            bias = bias.detach().clone() if bias_scale is None else bias.to(torch.int32).contiguous()
        self.register_buffer("bias", bias)
        self.register_buffer("bias_scale", None if bias_scale is None else bias_scale.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight(), self.bias
        if bias is not None and self.bias_scale is not None:
            bias = dequantize(bias, self.bias_scale, zero_point=None, axis=0, block=0, fmt="int32")
        if self.kind == "linear":
            y = torch.matmul(x, weight.to(x.dtype))
            return y if bias is None else y + bias
        operation: Any = self.references["operation"]
        return run_with_weight(operation, x, weight.to(x.dtype), bias)

    @property
    def opset(self) -> int:
        return max(ONNX_TYPES[self.fmt].first_opset, FIRST_OPSET_WITH_BLOCKS if self.block else 0)


def _add_minimum(values: Tensor, minimum: Tensor, axis: int, block: int = 0) -> Tensor:
    """Add a minimum to values: one for the tensor, one per index of an axis, or one per block along it."""
    if not minimum.ndim:
        return values + minimum
    if not block:
        shape = [1] * values.ndim
        shape[axis] = -1
        return values + minimum.view(shape)
    blocked_shape = [*values.shape[:axis], values.shape[axis] // block, block, *values.shape[axis + 1 :]]
    return (values.reshape(blocked_shape) + minimum.unsqueeze(axis + 1)).reshape(values.shape)


class OnnxUnpackedWeight(OnnxStoredWeight):
    """An operation in float whose codes a runtime dequantizes once, when it loads the file.

    It has no zero point: by that the rewrite unpack_when_loaded recognizes its DequantizeLinear.
    """

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        super().store_weight(quant, codes)
        self.zero_point = None


class OnnxStoredTable(OnnxStored):
    """An embedding table that looks up codes and scales: only the rows that are read are dequantized."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__()
        quant = source.weight_quant
        self.fmt = dtype_name(quant.spec.dtype)
        check_has_type(self.fmt, quant.name)
        self.register_buffer("codes", source.get_deployed().codes.contiguous())
        self.register_buffer("scale", quant.scale.detach().to(torch.float32).contiguous().clone())

    codes: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.codes).to(torch.float32)
        scales = F.embedding(x, self.scale[:, None]) if self.scale.ndim else self.scale  # one per row, or one for all
        return rows * scales

    @property
    def opset(self) -> int:
        return ONNX_TYPES[self.fmt].first_opset


class OnnxStoredBlockTable(OnnxStoredTable):
    """An embedding table with scales per block, which one operator of ONNX Runtime looks up and dequantizes."""

    def __init__(self, source: QuantizedLayer) -> None:
        super().__init__(source)
        self.block = self.codes.shape[1] // self.scale.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        int4_codes = torch.onnx.ops.symbolic(
            "Cast", (self.codes,), {"to": INT4}, dtype=self.codes.dtype, shape=self.codes.shape
        )
        values: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (int4_codes, x, self.scale),
            {"gather_axis": 0, "quantize_axis": 1, "block_size": self.block},
            dtype=torch.float32,
            shape=(*x.shape, self.codes.shape[1]),
            version=1,
        )
        return values


class OnnxStoredStub(OnnxStored):
    """A quantizer of activations with constant parameters: QuantizeLinear and DequantizeLinear.

    A minimum is subtracted before QuantizeLinear and added after DequantizeLinear, as in the simulation.
    """

    def __init__(self, stub: QuantStub, factor: float = 1.0) -> None:
        super().__init__()
        grid, granularity = stub.quantizer.grid, stub.calculator.granularity
        self.fmt, self.low, self.high = grid.format.name, grid.low, grid.high
        check_has_type(self.fmt, stub.name)
        check_expressible(grid, granularity, stub.name)
        if stub.calculator.always_called and not stub.is_learned:
            raise ExportError(f"{stub.name}: dynamic scales cannot be stored as constants: use a static calculator")
        self.axis = int(granularity.axis or 0) if isinstance(granularity, PerChannelGranularity) else 0
        scale = (stub.scale.detach() * factor).reshape(() if isinstance(granularity, PerTensorGranularity) else (-1,))
        minval = None if stub.minval is None else (stub.minval.detach() * factor).reshape(scale.shape)
        if minval is not None:
            zero_point = torch.full_like(scale, grid.low)
        elif grid.format.is_float:
            zero_point = torch.zeros_like(scale)
        else:
            zero_point = stub.zero_point.detach().reshape(scale.shape)
        self.register_buffer("minval", minval)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_point", zero_point.to(grid.format.storage))

    scale: Tensor
    zero_point: Tensor
    minval: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.ndim if x.ndim else 0
        value, low, high = x.to(self.scale.dtype), self.low, self.high
        if self.minval is not None:
            # QuantizeLinear clips to the range of its type, so values below the minimum are clipped before.
            value = _add_minimum(value, -self.minval, axis).clamp(min=0)
            full_range = get_format(to_dtype(self.fmt))
            low, high = float(full_range.low), float(full_range.high)
        codes = quantize(value, self.scale, self.zero_point, axis, low, high, self.fmt)
        values: Tensor = dequantize(codes, self.scale, self.zero_point, axis=axis, block=0, fmt=self.fmt)
        return (values if self.minval is None else _add_minimum(values, self.minval, axis)).to(x.dtype)

    @property
    def opset(self) -> int:
        return ONNX_TYPES[self.fmt].first_opset
