"""Configs of block formats, and those of Apple for language models.

Block formats: weights and activations in blocks that share a scale (OCP MX v1.0; NVFP4).

    MX       32 values per block; power-of-two scales, rounded up as the hardware does, so that no value is clipped
    NVFP4    16 values per block; e4m3 scales, and one float32 scale for the tensor

Scales of activations are computed in every call. Targets support some of these formats; `reference` simulates all.

Language models in Core AI, as Apple exports its own; activations stay float:

    COREAI_MACOS    int4 weights in blocks of 32
    COREAI_IOS      palettes of 4 bits, a table for 8 or 32 output channels; embeddings stay float
"""

from scalepoint.numerics import E4M3, E8M0, FP4, CodeType, Float6, ScaleRounding
from scalepoint.quantize.config import Override, QuantConfig
from scalepoint.spec import (
    ExtendedQuantizationSpec,
    PerBlockGranularity,
    PerTokenBlockGranularity,
    QuantizationSpec,
)

__all__ = ["COREAI_IOS", "COREAI_IOS_SMALL", "COREAI_MACOS", "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP8", "NVFP4"]


def _make_mx_config(dtype: CodeType) -> QuantConfig:
    return _make_block_config(
        ExtendedQuantizationSpec(dtype=dtype, scale_dtype=E8M0, scale_rounding=ScaleRounding.RCEIL), block_size=32
    )


def _make_block_config(spec: QuantizationSpec, block_size: int) -> QuantConfig:
    return QuantConfig(
        activation=spec.replace(
            granularity=PerTokenBlockGranularity(block_size=block_size), qparam_calculator_cls="dynamic"
        ),
        weight=spec.replace(granularity=PerBlockGranularity(block_size=block_size), qparam_calculator_cls="static"),
    )


MXFP8 = _make_mx_config(E4M3)
MXFP6_E2M3 = _make_mx_config(Float6.E2M3)
MXFP6_E3M2 = _make_mx_config(Float6.E3M2)
MXFP4 = _make_mx_config(FP4)
NVFP4 = _make_block_config(QuantizationSpec(dtype=FP4, scale_dtype=E4M3), block_size=16)

FLOAT_EMBEDDINGS = Override(type="Embedding", weight="float")
COREAI_MACOS = QuantConfig.weight_only(
    "int4", 32, overrides=[Override(type="Embedding", weight={"n_bits": 4, "block_size": 32})]
)
COREAI_IOS = QuantConfig.palettes(4, 8, overrides=[FLOAT_EMBEDDINGS])
COREAI_IOS_SMALL = QuantConfig.palettes(4, 32, overrides=[FLOAT_EMBEDDINGS])  # fewer tables: a smaller file
