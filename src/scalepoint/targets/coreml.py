"""Core ML on Apple's Neural Engine, GPU and CPU: int8 between Q and DQ, or narrow weights beside float activations.

The Neural Engine multiplies integers where a convolution, linear layer, add or pool stands between a dequantize and a
quantize, with an activation that it folds (optimize_activation_quantization in coremltools). So outputs are quantized
too, but for plain linear layers, whose readers are residual adds, norms and GELU: it cost a sentence encoder 9 dB.
Weights are stored as codes whatever the activations are: the compiler unpacks them when a model is loaded, or in the
kernel. What is not quantized is float16, which the Neural Engine computes in.
"""

from dataclasses import replace

import torch

from scalepoint.patterns import ConvBNPattern, ConvBNReLUPattern, LinearReLUPattern, chain, op
from scalepoint.patterns.base import BATCH_NORM, CONV, GATED_LINEAR, LINEAR, LINEAR_RELU, MHA_IN_PROJECTION
from scalepoint.patterns.fused import FusedConvBN, FusedConvBNReLU, FusedLinearReLU
from scalepoint.patterns.language import optional
from scalepoint.spec import PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.palette import INDEX_BITS
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import BOTH, COPIES, PATTERNS, onnxruntime_target
from scalepoint.targets.rules import small_tables
from scalepoint.targets.target import Accepted, OperationFacts, Target

FOLDED = op("activation", "relu", "relu6", "leaky_relu", "tanh", "sigmoid", "hardsigmoid")
OWN = ("ConvBNReLUPattern", "ConvBNPattern", "MHAInProjectionPattern")
INDICES = tuple(to_dtype(f"uint{bits}") for bits in INDEX_BITS)
NARROW = tuple(map(to_dtype, ("int4", "uint4", "int8", "uint8")))

COREML_PATTERNS = (
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED), make=FusedConvBNReLU, qdq_points=BOTH),
    ConvBNPattern(match=chain(CONV, optional(BATCH_NORM)), make=FusedConvBN, qdq_points=BOTH),
    LinearReLUPattern(match=chain(LINEAR, FOLDED), make=FusedLinearReLU, qdq_points=BOTH),
    replace(MHA_IN_PROJECTION, qdq_points=BOTH),
    *(pattern for pattern in PATTERNS if pattern.name not in OWN and pattern not in (LINEAR_RELU, GATED_LINEAR)),
)


def three_axes(facts: OperationFacts) -> str | None:
    """No int8 kernel for convolutions over volumes: they are computed in float."""
    if facts.kind.startswith("conv") and len(facts.kernel) == 3 and not facts.is_weight_only:
        return "no int8 kernel for a convolution over three axes; narrow weights alone: QuantConfig.weight_only('int8')"
    return None


COREML = Target(
    name="coreml",
    summary="Core ML on Apple devices: int8 (iOS 17), weights of 1 to 8 bits (iOS 18), the rest float16",
    patterns=COREML_PATTERNS,
    conversions=onnxruntime_target("vnni").conversions,
    activation=QuantizationSpec(dtype="uint8", qscheme="asymmetric", qparam_calculator_cls="global_minmax"),
    weight=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    table=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    accepts=(
        Accepted("activation", (torch.uint8,), (), ("per_tensor",), dynamic=False),
        Accepted(
            "activation",
            (torch.int8,),
            (QuantizationScheme.SYMMETRIC, QuantizationScheme.ASYMMETRIC),
            ("per_tensor",),
            dynamic=False,
        ),
        Accepted("weight", NARROW, (), ("per_tensor", "per_channel", "per_block")),
        Accepted("weight", INDICES, (), ("per_grouped_channel",)),  # palettes
    ),
    rules=(small_tables, three_axes),
    same_scale_kinds=COPIES,
    bias="float",
    float_dtypes=(torch.float16, torch.float32),
    has_half_scales=True,
    fixed_shapes_reason="the Neural Engine runs fixed shapes, and the program is converted for the example's",
    format="coreml",
    runtime="coreml",
)
