"""ExecuTorch with XNNPACK, on phones and other ARM or x86 CPUs: signed int8, one scale a tensor, s8 weights a channel.

Its partitioner takes an operation for int8 when each operand comes from a DequantizeLinear of its own and its result,
after a relu at most, goes into one QuantizeLinear. So inputs and outputs of what follows convolutions are quantized.
Other linear layers take their rows in int8 with a scale that is found anew for each (dynamic): norms, attention and
residuals of a transformer stay float, and nothing is rounded on the way out. 4-bit weights run so alone. Its patch
embedding stands between float tensors, and is float unless constant scales are asked for.
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
    FusedConvBNReLU,
    FusedConvTransposeBNReLU,
    FusedLinear,
    FusedLinearReLU,
    FusedPool,
)
from scalepoint.patterns.language import Nodes, without_points
from scalepoint.spec import PerChannelGranularity, PerTokenGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import COPIES, from_convolution, joins_convolutions, reads_convolution
from scalepoint.targets.rules import small_tables
from scalepoint.targets.target import Accepted, OperationFacts, Target

FOLDED = op("activation", "relu", "relu6")
RELU = op("activation", "relu")
BOTH = (Point.INPUT, Point.OUTPUT)
INT8, INT4 = to_dtype("int8"), to_dtype("int4")
SYMMETRIC = (QuantizationScheme.SYMMETRIC, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
GROUPS = (32, 64, 128, 256)


def follows_convolution(linear: fx.Node, nodes: Nodes) -> str | None:
    """What it reads is int8 already: a convolution's, through pools and moves."""
    source = linear.all_input_nodes[0] if linear.all_input_nodes else linear
    while get_kind(source) in ("adaptive_avg_pool", "mean", *COPIES) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return None if from_convolution(source) else "it does not read a convolution"


def embeds_patches(conv: fx.Node, nodes: Nodes) -> str | None:
    """The one convolution of a network with layer norms: what it gives is read in float."""
    other_convolutions = (node for node in conv.graph.nodes if node is not conv and get_kind(node) == "conv")
    is_alone = next(other_convolutions, None) is None and any(
        get_kind(node) == "layer_norm" for node in conv.graph.nodes
    )
    return None if is_alone else "it is not the one convolution of a transformer"


PATTERNS = (
    Pattern("PatchPattern", chain(op("conv", where=embeds_patches), optional(BATCH_NORM)), FusedConvBN, BOTH),
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED), make=FusedConvBNReLU, qdq_points=BOTH),
    ConvBNPattern(match=chain(CONV, optional(BATCH_NORM)), make=FusedConvBN, qdq_points=BOTH),
    ConvTransposeBNReLUPattern(
        match=chain(op("conv_transpose"), optional(BATCH_NORM), optional(FOLDED)),
        make=FusedConvTransposeBNReLU,
        qdq_points=BOTH,
    ),
    Pattern(
        "AddReLUPattern",
        chain(op("add", where=joins_convolutions), optional(RELU)),
        FusedAdd,
        (Point.INPUT, Point.RESIDUAL_INPUT, Point.OUTPUT),
    ),
    AdaptiveAvgPoolPattern(
        match=chain(op("adaptive_avg_pool", where=reads_convolution)), make=FusedPool, qdq_points=BOTH
    ),
    Pattern("HeadReLUPattern", chain(op("linear", where=follows_convolution), FOLDED), FusedLinearReLU, BOTH),
    HeadPattern(match=chain(op("linear", where=follows_convolution)), make=FusedLinear, qdq_points=BOTH),
    LinearReLUPattern(match=chain(LINEAR, FOLDED), make=FusedLinearReLU, qdq_points=BOTH),
    LinearPattern(match=chain(LINEAR), make=FusedLinear, qdq_points=BOTH),
    without_points(CONCAT, "XNNPACK joins int8 tensors of one scale alone"),
    *(
        without_points(pattern, "XNNPACK has no int8 kernel for it")
        for pattern in (ATTENTION, ATTENTION_SPELLED_OUT, LAYER_NORM, RMS_NORM, RMS_NORM_SPELLED_OUT)
    ),
    GROUP_NORM,
    EMBEDDING,
)
DYNAMIC = QuantizationSpec(
    dtype="int8", qscheme="asymmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"
)


