"""TensorRT: symmetric int8 with per-channel weights, Q/DQ on the inputs of fused groups, the rest float.

Rules R16 to R19 (see `scalepoint check`) leave operations without a fast int8 kernel in float. A convolution before a
layer norm gets a quantized output (R20).
"""

from math import prod

import torch
from torch import fx

from scalepoint.graph.kinds import VALUE_PRESERVING
from scalepoint.numerics import dtype_name
from scalepoint.patterns import BASE_PATTERNS, Pattern, Point, chain, get_kind, op, optional
from scalepoint.patterns.base import BATCH_NORM
from scalepoint.patterns.fused import FusedConvBN, FusedPool
from scalepoint.patterns.language import Nodes
from scalepoint.spec import PerTokenBlockGranularity, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.shared import INT8_PER_CHANNEL, SYMMETRIC, weight_only_outside_linear
from scalepoint.targets.target import Accepted, OperationFacts, Target


def feeds_layer_norm(node: fx.Node, nodes: Nodes) -> str | None:
    """Match an operation if all its readers, through batch norms and moves, are layer norms (a `Condition`)."""
    pending = list(node.users)
    while pending:
        reader = pending.pop()
        if get_kind(reader) in ("batch_norm", *VALUE_PRESERVING):
            pending += reader.users
        elif get_kind(reader) != "layer_norm":
            return f"also read by {reader.target}"
    return None if node.users else "read by nothing"


CONV_BEFORE_NORM = Pattern(
    "ConvBeforeLayerNormPattern",
    match=chain(op("conv", where=feeds_layer_norm), optional(BATCH_NORM)),
    make=FusedConvBN,
    qdq_points=(Point.INPUT, Point.OUTPUT),
)
# No points: an int8 input needs an int8 output (R13), which a layer norm must not read.
POOL_BEFORE_NORM = Pattern(
    "PoolBeforeLayerNormPattern", match=chain(op("pool", "adaptive_avg_pool", where=feeds_layer_norm)), make=FusedPool
)
TENSORRT_PATTERNS = (CONV_BEFORE_NORM, POOL_BEFORE_NORM, *BASE_PATTERNS)

_MIN_TENSOR_CORE_SIZE = 16
_MAX_INT8_ATTENTION_TOKENS = 512
_MAX_FP8_KERNEL_TAPS = 32


def small_matmul(facts: OperationFacts) -> str | None:
    """R16: int8 tensor cores need K >= 16 and N >= 16."""
    if facts.kind not in ("linear", "head") or not facts.weight_shape:
        return None
    n, k = facts.weight_shape[:2]
    if n < _MIN_TENSOR_CORE_SIZE or k < _MIN_TENSOR_CORE_SIZE:
        return f"a {k} x {n} matrix product has no int8 kernel: both sides need {_MIN_TENSOR_CORE_SIZE} (rule R16)"
    return None


def convolution_without_int8_kernel(facts: OperationFacts) -> str | None:
    """R17: only some convolutions with few channels have an int8 kernel."""
    if facts.kind != "conv" or _is_fp8(facts) or not facts.weight_shape:
        return None
    out, per_group = facts.weight_shape[:2]
    if min(out, per_group) >= _MIN_TENSOR_CORE_SIZE:
        return None
    if facts.groups == 1:
        is_wide = facts.is_first or max(out, per_group) >= _MIN_TENSOR_CORE_SIZE
        has_square_kernel = len(set(facts.kernel)) == 1
        has_kernel = (out % 8 == 0 or per_group % 8 == 0) and is_wide and has_square_kernel
    else:
        has_kernel = out % 8 == 0 and all(size >= 3 for size in facts.kernel)
    if has_kernel:
        return None
    return f"no int8 kernel for a convolution of {per_group} -> {out} channels in {facts.groups} groups (rule R17)"


def _is_fp8(facts: OperationFacts) -> bool:
    return facts.activation is not None and facts.activation.dtype == torch.float8_e4m3fn


