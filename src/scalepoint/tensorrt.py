"""TensorRT: the groups its builder fuses into one kernel, and the formats that it runs beyond int8.

    quantize(model, x, config=FP8, forward_loop=data, target="tensorrt")

FP8 (Ada, Hopper), MXFP8 and NVFP4 (Blackwell) quantize weights and activations, INT4 the weights of linear layers
alone. What a format has no kernel for stays float, and the coverage says so.
"""

from scalepoint.numerics import ScaleRounding
from scalepoint.quantize.config import QuantConfig
from scalepoint.spec import (
    ExtendedQuantizationSpec,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTokenBlockGranularity,
    QuantizationSpec,
)
from scalepoint.targets.tensorrt import TENSORRT, TENSORRT_PATTERNS

__all__ = ["FP8", "INT4", "MXFP8", "NVFP4", "TENSORRT", "TENSORRT_PATTERNS"]

_E4M3, _E8M0, _FP4 = "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"

FP8 = QuantConfig(
    activation=QuantizationSpec(dtype=_E4M3, qparam_calculator_cls="global_minmax"),
    weight=QuantizationSpec(dtype=_E4M3, granularity=PerChannelGranularity(), qparam_calculator_cls="static"),
)
_MX = ExtendedQuantizationSpec(  # scales that never saturate, as the hardware rounds them
    dtype=_E4M3,
    scale_dtype=_E8M0,
    scale_rounding=ScaleRounding.RCEIL,
    granularity=PerTokenBlockGranularity(block_size=32),
    qparam_calculator_cls="dynamic",
)
_NV = QuantizationSpec(
    dtype=_FP4,
    scale_dtype=_E4M3,
    granularity=PerTokenBlockGranularity(block_size=16),
    qparam_calculator_cls="dynamic",
)
MXFP8 = QuantConfig(
    activation=_MX, weight=_MX.replace(granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")
)
NVFP4 = QuantConfig(
    activation=_NV, weight=_NV.replace(granularity=PerBlockGranularity(block_size=16), qparam_calculator_cls="static")
)
INT4 = QuantConfig.weight_only("int4", block_size=128)
