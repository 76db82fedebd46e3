"""What is stored of a quantized model: weights as their codes, biases as the target wants them, quantizers as Q/DQ."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.errors import ExportError
from scalepoint.formats.onnx.operators import FIRST_OPSET_WITH_BLOCKS, ONNX_TYPES, check_has_type
from scalepoint.formats.operators import dequantize, quantize
from scalepoint.numerics import dtype_name, get_format
from scalepoint.quantize.parts import run_with
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize
from scalepoint.quantize.weighted import Deployed, QuantizedWeighted
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, PerTensorGranularity
from scalepoint.spec.onnx_export import check_expressible
from scalepoint.spec.spec import to_dtype

INT4 = 22  # of ONNX's types


class OnnxStored(nn.Module):
    """What has a form in ONNX, from some opset on."""

    @property
    @abstractmethod
    def opset(self) -> int:
        """The first that has it."""


class OnnxStoredWeight(OnnxStored):
    """An operation over stored codes; a linear layer holds them as (in, out), as every runtime multiplies.

    Zero points of blocks are left away where all are zero: kernels for narrow weights have a faster path then.
    """

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__()
        quant = source.weight_quant
        deployed = source.deployed()
        self.references = {"operation": source.operation}
        self.kind = source.kind
        self.fmt = dtype_name(quant.spec.dtype)
        check_has_type(self.fmt, quant.name)
        granularity = quant.calculator.granularity
        if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity | PerBlockGranularity):
            raise ExportError(f"{quant.name}: no ONNX form for weights with {granularity!r}")
        self.axis = 0 if isinstance(granularity, PerTensorGranularity) else int(granularity.axis or 0)
        self.block = int(granularity.block_size) if isinstance(granularity, PerBlockGranularity) else 0  # type: ignore[arg-type]
        self.store_weight(quant, deployed.codes)
        self._store_bias(deployed)

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None  # added to what the codes stand for
    bias: Tensor | None
    bias_scale: Tensor | None

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        """Register codes, given as (out, in, ..), and their parameters as buffers."""
        scale, least = quant.scale, quant.minval
        zero = quant.zero_point if quant.zero_point.shape == scale.shape else torch.zeros_like(scale)
        if least is not None:  # w = (codes - lowest code) * scale + minval
            zero = torch.full_like(scale, quant.spec.quant_min)
        if self.kind == "linear":
            codes = codes.transpose(0, 1)
            self.axis = 1 - self.axis if scale.ndim else 0
            if self.block:
                scale, zero = scale.transpose(0, 1), zero.transpose(0, 1)
                least = None if least is None else least.transpose(0, 1)
        if self.kind == "head":
            codes = codes.flatten(2)[:, :, :, None]
        is_turned_when_written = self.kind == "linear" and self.fmt == "int8"
        self.register_buffer("codes", codes if is_turned_when_written else codes.contiguous())
        self.register_buffer("scale", scale.detach().to(torch.float32).contiguous().clone())
        is_integer = not codes.is_floating_point()
        zero = zero.to(codes.dtype if is_integer else torch.float32)
        self.register_buffer("zero_point", None if self.block and is_integer and not zero.any() else zero)
        self.register_buffer("minval", None if least is None else least.detach().to(torch.float32).contiguous().clone())

    def weight(self) -> Tensor:
        """What the codes stand for, as the operation multiplies by it."""
        values: Tensor = dequantize(self.codes, self.scale, self.zero_point, self.axis, self.block, self.fmt)
        return values if self.minval is None else _add_minimum(values, self.minval, self.axis, self.block)

    def _store_bias(self, deployed: Deployed) -> None:
        bias, scale = deployed.bias, deployed.bias_scale
        kept = None if bias is None else bias.detach().clone() if scale is None else bias.to(torch.int32).contiguous()
        self.register_buffer("bias", kept)
        self.register_buffer("bias_scale", None if scale is None else scale.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight(), self.bias
        if bias is not None and self.bias_scale is not None:
            bias = dequantize(bias, self.bias_scale, None, 0, 0, "int32")
        if self.kind == "linear":
            y = torch.matmul(x, weight.to(x.dtype))
            return y if bias is None else y + bias
        operation: Any = self.references["operation"]
        return run_with(operation, x, weight.to(x.dtype), bias)

    @property
    def opset(self) -> int:
        return max(ONNX_TYPES[self.fmt][1], FIRST_OPSET_WITH_BLOCKS if self.block else 0)


def _add_minimum(values: Tensor, minimum: Tensor, axis: int, block: int = 0) -> Tensor:
    """Values with a minimum added: one for all, one along an axis, or one for each block along it."""
    if not minimum.ndim:
        return values + minimum
    if not block:
        shape = [1] * values.ndim
        shape[axis] = -1
        return values + minimum.view(shape)
    parts = [*values.shape[:axis], values.shape[axis] // block, block, *values.shape[axis + 1 :]]
    return (values.reshape(parts) + minimum.unsqueeze(axis + 1)).reshape(values.shape)


class OnnxUnpackedWeight(OnnxStoredWeight):
    """An operation in float over codes that a runtime makes float once; without a zero point, which tells it apart."""

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        super().store_weight(quant, codes)
        self.zero_point = None


class OnnxStoredTable(OnnxStored):
    """Rows looked up as codes and as scales: what a runtime dequantizes is what was read, never the whole table."""

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__()
        quant = source.weight_quant
        self.fmt = dtype_name(quant.spec.dtype)
        check_has_type(self.fmt, quant.name)
        self.register_buffer("codes", source.deployed().codes.contiguous())
        self.register_buffer("scale", quant.scale.detach().to(torch.float32).contiguous().clone())

    codes: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.codes).to(torch.float32)
        return rows * (F.embedding(x, self.scale[:, None]) if self.scale.ndim else self.scale)

    @property
    def opset(self) -> int:
        return ONNX_TYPES[self.fmt][1]


class OnnxStoredBlockTable(OnnxStoredTable):
    """Rows of a table with a scale a block: one operator of ONNX Runtime looks up both."""

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__(source)
        self.block = self.codes.shape[1] // self.scale.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        narrow = torch.onnx.ops.symbolic(
            "Cast", (self.codes,), {"to": INT4}, dtype=self.codes.dtype, shape=self.codes.shape
        )
        values: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (narrow, x, self.scale),
            {"gather_axis": 0, "quantize_axis": 1, "block_size": self.block},
            dtype=torch.float32,
            shape=(*x.shape, self.codes.shape[1]),
            version=1,
        )
        return values


class OnnxStoredStub(OnnxStored):
    """What a stub does, as codes and back, with constant parameters.

    A minimum is subtracted before QuantizeLinear and added after DequantizeLinear: the same sums as the simulation's.
    """

    def __init__(self, stub: QuantStub, factor: float = 1.0) -> None:
        super().__init__()
        grid, granularity = stub.quantizer.grid, stub.calculator.granularity
        self.fmt, self.low, self.high = grid.format.name, grid.low, grid.high
        check_has_type(self.fmt, stub.name)
        check_expressible(grid, granularity, stub.name)
        if stub.calculator.always_called and not stub.is_learned:
            raise ExportError(f"{stub.name}: scales that are made anew for every tensor have no constant form")
        self.axis = int(granularity.axis or 0) if isinstance(granularity, PerChannelGranularity) else 0
        scale = (stub.scale.detach() * factor).reshape(() if isinstance(granularity, PerTensorGranularity) else (-1,))
        zero = torch.zeros_like(scale) if grid.format.is_float else stub.zero_point.detach().reshape(scale.shape)
        least = None if stub.minval is None else (stub.minval.detach() * factor).reshape(scale.shape)
        if least is not None:
            zero = torch.full_like(scale, grid.low)
        self.register_buffer("minval", least)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_point", zero.to(grid.format.storage))

    scale: Tensor
    zero_point: Tensor
    minval: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.ndim if x.ndim else 0
        value, low, high = x.to(self.scale.dtype), self.low, self.high
        if self.minval is not None:
            # the codes of a narrow range end at its minimum, which QuantizeLinear does not know
            value = _add_minimum(value, -self.minval, axis).clamp(min=0)
            low, high = float(get_format(to_dtype(self.fmt)).low), float(get_format(to_dtype(self.fmt)).high)
        codes = quantize(value, self.scale, self.zero_point, axis, low, high, self.fmt)
        values: Tensor = dequantize(codes, self.scale, self.zero_point, axis, 0, self.fmt)
        return (values if self.minval is None else _add_minimum(values, self.minval, axis)).to(x.dtype)

    @property
    def opset(self) -> int:
        return ONNX_TYPES[self.fmt][1]
