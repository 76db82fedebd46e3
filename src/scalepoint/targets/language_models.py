"""Targets of language models: they are made from a checkpoint's folder, weights first, by `deploy_checkpoint`.

Only linear layers are quantized, at their inputs where activations are asked for; between them everything is float, as
in the kernels of these runtimes. `head` and `table` say what becomes of the largest matrices, which are looked up and
multiplied once a token.
"""

from dataclasses import replace

import torch

from scalepoint.patterns import BASE_PATTERNS, Point
from scalepoint.patterns.fused import FusedAttention, FusedPool
from scalepoint.patterns.language import without_points
from scalepoint.spec import PerBlockGranularity, QuantizationFormulation, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.target import Accepted, Target

WHY = "language runtimes compute it in float"
PATTERNS = tuple(
    without_points(each, WHY) if each.make in (FusedAttention, FusedPool) or Point.OUTPUT in each.qdq_points else each
    for each in BASE_PATTERNS
)
SIGNED = tuple(map(to_dtype, ("int8", "int4", "int3", "int2")))
UNSIGNED = tuple(map(to_dtype, ("uint8", "uint4", "uint3", "uint2")))
FIVE = tuple(map(to_dtype, ("int5", "uint5")))
FLOATS = (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
ZP, MINVAL = QuantizationFormulation.ZP, QuantizationFormulation.MINVAL
TOKENS = Accepted("activation", (torch.int8, torch.uint8, *FLOATS))
CACHED = Accepted("activation", tuple(map(to_dtype, ("int8", "int4", "float8_e4m3fn"))), kinds=("attention",))
BY_CHANNEL = (-1, 1, -1, 1)  # of (batch, heads, tokens, channels): one scale for all tokens
BY_TOKEN = (1, 1, 1, 32)  # blocks of 32 channels


def _block_spec(dtype: str, size: int, scheme: QuantizationScheme = QuantizationScheme.SYMMETRIC) -> QuantizationSpec:
    granularity = PerBlockGranularity(block_size=size)
    return QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity, qparam_calculator_cls="static")


def _cache_specs(block: tuple[int, ...], how: str, scheme: QuantizationScheme) -> dict[str, QuantizationSpec]:
    """Keys and values in 8 and in 4 bits."""
    granularity = PerBlockGranularity(block_size=block)
    return {
        dtype: QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity, qparam_calculator_cls=how)
        for dtype in ("int8", "int4")
    }


def with_cache(target: Target) -> Target:
    """The target with quantizers where attention reads keys and values."""
    points = (Point.KEY_INPUT, Point.VALUE_INPUT)
    patterns = (
        replace(each, qdq_points=points, why_float="") if each.make is FusedAttention else each
        for each in target.patterns
    )
    return replace(target, patterns=tuple(patterns), accepts=(*target.accepts, CACHED))


def _accept_weights(dtypes: tuple[torch.dtype, ...], *granularities: str, sizes: tuple[int, ...] = ()) -> Accepted:
    return Accepted("weight", dtypes, (), granularities, sizes)


_BASE = Target(
    name="compressed-tensors",
    summary="folders for vLLM and transformers: w4a16, w8a8, fp8, nvfp4",
    patterns=PATTERNS,
    activation=QuantizationSpec(dtype="int8", qparam_calculator_cls="dynamic"),
    weight=_block_spec("int4", 128),
    accepts=(TOKENS, _accept_weights((*SIGNED, *UNSIGNED, *FLOATS), "per_block", "per_channel", "per_tensor")),
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
    caches={"fp8": QuantizationSpec(dtype="float8_e4m3fn", qparam_calculator_cls="global_minmax")},
    format="compressed-tensors",
    runtime="transformers",
    is_language=True,
)
GPTQ = replace(
    _BASE,
    name="gptq",
    summary="folders in the layout of GPTQ: int4, int8 (and 2, 3) in groups, no activations",
    accepts=(TOKENS, _accept_weights((*SIGNED, *UNSIGNED), "per_block", "per_channel")),
    caches={},
    format="gptq",
)
AWQ = replace(
    _BASE,
    name="awq",
    summary="folders in the layout of AWQ: 4 bits in groups with zero points, no activations",
    weight=_block_spec("uint4", 128, QuantizationScheme.ASYMMETRIC),
    accepts=(TOKENS, _accept_weights(tuple(map(to_dtype, ("uint4", "int4"))), "per_block")),
    caches={},
    format="awq",
)
GGUF = replace(
    _BASE,
    name="gguf",
    summary="one file for llama.cpp: weights of 2 to 8 bits in blocks",
    weight=_block_spec("int4", 32),
    accepts=(
        TOKENS,
        # Q2_K, Q4_1, Q4_K, Q5_1 and Q5_K hold a minimum; the format refuses it for more than 5 bits
        replace(_accept_weights((*SIGNED, *UNSIGNED, *FIVE), "per_block", "per_channel"), formulations=(ZP, MINVAL)),
    ),
    table=_block_spec("int8", 32),
    head=_block_spec("int8", 32),
    caches=_cache_specs(BY_TOKEN, "dynamic", QuantizationScheme.SYMMETRIC_WITH_CLIPPING),
    has_signed_scales=True,
    format="gguf",
    runtime="llamacpp",
)
ORT_GENAI = replace(
    _BASE,
    name="ort-genai",
    summary="a folder for ONNX Runtime GenAI: int4 or int8 in blocks, with KV cache",
    weight=_block_spec("int4", 32),
    accepts=(TOKENS, _accept_weights((*SIGNED, *UNSIGNED), "per_block", sizes=(16, 32, 64, 128, 256))),
    table=_block_spec("int8", 32),
    head=_block_spec("int8", 32),
    caches=_cache_specs(BY_CHANNEL, "global_minmax", QuantizationScheme.SYMMETRIC),
    format="ort-genai",
    runtime="ort-genai",
)
LANGUAGE = (_BASE, GPTQ, AWQ, GGUF, ORT_GENAI)
