"""TensorRT: the groups its builder fuses into one kernel, and the formats that it runs beyond int8.

    quantize(model, x, config=FP8, forward_loop=data, target="tensorrt")

FP8 (Ada, Hopper), MXFP8 and NVFP4 (Blackwell) quantize weights and activations, INT4 the weights of linear layers
alone. What a format has no kernel for stays float, and the coverage says so.
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
