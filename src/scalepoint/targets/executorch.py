"""ExecuTorch with XNNPACK on phones and CPUs (ARM, x86): int8 activations per tensor, int8 weights per channel.

The XNNPACK partitioner runs an operation in int8 if each operand comes from its own DequantizeLinear and the result
goes into one QuantizeLinear, with at most a relu between. So convolutions, and layers that read them, have quantized
inputs and outputs. Other linear layers have dynamic int8 inputs, with one scale per row that is computed in each call,
and float outputs: norms, attention and residuals of a transformer stay float. 4-bit weights run only in such layers.
The patch embedding of a transformer is between float tensors, so it stays float unless static scales are configured.
"""

import torch
from torch import fx

from scalepoint.patterns import (
    AdaptiveAvgPoolPattern,
    ConvBNPattern,
    ConvBNReLUPattern,
    ConvTransposeBNReLUPattern,
    HeadPattern,
    LinearPattern,
    LinearReLUPattern,
    Pattern,
    Point,
    chain,
    get_kind,
    op,
    optional,
)
from scalepoint.patterns.base import (
    ATTENTION,
    ATTENTION_SPELLED_OUT,
    BATCH_NORM,
    CONCAT,
    CONV,
    EMBEDDING,
    GROUP_NORM,
    LAYER_NORM,
    LINEAR,
    RMS_NORM,
    RMS_NORM_SPELLED_OUT,
)
from scalepoint.patterns.conversions import CONVERSIONS, head_to_convolution
from scalepoint.patterns.fused import (
    FusedAdd,
    FusedConvBN,
    FusedLinear,
    FusedLinearReLU,
)
from scalepoint.patterns.language import Nodes, without_points
from scalepoint.spec import PerTokenGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.shared import (
    FOLDED_ACTIVATION,
    INPUT_AND_OUTPUT,
    INT8_PER_CHANNEL,
    SAME_SCALE_KINDS,
    SYMMETRIC,
    comes_from_convolution,
    joins_convolutions,
    reads_convolution,
    small_embedding_table,
)
from scalepoint.targets.target import Accepted, OperationFacts, Target

RELU = op("activation", "relu")
INT8, INT4 = to_dtype("int8"), to_dtype("int4")
GROUP_SIZES = (32, 64, 128, 256)


# Conditions of patterns: None means that the operation matches, a text says why it does not.


def follows_convolution(linear: fx.Node, nodes: Nodes) -> str | None:
    """Match a linear layer whose input comes from a convolution, through pools and moves: it is int8 already."""
    source = linear.all_input_nodes[0] if linear.all_input_nodes else linear
    while get_kind(source) in ("adaptive_avg_pool", "mean", *SAME_SCALE_KINDS) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return None if comes_from_convolution(source) else "it does not read a convolution"


def embeds_patches(conv: fx.Node, nodes: Nodes) -> str | None:
    """Match the only convolution of a network with layer norms: its output is read in float."""
    kinds = [get_kind(node) for node in conv.graph.nodes]
    is_patch_embedding = kinds.count("conv") == 1 and "layer_norm" in kinds
    return None if is_patch_embedding else "it is not the only convolution of a transformer"


PATTERNS = (
    Pattern(
        "PatchPattern",
        match=chain(op("conv", where=embeds_patches), optional(BATCH_NORM)),
        make=FusedConvBN,
        qdq_points=INPUT_AND_OUTPUT,
    ),
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED_ACTIVATION), qdq_points=INPUT_AND_OUTPUT),
    ConvBNPattern(qdq_points=INPUT_AND_OUTPUT),
    ConvTransposeBNReLUPattern(
        match=chain(op("conv_transpose"), optional(BATCH_NORM), optional(FOLDED_ACTIVATION)),
        qdq_points=INPUT_AND_OUTPUT,
    ),
    Pattern(
        "AddReLUPattern",
        match=chain(op("add", where=joins_convolutions), optional(RELU)),
        make=FusedAdd,
        qdq_points=(Point.INPUT, Point.RESIDUAL_INPUT, Point.OUTPUT),
    ),
    AdaptiveAvgPoolPattern(match=chain(op("adaptive_avg_pool", where=reads_convolution))),
    Pattern(
        "HeadReLUPattern",
        match=chain(op("linear", where=follows_convolution), FOLDED_ACTIVATION),
        make=FusedLinearReLU,
        qdq_points=INPUT_AND_OUTPUT,
    ),
    HeadPattern(match=chain(op("linear", where=follows_convolution)), make=FusedLinear, qdq_points=INPUT_AND_OUTPUT),
    LinearReLUPattern(match=chain(LINEAR, FOLDED_ACTIVATION), qdq_points=INPUT_AND_OUTPUT),
    LinearPattern(qdq_points=INPUT_AND_OUTPUT),
    without_points(CONCAT, "XNNPACK concatenates int8 tensors only if they have one scale"),
    *(
        without_points(pattern, "XNNPACK has no int8 kernel for it")
        for pattern in (ATTENTION, ATTENTION_SPELLED_OUT, LAYER_NORM, RMS_NORM, RMS_NORM_SPELLED_OUT)
    ),
    GROUP_NORM,
    EMBEDDING,
)
DYNAMIC_INT8 = QuantizationSpec(
    dtype="int8", qscheme="asymmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"
)


