"""ONNX Runtime on CPUs: uint8 activations, int8 weights, Q/DQ on inputs and outputs of QLinear kernels.

In convolutional networks everything is quantized (inputs, outputs, residual adds, pools), so that kernels pass integers
to each other. In transformers only linear layers are quantized: their outputs, norms, GELU, softmax, attention and
residuals stay float, because int8 does not make them faster.
"""

from functools import cache

import torch

from scalepoint.patterns import (
    AdaptiveAvgPoolPattern,
    ConcatPattern,
    ConvBNPattern,
    ConvBNReLUPattern,
    Pattern,
    Point,
    chain,
    op,
    optional,
)
from scalepoint.patterns.base import (
    ATTENTION,
    ATTENTION_SPELLED_OUT,
    BATCH_NORM,
    CONV,
    CONV_TRANSPOSE,
    EMBEDDING,
    GATED_LINEAR,
    GROUP_NORM,
    LAYER_NORM,
    LINEAR_ONLY,
    LINEAR_RELU,
    MHA_IN_PROJECTION,
    RMS_NORM,
    RMS_NORM_SPELLED_OUT,
)
from scalepoint.patterns.conversions import CONVERSIONS, head_to_convolution
from scalepoint.patterns.fused import FusedAdd, FusedPool
from scalepoint.patterns.language import without_points
from scalepoint.spec import QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.support.cpu import instruction_set
from scalepoint.targets.shared import (
    FOLDED_ACTIVATION,
    INPUT_AND_OUTPUT,
    INT8_PER_CHANNEL,
    SAME_SCALE_KINDS,
    SYMMETRIC,
    UINT8_ASYMMETRIC,
    joins_convolutions,
    reads_convolution,
    small_embedding_table,
    weight_only_outside_linear,
)
from scalepoint.targets.target import Accepted, OperationFacts, RewriteRule, Target

INT4, UINT4, INT2 = map(to_dtype, ("int4", "uint4", "int2"))
MATMUL_NBITS_DTYPES = (INT4, UINT4, INT2, torch.int8)
CAST_TO_INT8_DTYPES = (INT4, INT2)  # stored packed; a Cast to int8 is computed when the file is loaded
BLOCK_SIZES = (16, 32, 64, 128, 256)
PATTERNS = (
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED_ACTIVATION), qdq_points=INPUT_AND_OUTPUT),
    ConvBNPattern(qdq_points=INPUT_AND_OUTPUT),
    Pattern(
        "AddReLUPattern",
        match=chain(op("add", where=joins_convolutions), optional(FOLDED_ACTIVATION)),
        make=FusedAdd,
        qdq_points=(Point.INPUT, Point.RESIDUAL_INPUT, Point.OUTPUT),
    ),
    AdaptiveAvgPoolPattern(match=chain(op("adaptive_avg_pool", where=reads_convolution))),
    Pattern(
        "AvgPoolPattern",
        match=chain(op("avg_pool", where=reads_convolution)),
        make=FusedPool,
        qdq_points=INPUT_AND_OUTPUT,
    ),
    ConcatPattern(match=chain(op("cat", where=reads_convolution)), qdq_points=INPUT_AND_OUTPUT),
    MHA_IN_PROJECTION,
    GATED_LINEAR,
    LINEAR_RELU,
    LINEAR_ONLY,
    *(
        without_points(pattern, "it has no integer kernel that is faster")
        for pattern in (CONV_TRANSPOSE, ATTENTION, ATTENTION_SPELLED_OUT, LAYER_NORM, RMS_NORM, RMS_NORM_SPELLED_OUT)
    ),
    GROUP_NORM,
    EMBEDDING,
)


def pair_safe(spec: QuantizationSpec, facts: OperationFacts) -> QuantizationSpec:
    """Widen the range of int8 weights so that sums of two products fit into 16 bits, which CPUs without VNNI need.

    Depthwise and weight-only kernels do not add in pairs and keep the full range.
    """
    if spec.dtype != torch.int8 or facts.is_depthwise or facts.is_weight_only:
        return spec
    if spec.qscheme == QuantizationScheme.ASYMMETRIC:
        return spec
    return spec.replace(range_calculator_cls="pair_safe", qscheme=QuantizationScheme.SYMMETRIC_WITH_CLIPPING)


