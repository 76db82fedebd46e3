"""ONNX Runtime on a CPU: u8 activations, s8 weights, Q/DQ on inputs and outputs of what runs in QLinear kernels.

Convolutional parts are quantized throughout (inputs, outputs, residual adds, pools), so that integers flow from kernel
to kernel. Of transformers the linear layers are: their outputs, norms, GELU, softmax, attention and residuals stay
float, where int8 wins nothing.
"""

from functools import cache

import torch
from torch import fx

from scalepoint.graph.kinds import VALUE_PRESERVING
from scalepoint.patterns import (
    AdaptiveAvgPoolPattern,
    ConcatPattern,
    ConvBNPattern,
    ConvBNReLUPattern,
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
from scalepoint.patterns.fused import FusedAdd, FusedConcat, FusedConvBN, FusedConvBNReLU, FusedPool
from scalepoint.patterns.language import Nodes, without_points
from scalepoint.spec import PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.support.cpu import instruction_set
from scalepoint.targets.rules import small_tables, weights_alone
from scalepoint.targets.target import Accepted, OperationFacts, RewriteRule, Target

FOLDED = op("activation", "relu", "relu6")
COPIES = frozenset(("max_pool", "identity", "dropout", "pad", "constant_pad_nd", *VALUE_PRESERVING))


def joins_convolutions(add: fx.Node, nodes: Nodes) -> str | None:
    """Both operands are tensors, and one comes from a convolution: then integers flow through."""
    tensors = add.all_input_nodes
    if len(tensors) != 2:
        return "does not join two tensors"
    return None if any(from_convolution(each) for each in tensors) else "no convolution gives one of its operands"


def from_convolution(node: fx.Node) -> bool:
    """Through norms, activations and moves a convolution, or an add that joins one."""
    origin = _origin(node)
    if get_kind(origin) == "add":
        return any(get_kind(_origin(each)) == "conv" for each in origin.all_input_nodes)
    return get_kind(origin) == "conv"


def _origin(node: fx.Node) -> fx.Node:
    while get_kind(node) in ("batch_norm", "relu", "relu6", *COPIES) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def reads_convolution(node: fx.Node, nodes: Nodes) -> str | None:
    sources = node.all_input_nodes
    return None if sources and all(map(from_convolution, sources)) else "not all of its inputs come from convolutions"


NARROW = tuple(map(to_dtype, ("int4", "uint4", "int2", "int8")))  # weight-only: MatMulNBits
PACKED = tuple(map(to_dtype, ("int4", "int2")))  # in 8-bit kernels
BLOCKS = (16, 32, 64, 128, 256)
SYMMETRIC = (QuantizationScheme.SYMMETRIC, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
BOTH = (Point.INPUT, Point.OUTPUT)
PATTERNS = (
    ConvBNReLUPattern(match=chain(CONV, optional(BATCH_NORM), FOLDED), make=FusedConvBNReLU, qdq_points=BOTH),
    ConvBNPattern(match=chain(CONV, optional(BATCH_NORM)), make=FusedConvBN, qdq_points=BOTH),
    Pattern(
        "AddReLUPattern",
        chain(op("add", where=joins_convolutions), optional(FOLDED)),
        FusedAdd,
        (Point.INPUT, Point.RESIDUAL_INPUT, Point.OUTPUT),
    ),
    AdaptiveAvgPoolPattern(
        match=chain(op("adaptive_avg_pool", where=reads_convolution)), make=FusedPool, qdq_points=BOTH
    ),
    Pattern("AvgPoolPattern", chain(op("avg_pool", where=reads_convolution)), FusedPool, BOTH),
    ConcatPattern(match=chain(op("cat", where=reads_convolution)), make=FusedConcat, qdq_points=BOTH),
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
    """int8 weights whose products cannot saturate; depthwise and weight-only kernels do not add in pairs."""
    if spec.dtype != torch.int8 or facts.is_depthwise or facts.is_weight_only:
        return spec
    if spec.qscheme == QuantizationScheme.ASYMMETRIC:
        return spec
    return spec.replace(range_calculator_cls="pair_safe", qscheme=QuantizationScheme.SYMMETRIC_WITH_CLIPPING)


WIDENED = RewriteRule(
    "narrow_weights_as_int8",
    "products of integers have kernels for 8 bits: weights of fewer are stored as they are, and cast when the file is "
    "loaded",
)
SPELLINGS = (
    RewriteRule(
        "sum_before_layer_norm",
        "an Add before a layer norm is fused into SkipLayerNormalization, whose CPU kernel is slower than both; a Sum "
        "of two is not",
    ),
    RewriteRule(
        "gelu_halved_last",
        "a GELU is fused into one kernel, with the bias before it, where the half comes last; as torch writes it, it "
        "runs in five",
    ),
    WIDENED,
    RewriteRule(
        "unpack_when_loaded",
        "int8 weights of a float product are written as Cast and Mul, which are computed once, as the file is loaded; "
        "a DequantizeLinear runs at each call",
    ),
    RewriteRule(
        "float_weights_stay",
        "a float weight between integers is quantized by ONNX Runtime itself, with one scale for all of it, unless its "
        "input has a scale a channel",
    ),
    RewriteRule(
        "pools_before_quantizers",
        "a quantizer behind a pool of floats is moved before it, and pools of codes that come from outside an integer "
        "kernel are slow; a Max of one tensor holds it back",
    ),
    RewriteRule(
        "softmax_of_finite",
        "torch checks all probabilities of an attention for NaN, which rows without any key give: two passes that find "
        "nothing where the mask has no infinities",
    ),
)

MEASURED = {"vnni": ("onnxruntime-vnni-amd", "onnxruntime-vnni-intel"), "avx2": ("onnxruntime-avx2",)}


@cache
def onnxruntime_target(cpu: str = "auto") -> Target:
    """For a CPU: "vnni" uses all 8 bits of the weights, "avx2" the pair-safe scale, "auto" looks at this machine."""
    chosen = instruction_set(cpu)
    return Target(
        name="onnxruntime",
        summary="ONNX Runtime on CPUs: u8 activations, s8 weights, int32 biases",
        patterns=PATTERNS,
        conversions=tuple(conversion for conversion in CONVERSIONS if conversion is not head_to_convolution),
        activation=QuantizationSpec(dtype="uint8", qscheme="asymmetric", qparam_calculator_cls="global_minmax"),
        weight=QuantizationSpec(
            qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
        ),
        table=QuantizationSpec(
            qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
        ),
        accepts=(
            Accepted("activation", (torch.uint8,), (), ("per_tensor",), dynamic=False),
            Accepted("weight", (torch.int8,), (), ("per_tensor", "per_channel")),
            Accepted(
                "weight",
                NARROW,
                (),
                ("per_block", "per_channel"),
                BLOCKS,
                ("linear",),
            ),
            Accepted("weight", PACKED, SYMMETRIC, ("per_channel",), (), ("conv", "linear")),
            Accepted("weight", PACKED[:1], SYMMETRIC, ("per_block",), BLOCKS, ("embedding",)),
        ),
        adapt_weight=None if chosen == "vnni" else pair_safe,
        rules=(weights_alone, small_tables),
        same_scale_kinds=COPIES,
        bias="int32",
        rewrites=SPELLINGS,
        dequantizes_weights_on_load=True,
        runtime="onnxruntime",
        kernel_tables=MEASURED[chosen],
        options={"cpu": chosen},
    )