def no_third_axis(facts: OperationFacts) -> str | None:
    """Convolutions over three axes: neither XNNPACK nor ExecuTorch's own kernels have them."""
    if facts.kind in ("conv", "conv_transpose") and len(facts.weight_shape) > 4:
        return "a convolution over three axes, in any precision: convolve over one or two, or deploy for 'onnxruntime'"
    return None


def constant_scales_by_four_bits(facts: OperationFacts) -> str | None:
    """4-bit weights multiply rows that have their scales found anew, nothing else."""
    if facts.weight is None or facts.activation is None or facts.weight.dtype != INT4 or facts.kind != "linear":
        return None
    if _is_by_rows(facts.activation):
        return None
    return (
        "4-bit weights with activations of a constant scale: ask for dynamic, asymmetric, per_token int8, or for 8 bits"
    )


def floats_by_narrow_weights(facts: OperationFacts) -> str | None:
    """No kernel multiplies floats by narrow weights: its inputs are int8 too, with a scale for each row (dynamic)."""
    if facts.is_weight_only and facts.kind != "embedding":
        return f"no kernel for a {facts.kind} with narrow weights and float activations: leave those to the target"
    return None


def patches_by_rows(facts: OperationFacts) -> str | None:
    """A patch embedding has float tensors on both sides: rounded to int8 twice, it costs accuracy for few products."""
    if facts.pattern == "PatchPattern" and _is_by_rows(facts.activation):
        return "the one convolution of a transformer, between float tensors: ask for constant scales to have it in int8"
    return None


def _is_by_rows(spec: QuantizationSpec | None) -> bool:
    return spec is not None and isinstance(spec.granularity, PerTokenGranularity)


def transposed_in_groups(facts: OperationFacts) -> str | None:
    """Transposed convolutions have a scale a channel only without groups."""
    if facts.kind == "conv_transpose" and facts.groups > 1:
        return f"XNNPACK has no scale a channel for a transposed convolution in {facts.groups} groups"
    return None


EXECUTORCH = Target(
    name="executorch",
    summary="ExecuTorch with XNNPACK on phones and CPUs: int8, dynamic int8 linear layers, int4 groups",
    patterns=PATTERNS,
    conversions=tuple(conversion for conversion in CONVERSIONS if conversion is not head_to_convolution),
    activation=QuantizationSpec(dtype="int8", qscheme="asymmetric", qparam_calculator_cls="global_minmax"),
    activations=dict.fromkeys(("LinearPattern", "LinearReLUPattern", "PatchPattern"), DYNAMIC),
    weight=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    table=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    accepts=(
        Accepted("activation", (INT8,), (), ("per_tensor",), dynamic=False),
        Accepted("activation", (INT8,), (QuantizationScheme.ASYMMETRIC,), ("per_token",), (), ("linear",)),
        Accepted("weight", (INT8,), SYMMETRIC, ("per_channel",)),
        Accepted("weight", (INT4,), SYMMETRIC, ("per_block", "per_channel"), GROUPS, ("linear",)),
    ),
    refuses=(no_third_axis, constant_scales_by_four_bits),
    rules=(floats_by_narrow_weights, patches_by_rows, transposed_in_groups, small_tables),
    same_scale_kinds=COPIES,
    block_scale_dtypes=(torch.bfloat16,),
    bias="int32",
    fixed_shapes_reason="memory is planned for the largest size of every axis, which only the batch has a bound for",
    format="executorch",
    runtime="executorch",
)
