"""TensorRT: its fusion patterns, and configs for the data types that it supports besides int8.

    quantize(model, x, config=FP8, forward_loop=data, target="tensorrt")

FP8 (Ada, Hopper), MXFP8 and NVFP4 (Blackwell) quantize weights and activations. INT4 quantizes only the weights of
linear layers. Operations without a kernel for the data type stay float; the coverage lists them.
"""

from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.presets import MXFP8, NVFP4
from scalepoint.spec import PerChannelGranularity, QuantizationSpec
from scalepoint.targets.tensorrt import TENSORRT, TENSORRT_PATTERNS

__all__ = ["FP8", "INT4", "MXFP8", "NVFP4", "TENSORRT", "TENSORRT_PATTERNS"]

_E4M3 = "float8_e4m3fn"

FP8 = QuantConfig(
    activation=QuantizationSpec(dtype=_E4M3, qparam_calculator_cls="global_minmax"),
    weight=QuantizationSpec(dtype=_E4M3, granularity=PerChannelGranularity(), qparam_calculator_cls="static"),
)
INT4 = QuantConfig.weight_only("int4", block_size=128)