def convolution_without_fp8_kernel(facts: OperationFacts) -> str | None:
    """R17: fp8 convolutions have more than 16 channels on both sides, small kernels and no groups."""
    if facts.kind != "conv" or not _is_fp8(facts) or not facts.weight_shape:
        return None
    has_few_channels = min(facts.weight_shape[:2]) <= _MIN_TENSOR_CORE_SIZE
    if not has_few_channels and facts.groups == 1 and prod(facts.kernel) <= _MAX_FP8_KERNEL_TAPS:
        return None
    shape = "x".join(map(str, facts.weight_shape))
    return f"no fp8 kernel for a convolution with a {shape} weight in {facts.groups} groups (rule R17)"


def pool_without_float_kernel(facts: OperationFacts) -> str | None:
    """Pools have no fp8 and fp4 kernels; convolutions, matrix products and residual adds have."""
    if "pool" not in facts.kind or facts.activation is None or facts.activation.dtype == torch.int8:
        return None
    return f"no {dtype_name(facts.activation.dtype)} kernel for pooling"


def block_format_outside_products(facts: OperationFacts) -> str | None:
    """Block formats (MXFP8, NVFP4) run only in matrix products with stored weights, and in attention."""
    if facts.activation is None or facts.kind in ("linear", "attention"):
        return None
    if not isinstance(facts.activation.granularity, PerTokenBlockGranularity):
        return None
    return f"{dtype_name(facts.activation.dtype)} in blocks is for matrix products (rule R23)"


def attention_without_kernel(facts: OperationFacts) -> str | None:
    """R18, R19: attention that is not fused into one kernel is faster in float than between Q/DQ."""
    if facts.kind != "attention" or facts.activation is None:
        return None
    if facts.activation.dtype != torch.int8:
        return "fp8 attention is one kernel only with Q/DQ inside it, on the softmax (rule R19)"
    if facts.is_masked:
        return "no int8 kernel for attention with a mask that is computed (rule R18)"
    limit = _MAX_INT8_ATTENTION_TOKENS
    if facts.tokens > limit:
        return f"no int8 kernel for attention over {facts.tokens} tokens, more than {limit} (rule R18)"
    return None


TENSORRT = Target(
    name="tensorrt",
    summary="NVIDIA GPUs: symmetric int8, fp8 and block formats; Q/DQ outside the groups that TensorRT fuses",
    patterns=TENSORRT_PATTERNS,
    activation=QuantizationSpec(qscheme="symmetric", qparam_calculator_cls="global_minmax"),
    weight=INT8_PER_CHANNEL,
    accepts=(
        Accepted("activation", (torch.int8,), schemes=SYMMETRIC, granularities=("per_tensor",), dynamic=False),
        Accepted("activation", (torch.float8_e4m3fn,), granularities=("per_tensor",), dynamic=False),
        Accepted(
            "activation",
            (torch.float8_e4m3fn,),
            granularities=("per_token_block",),
            block_sizes=(32,),
            kinds=("linear",),
        ),
        Accepted(
            "activation",
            (torch.float4_e2m1fn_x2,),
            granularities=("per_token_block",),
            block_sizes=(16,),
            kinds=("linear",),
        ),
        Accepted("weight", (torch.int8,), schemes=SYMMETRIC, granularities=("per_tensor", "per_channel")),
        Accepted("weight", (torch.float8_e4m3fn,), granularities=("per_tensor", "per_channel")),
        Accepted("weight", (torch.float8_e4m3fn,), granularities=("per_block",), block_sizes=(32,), kinds=("linear",)),
        Accepted(
            "weight",
            (to_dtype("int4"),),
            schemes=SYMMETRIC,
            granularities=("per_block",),
            block_sizes=(64, 128),
            kinds=("linear",),
        ),
        Accepted(
            "weight", (torch.float4_e2m1fn_x2,), granularities=("per_block",), block_sizes=(16,), kinds=("linear",)
        ),
    ),
    rules=(
        weight_only_outside_linear,
        block_format_outside_products,
        small_matmul,
        convolution_without_int8_kernel,
        convolution_without_fp8_kernel,
        pool_without_float_kernel,
        attention_without_kernel,
    ),
    float_if_readers_are_float=True,
    domains=("trt",),
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
)
