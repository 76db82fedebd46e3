"""TensorRT: symmetric int8 with per-channel weights, Q/DQ on the inputs of fused groups, the rest float.

Rules R16 to R19 keep Q/DQ away from what has no fast kernel. A convolution that feeds a layer norm writes int8 (R20).
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
from scalepoint.spec import PerChannelGranularity, PerTokenBlockGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.rules import weights_alone
from scalepoint.targets.target import Accepted, OperationFacts, Target


def feeds_layer_norm(node: fx.Node, nodes: Nodes) -> str | None:
    """All readers, through batch norm and moves, are layer norms."""
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
    chain(op("conv", where=feeds_layer_norm), optional(BATCH_NORM)),
    FusedConvBN,
    (Point.INPUT, Point.OUTPUT),
)
POOL_BEFORE_NORM = Pattern(  # int8 in would need int8 out (R13), which the norm does not want (R20)
    "PoolBeforeLayerNormPattern", chain(op("pool", "adaptive_avg_pool", where=feeds_layer_norm)), FusedPool
)
TENSORRT_PATTERNS = (CONV_BEFORE_NORM, POOL_BEFORE_NORM, *BASE_PATTERNS)

_SYMMETRIC = (QuantizationScheme.SYMMETRIC, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
_SMALL = 16
_LONGEST_INT8_ATTENTION = 512
_LARGEST_FP8_KERNEL = 32


def small_matmul(facts: OperationFacts) -> str | None:
    """R16: no tensor cores for K < 16 or N < 16."""
    if facts.kind not in ("linear", "head") or not facts.weight_shape:
        return None
    n, k = facts.weight_shape[:2]
    if n < _SMALL or k < _SMALL:
        return f"a {k} x {n} matrix product has no int8 kernel: both sides need {_SMALL} (rule R16)"
    return None


def odd_convolution(facts: OperationFacts) -> str | None:
    """R17: which convolutions with few channels have an int8 kernel."""
    if facts.kind != "conv" or _is_fp8(facts) or min(facts.weight_shape[:2], default=_SMALL) >= _SMALL:
        return None
    out, per_group = facts.weight_shape[:2]
    if facts.groups == 1:
        wide = facts.is_first or max(out, per_group) >= _SMALL
        fits = (out % 8 == 0 or per_group % 8 == 0) and wide and len(set(facts.kernel)) == 1
    else:
        fits = out % 8 == 0 and all(size >= 3 for size in facts.kernel)
    if fits:
        return None
    return f"no int8 kernel for a convolution of {per_group} -> {out} channels in {facts.groups} groups (rule R17)"


def _is_fp8(facts: OperationFacts) -> bool:
    return facts.activation is not None and facts.activation.dtype == torch.float8_e4m3fn


def odd_fp8_convolution(facts: OperationFacts) -> str | None:
    """R17: fp8 convolutions have more than 16 channels on both sides, small kernels and no groups."""
    if facts.kind != "conv" or not _is_fp8(facts) or not facts.weight_shape:
        return None
    few = min(facts.weight_shape[:2]) <= _SMALL
    if not few and facts.groups == 1 and prod(facts.kernel) <= _LARGEST_FP8_KERNEL:
        return None
    shape = "x".join(map(str, facts.weight_shape))
    return f"no fp8 kernel for a convolution with a {shape} weight in {facts.groups} groups (rule R17)"


def no_float8_pool(facts: OperationFacts) -> str | None:
    """fp8 and fp4 are for convolutions, matrix products and residual adds."""
    if "pool" not in facts.kind or facts.activation is None or facts.activation.dtype == torch.int8:
        return None
    return f"no {dtype_name(facts.activation.dtype)} kernel for pooling"


def blocks_are_for_products(facts: OperationFacts) -> str | None:
    """Block formats (MXFP8, NVFP4) run in matrix products with stored weights alone."""
    if facts.activation is None or facts.kind in ("linear", "attention"):
        return None
    if not isinstance(facts.activation.granularity, PerTokenBlockGranularity):
        return None
    return f"{dtype_name(facts.activation.dtype)} in blocks is for matrix products (rule R23)"


def attention_without_kernel(facts: OperationFacts) -> str | None:
    """R18, R19: which attention is fused; products that are not fused are faster in float than between Q/DQ."""
    if facts.kind != "attention" or facts.activation is None:
        return None
    if facts.activation.dtype != torch.int8:
        return "fp8 attention is one kernel only with Q/DQ inside it, on the softmax (rule R19)"
    if facts.is_masked:
        return "no int8 kernel for attention with a mask that is computed (rule R18)"
    if facts.tokens > _LONGEST_INT8_ATTENTION:
        return (
            f"no int8 kernel for attention over {facts.tokens} tokens, more than {_LONGEST_INT8_ATTENTION} (rule R18)"
        )
    return None


TENSORRT = Target(
    name="tensorrt",
    summary="NVIDIA GPUs: symmetric int8, fp8 and block formats; Q/DQ outside the groups that TensorRT fuses",
    patterns=TENSORRT_PATTERNS,
    activation=QuantizationSpec(qscheme="symmetric", qparam_calculator_cls="global_minmax"),
    weight=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    accepts=(
        Accepted("activation", (torch.int8,), _SYMMETRIC, ("per_tensor",), dynamic=False),
        Accepted("activation", (torch.float8_e4m3fn,), (), ("per_tensor",), dynamic=False),
        Accepted("activation", (torch.float8_e4m3fn,), (), ("per_token_block",), (32,), ("linear",)),
        Accepted("activation", (torch.float4_e2m1fn_x2,), (), ("per_token_block",), (16,), ("linear",)),
        Accepted("weight", (torch.int8,), _SYMMETRIC, ("per_tensor", "per_channel")),
        Accepted("weight", (torch.float8_e4m3fn,), (), ("per_tensor", "per_channel")),
        Accepted("weight", (torch.float8_e4m3fn,), (), ("per_block",), (32,), ("linear",)),
        Accepted("weight", (to_dtype("int4"),), _SYMMETRIC, ("per_block",), (64, 128), ("linear",)),
        Accepted("weight", (torch.float4_e2m1fn_x2,), (), ("per_block",), (16,), ("linear",)),
    ),
    rules=(
        weights_alone,
        blocks_are_for_products,
        small_matmul,
        odd_convolution,
        odd_fp8_convolution,
        no_float8_pool,
        attention_without_kernel,
    ),
    float_if_readers_are_float=True,
    domains=("trt",),
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
)
