"""Core ML on Apple's Neural Engine, GPU and CPU: int8 between Q and DQ, or weight-only with 1 to 8 bits.

The Neural Engine multiplies integers if a convolution, linear layer, add or pool is between a dequantize and a
quantize, with an activation that it fuses (optimize_activation_quantization in coremltools). So outputs are quantized
too. Plain linear layers are the exception: residual adds, norms and GELU read them, and quantizing them cost a sentence
encoder 9 dB. Weights are stored as codes in all cases; the compiler unpacks them when it loads a model, or in the
kernel. What is not quantized is float16, the native type of the Neural Engine.
"""

from dataclasses import replace

import torch

from scalepoint.patterns import ConvBNPattern, ConvBNReLUPattern, LinearReLUPattern, chain, op
from scalepoint.patterns.base import BATCH_NORM, CONV, GATED_LINEAR, LINEAR, LINEAR_RELU, MHA_IN_PROJECTION
from scalepoint.patterns.language import optional
from scalepoint.spec import QuantizationScheme
from scalepoint.spec.palette import INDEX_BITS
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import PATTERNS, onnxruntime_target
from scalepoint.targets.shared import (
    INPUT_AND_OUTPUT,
    INT8_PER_CHANNEL,
    SAME_SCALE_KINDS,
    UINT8_ASYMMETRIC,
    small_embedding_table,
)
from scalepoint.targets.target import Accepted, OperationFacts, Target

FOLDED_ACTIVATION = op("activation", "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "hardsigmoid")
REPLACED_PATTERNS = ("ConvBNReLUPattern", "ConvBNPattern", "MHAInProjectionPattern")
PALETTE_INDEX_DTYPES = tuple(to_dtype(f"uint{bits}") for bits in INDEX_BITS)
INTEGER_WEIGHT_DTYPES = tuple(map(to_dtype, ("int4", "uint4", "int8", "uint8")))

COREML_PATTERNS = (
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED_ACTIVATION), qdq_points=INPUT_AND_OUTPUT),
    ConvBNPattern(qdq_points=INPUT_AND_OUTPUT),
    LinearReLUPattern(match=chain(LINEAR, FOLDED_ACTIVATION), qdq_points=INPUT_AND_OUTPUT),
    replace(MHA_IN_PROJECTION, qdq_points=INPUT_AND_OUTPUT),
    *(
        pattern
        for pattern in PATTERNS
        if pattern.name not in REPLACED_PATTERNS and pattern not in (LINEAR_RELU, GATED_LINEAR)
    ),
)


def convolution_over_three_axes(facts: OperationFacts) -> str | None:
    """3-d convolutions have no int8 kernel and are computed in float."""
    if facts.kind.startswith("conv") and len(facts.kernel) == 3 and not facts.is_weight_only:
        return "no int8 kernel for a 3-d convolution; for int8 weights only use QuantConfig.weight_only('int8')"
    return None


COREML = Target(
    name="coreml",
    summary="Core ML on Apple devices: int8 (iOS 17), weights of 1 to 8 bits (iOS 18), the rest float16",
    patterns=COREML_PATTERNS,
    conversions=onnxruntime_target("vnni").conversions,
    activation=UINT8_ASYMMETRIC,
    weight=INT8_PER_CHANNEL,
    table=INT8_PER_CHANNEL,
    accepts=(
        Accepted("activation", (torch.uint8,), granularities=("per_tensor",), dynamic=False),
        Accepted(
            "activation",
            (torch.int8,),
            schemes=(QuantizationScheme.SYMMETRIC, QuantizationScheme.ASYMMETRIC),
            granularities=("per_tensor",),
            dynamic=False,
        ),
        Accepted("weight", INTEGER_WEIGHT_DTYPES, granularities=("per_tensor", "per_channel", "per_block")),
        Accepted("weight", PALETTE_INDEX_DTYPES, granularities=("per_grouped_channel",)),
    ),
    rules=(small_embedding_table, convolution_over_three_axes),
    same_scale_kinds=SAME_SCALE_KINDS,
    bias="float",
    float_dtypes=(torch.float16, torch.float32),
    has_half_scales=True,
    sparse_code_bits=(4, 8),
    fixed_shapes_reason="the Neural Engine runs fixed shapes, and the program is converted for those of the example",
    format="coreml",
    runtime="coreml",
)
