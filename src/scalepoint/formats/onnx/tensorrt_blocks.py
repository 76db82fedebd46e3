"""Modules of the stored graph for NVFP4 and MXFP8, with TensorRT's operators.

    NVFP4    x = DQ(codes, DQ(block scales in e4m3, scale of the tensor), block 16)
    MXFP8    x = TRT_MXFP8DequantizeLinear(codes, exponents in uint8, block 32)

Weights are stored as (out, in). Activations are quantized in every call, by TensorRT's DynamicQuantize operators.
Exponents are uint8 instead of ONNX's e8m0 type, because it is not known whether TensorRT's parser accepts e8m0.

The constructor of OnnxStoredWeight sets `fmt` and `block` of a weight and then calls its `store_weight`. Its `forward`
calls `weight`, which returns (in, out), the layout of MatMul. StoredDynamicBlocks sets its attributes itself.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from scalepoint.errors import ExportError
from scalepoint.formats.onnx.operators import ONNX_TYPES
from scalepoint.formats.onnx.stored_weights import OnnxStored, OnnxStoredWeight
from scalepoint.formats.operators import dequantize
from scalepoint.numerics import E4M3, E8M0, dtype_name
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub, WeightFakeQuantize
from scalepoint.spec import PerTokenBlockGranularity

TENSORRT_DOMAIN = "trt"
_E8M0_BIAS = 127
_FLOAT, _FP8, _FP4 = 1, 17, 23  # FLOAT, FLOAT8E4M3FN and FLOAT4E2M1 of onnx.TensorProto


class StoredTwoLevelWeight(OnnxStoredWeight):
    """A linear layer with an NVFP4 weight."""

    inner: Tensor  # scales of the blocks in e4m3, relative to `outer`
    outer: Tensor  # scale of the tensor

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        outer = _get_tensor_scale(quant, hint="run freeze(model) again")
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("inner", (quant.scale / outer).to(E4M3).contiguous())
        self.register_buffer("outer", outer)

    def weight(self) -> Tensor:
        scale: Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear", (self.inner, self.outer), dtype=torch.float32, shape=self.inner.shape
        )
        values: Tensor = dequantize(self.codes, scale, zero_point=None, axis=1, block=self.block, fmt=self.fmt)
        return values.transpose(0, 1)


def _get_tensor_scale(quantizer: QuantizerBase, hint: str) -> Tensor:
    """Return the outer scale of a quantizer with e4m3 scales, as a scalar. It is empty until a tensor was observed."""
    tensor_scale = quantizer.calculator.tensor_scale
    if tensor_scale is None or not tensor_scale.numel():
        raise ExportError(f"{quantizer.name} has no tensor scale yet: {hint}")
    return tensor_scale.detach().reshape(()).clone()


class StoredMxWeight(OnnxStoredWeight):
    """A linear layer with an MXFP8 weight."""

    exponents: Tensor  # of the block scales, which are powers of two

    def store_weight(self, quant: WeightFakeQuantize, codes: Tensor) -> None:
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("exponents", (quant.scale.log2().round() + _E8M0_BIAS).to(torch.uint8).contiguous())

    def weight(self) -> Tensor:
        return _dequantize_mx(self.codes, self.exponents, self.block).transpose(0, 1)


def _dequantize_mx(codes: Tensor, exponents: Tensor, block: int) -> Tensor:
    values: Tensor = torch.onnx.ops.symbolic(
        f"{TENSORRT_DOMAIN}::TRT_MXFP8DequantizeLinear",
        (codes, exponents),
        {"axis": -1, "block_size": block, "output_dtype": _FLOAT},
        dtype=torch.float32,
        shape=codes.shape,
        version=1,
    )
    return values


class StoredDynamicBlocks(OnnxStored):
    """A quantizer of activations in blocks along the last axis, whose scales are computed in every call.

    Scales in e8m0 make it MXFP8 (`is_mx`), scales in e4m3 make it NVFP4: a spec allows e4m3 scales for fp4 codes only.
    `domains` are those of the operators that the compiler has.
    """

    def __init__(self, stub: QuantStub, domains: Collection[str]) -> None:
        super().__init__()
        granularity, grid = stub.calculator.granularity, stub.calculator.grid
        if not isinstance(granularity, PerTokenBlockGranularity) or grid.scale_dtype not in (E4M3, E8M0):
            raise ExportError(f"{stub.name}: dynamic scales cannot be stored as constants: use a static calculator")
        if TENSORRT_DOMAIN not in domains:
            raise ExportError(
                f"{stub.name}: only TensorRT has operators for dynamic scales of blocks: use target='tensorrt' or a "
                "static calculator"
            )
        self.fmt, self.block, self.is_mx = grid.format.name, granularity.block_size, grid.scale_dtype == E8M0
        if self.is_mx and self.fmt != dtype_name(E4M3):
            raise ExportError(f"{stub.name}: TensorRT has no operator that quantizes to {self.fmt} with e8m0 scales")
        outer = None if self.is_mx else _get_tensor_scale(stub, hint="run calibrate(model, data) again")
        self.register_buffer("outer", outer)

    outer: Tensor | None  # scale of the tensor; None for MXFP8

    def forward(self, x: Tensor) -> Tensor:
        scale_shape = (*x.shape[:-1], x.shape[-1] // self.block)
        if self.is_mx:
            codes, exponents = torch.onnx.ops.symbolic_multi_out(
                f"{TENSORRT_DOMAIN}::TRT_MXFP8DynamicQuantize",
                (x,),
                {"axis": -1, "block_size": self.block, "output_dtype": _FP8},
                dtypes=(E4M3, torch.uint8),
                shapes=(x.shape, scale_shape),
                version=1,
            )
            return _dequantize_mx(codes, exponents, self.block)
        codes, block_scales = torch.onnx.ops.symbolic_multi_out(
            f"{TENSORRT_DOMAIN}::TRT_FP4DynamicQuantize",
            (x, self.outer),
            {"axis": -1, "block_size": self.block, "scale_type": _FP8},
            dtypes=(_FP4, E4M3),
            shapes=((*x.shape[:-1], x.shape[-1] // 2), scale_shape),  # torch packs two fp4 codes into an element
            version=1,
        )
        scale = torch.onnx.ops.symbolic(
            "DequantizeLinear", (block_scales, self.outer), dtype=torch.float32, shape=scale_shape
        )
        values: Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (codes, scale),
            {"axis": -1, "block_size": self.block},
            dtype=torch.float32,
            shape=x.shape,
        )
        return values

    @property
    def opset(self) -> int:
        return ONNX_TYPES[self.fmt].first_opset