NARROW_WEIGHTS_AS_INT8 = RewriteRule(
    "narrow_weights_as_int8",
    "integer kernels take 8-bit weights: narrower weights are stored packed, and cast when the file is loaded",
)
REWRITES = (
    RewriteRule(
        "sum_before_layer_norm",
        "ONNX Runtime fuses an Add before a layer norm into SkipLayerNormalization, whose CPU kernel is slower than "
        "the two; it does not fuse a Sum",
    ),
    RewriteRule(
        "activations_of_codes",
        "ONNX Runtime gives each reader of a quantized tensor its own DequantizeLinear, and then does not fuse the "
        "operations of SiLU or GELU: one operator takes half the time",
    ),
    RewriteRule(
        "gelu_halved_last",
        "a GELU that multiplies by 0.5 last is fused into one kernel with the bias; the order of torch runs in five "
        "kernels",
    ),
    RewriteRule(
        "exp_activations",
        "ONNX Runtime's kernels for Elu and for the Softplus in Mish compute one value at a time, that for Exp many",
    ),
    RewriteRule(
        "quantizers_before_moves",
        "ONNX Runtime pads floats; with channels last, as between int8 convolutions, its kernel for a nearest Resize "
        "takes ten times the time of copies",
    ),
    NARROW_WEIGHTS_AS_INT8,
    RewriteRule(
        "unpack_when_loaded",
        "int8 weights of a float product are written as Cast and Mul, which are computed once when the file is loaded; "
        "a DequantizeLinear runs in each call",
    ),
    RewriteRule(
        "float_weights_stay",
        "ONNX Runtime quantizes a float weight between integer tensors itself, with one scale, unless its input has "
        "per-channel scales",
    ),
    RewriteRule(
        "keep_pools_apart",
        "ONNX Runtime moves a quantizer after a float pool before the pool, and integer pools are slow unless an "
        "integer kernel precedes them; a Max of one tensor prevents the move",
    ),
    RewriteRule(
        "softmax_in_float",
        "ONNX Runtime 1.31 fuses a Softmax between codes into QLinearSoftmax, whose codes wrap around instead of "
        "saturating if the scale of the output is small, and which is slower than the float kernel",
    ),
    RewriteRule(
        "softmax_of_finite",
        "torch replaces NaN in the probabilities of an attention, which occur in rows without any key; if no row "
        "of the mask is all -inf, these two passes over the data are not needed",
    ),
)

# The shipped times by kind of CPU. No ARM CPU was measured, so that every layer runs in int8 that can.
KERNEL_TABLES: dict[str, tuple[str, ...]] = {
    "vnni": ("onnxruntime-vnni-amd", "onnxruntime-vnni-intel"),
    "avx2": ("onnxruntime-avx2",),
    "arm": (),
}


@cache
def onnxruntime_target(cpu: str = "auto") -> Target:
    """Build the ONNX Runtime target for a CPU.

    Args:
        cpu: "vnni" uses all 8 bits of the weights; "avx2" keeps sums of two products within 16 bits; "arm" uses all 8
            bits: ONNX Runtime multiplies u8 x s8 on ARM by instructions that sum four products in 32 bits (dotprod);
            "auto" chooses for this machine.
    """
    chosen = instruction_set(cpu)
    return Target(
        name="onnxruntime",
        summary="ONNX Runtime on CPUs: u8 activations, s8 weights, int32 biases",
        patterns=PATTERNS,
        # The head stays a linear layer: its integer kernel needs no 1x1 convolution.
        conversions=tuple(conversion for conversion in CONVERSIONS if conversion is not head_to_convolution),
        activation=UINT8_ASYMMETRIC,
        weight=INT8_PER_CHANNEL,
        table=INT8_PER_CHANNEL,
        accepts=(
            Accepted("activation", (torch.uint8,), granularities=("per_tensor",), dynamic=False),
            Accepted("weight", (torch.int8,), granularities=("per_tensor", "per_channel")),
            Accepted(
                "weight",
                MATMUL_NBITS_DTYPES,
                granularities=("per_block", "per_channel"),
                block_sizes=BLOCK_SIZES,
                kinds=("linear",),
            ),
            Accepted(
                "weight",
                CAST_TO_INT8_DTYPES,
                schemes=SYMMETRIC,
                granularities=("per_channel",),
                kinds=("conv", "linear"),
            ),
            Accepted(
                "weight",
                (INT4,),
                schemes=SYMMETRIC,
                granularities=("per_block",),
                block_sizes=BLOCK_SIZES,
                kinds=("embedding",),
            ),
        ),
        adapt_weight=pair_safe if chosen == "avx2" else None,
        rules=(weight_only_outside_linear, small_embedding_table),
        same_scale_kinds=SAME_SCALE_KINDS,
        concat_kinds=frozenset(("cat",)),
        bias="int32",
        rewrites=REWRITES,
        dequantizes_weights_on_load=True,
        runtime="onnxruntime",
        kernel_tables=KERNEL_TABLES[chosen],
        is_placed_by_speed=True,
        options={"cpu": chosen},
    )