def convolution_over_three_axes(facts: OperationFacts) -> str | None:
    """Neither XNNPACK nor the kernels of ExecuTorch have 3-d convolutions."""
    if facts.kind in ("conv", "conv_transpose") and len(facts.weight_shape) > 4:
        return "a convolution over three axes, in any precision: use 1-d or 2-d ones, or deploy for 'onnxruntime'"
    return None


def int4_weights_with_static_scales(facts: OperationFacts) -> str | None:
    """4-bit weights need dynamic activations with one scale per row."""
    if facts.weight is None or facts.activation is None or facts.weight.dtype != INT4 or facts.kind != "linear":
        return None
    if _is_per_token(facts.activation):
        return None
    return (
        "4-bit weights with activations of a static scale: use dynamic, asymmetric, per_token int8 activations, or "
        "8-bit weights"
    )


def weight_only_without_kernel(facts: OperationFacts) -> str | None:
    """Layers with integer weights need int8 inputs too: dynamic ones, with one scale per row."""
    if facts.is_weight_only and facts.kind != "embedding":
        return (
            f"no kernel for {facts.kind} with integer weights and float activations: omit the activation config, and "
            "leave those to the target"
        )
    return None


def dynamic_patch_embedding(facts: OperationFacts) -> str | None:
    """A patch embedding is between float tensors: int8 costs accuracy, and it has few of the products."""
    if facts.pattern == "PatchPattern" and _is_per_token(facts.activation):
        return (
            "the only convolution of a transformer, between float tensors: configure static scales to have it in int8"
        )
    return None


def _is_per_token(spec: QuantizationSpec | None) -> bool:
    return spec is not None and isinstance(spec.granularity, PerTokenGranularity)


def grouped_transposed_convolution(facts: OperationFacts) -> str | None:
    """Transposed convolutions have per-channel scales only if they have one group."""
    if facts.kind == "conv_transpose" and facts.groups > 1:
        return f"XNNPACK has no per-channel scales for a transposed convolution with {facts.groups} groups"
    return None


EXECUTORCH = Target(
    name="executorch",
    summary="ExecuTorch with XNNPACK on phones and CPUs: int8, dynamic int8 linear layers, int4 groups",
    patterns=PATTERNS,
    conversions=tuple(conversion for conversion in CONVERSIONS if conversion is not head_to_convolution),
    activation=QuantizationSpec(dtype="int8", qscheme="asymmetric", qparam_calculator_cls="global_minmax"),
    activations=dict.fromkeys(("LinearPattern", "LinearReLUPattern", "PatchPattern"), DYNAMIC_INT8),
    weight=INT8_PER_CHANNEL,
    table=INT8_PER_CHANNEL,
    accepts=(
        Accepted("activation", (INT8,), granularities=("per_tensor",), dynamic=False),
        Accepted(
            "activation",
            (INT8,),
            schemes=(QuantizationScheme.ASYMMETRIC,),
            granularities=("per_token",),
            kinds=("linear",),
        ),
        Accepted("weight", (INT8,), schemes=SYMMETRIC, granularities=("per_channel",)),
        Accepted(
            "weight",
            (INT4,),
            schemes=SYMMETRIC,
            granularities=("per_block", "per_channel"),
            block_sizes=GROUP_SIZES,
            kinds=("linear",),
        ),
    ),
    refuses=(convolution_over_three_axes, int4_weights_with_static_scales),
    rules=(weight_only_without_kernel, dynamic_patch_embedding, grouped_transposed_convolution, small_embedding_table),
    same_scale_kinds=SAME_SCALE_KINDS,
    block_scale_dtypes=(torch.bfloat16,),
    bias="int32",
    fixed_shapes_reason="memory is planned for the largest size of every axis, and only the batch has a bound",
    format="executorch",
    runtime="executorch",
)
