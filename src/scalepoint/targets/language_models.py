"""Targets for language models, which `deploy_checkpoint` makes from the folder of a checkpoint.

Only linear layers are quantized: their weights, and their inputs if activations are configured. Everything between them
is float, as in the kernels of these runtimes. `head` and `table` are the specs of the last layer and of the embedding.
"""

from dataclasses import replace

import torch

from scalepoint.patterns import BASE_PATTERNS, Point
from scalepoint.patterns.fused import FusedAttention, FusedPool
from scalepoint.patterns.language import without_points
from scalepoint.spec import PerBlockGranularity, QuantizationFormulation, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.target import Accepted, Target

RUNTIME_COMPUTES_FLOAT = "language runtimes compute it in float"
PATTERNS = tuple(
    without_points(pattern, RUNTIME_COMPUTES_FLOAT)
    if pattern.make in (FusedAttention, FusedPool) or Point.OUTPUT in pattern.qdq_points
    else pattern
    for pattern in BASE_PATTERNS
)
SIGNED_DTYPES = tuple(map(to_dtype, ("int8", "int4", "int3", "int2")))
UNSIGNED_DTYPES = tuple(map(to_dtype, ("uint8", "uint4", "uint3", "uint2")))
FIVE_BIT_DTYPES = tuple(map(to_dtype, ("int5", "uint5")))
FLOAT_DTYPES = (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
ZP, MINVAL = QuantizationFormulation.ZP, QuantizationFormulation.MINVAL
ACCEPTED_ACTIVATIONS = Accepted("activation", (torch.int8, torch.uint8, *FLOAT_DTYPES))
ACCEPTED_CACHES = Accepted("activation", tuple(map(to_dtype, ("int8", "int4", "float8_e4m3fn"))), kinds=("attention",))
# Block sizes of the KV cache, whose shape is (batch, heads, tokens, channels).
BLOCK_PER_CHANNEL = (-1, 1, -1, 1)  # one scale per head and channel
BLOCK_PER_TOKEN = (1, 1, 1, 32)  # one scale per token and 32 channels


def _block_spec(dtype: str, size: int, scheme: QuantizationScheme = QuantizationScheme.SYMMETRIC) -> QuantizationSpec:
    granularity = PerBlockGranularity(block_size=size)
    return QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity, qparam_calculator_cls="static")


def _cache_specs(block: tuple[int, ...], calculator: str, scheme: QuantizationScheme) -> dict[str, QuantizationSpec]:
    """Return the specs of a KV cache in 8 and in 4 bits."""
    granularity = PerBlockGranularity(block_size=block)
    return {
        dtype: QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity, qparam_calculator_cls=calculator)
        for dtype in ("int8", "int4")
    }


def with_cache(target: Target) -> Target:
    """Return the target with Q/DQ points on the keys and values of attention."""
    points = (Point.KEY_INPUT, Point.VALUE_INPUT)
    patterns = (
        replace(pattern, qdq_points=points, why_float="") if pattern.make is FusedAttention else pattern
        for pattern in target.patterns
    )
    return replace(target, patterns=tuple(patterns), accepts=(*target.accepts, ACCEPTED_CACHES))


def _accept_weights(dtypes: tuple[torch.dtype, ...], *granularities: str, sizes: tuple[int, ...] = ()) -> Accepted:
    return Accepted("weight", dtypes, granularities=granularities, block_sizes=sizes)


COMPRESSED_TENSORS = Target(
    name="compressed-tensors",
    summary="folders for vLLM and transformers: w4a16, w8a8, fp8, nvfp4",
    patterns=PATTERNS,
    activation=QuantizationSpec(dtype="int8", qparam_calculator_cls="dynamic"),
    weight=_block_spec("int4", 128),
    accepts=(
        ACCEPTED_ACTIVATIONS,
        _accept_weights((*SIGNED_DTYPES, *UNSIGNED_DTYPES, *FLOAT_DTYPES), "per_block", "per_channel", "per_tensor"),
    ),
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
    caches={"fp8": QuantizationSpec(dtype="float8_e4m3fn", qparam_calculator_cls="global_minmax")},
    format="compressed-tensors",
    runtime="transformers",
    is_language=True,
)
GPTQ = replace(
    COMPRESSED_TENSORS,
    name="gptq",
    summary="folders in the layout of GPTQ: int4, int8 (and 2, 3) in groups, no activations",
    accepts=(ACCEPTED_ACTIVATIONS, _accept_weights((*SIGNED_DTYPES, *UNSIGNED_DTYPES), "per_block", "per_channel")),
    caches={},
    format="gptq",
)
AWQ = replace(
    COMPRESSED_TENSORS,
    name="awq",
    summary="folders in the layout of AWQ: 4 bits in groups with zero points, no activations",
    weight=_block_spec("uint4", 128, QuantizationScheme.ASYMMETRIC),
    accepts=(ACCEPTED_ACTIVATIONS, _accept_weights(tuple(map(to_dtype, ("uint4", "int4"))), "per_block")),
    caches={},
    format="awq",
)
GGUF = replace(
    COMPRESSED_TENSORS,
    name="gguf",
    summary="one file for llama.cpp: weights of 2 to 8 bits in blocks",
    weight=_block_spec("int4", 32),
    accepts=(
        ACCEPTED_ACTIVATIONS,
        # Q2_K, Q4_1, Q4_K, Q5_1 and Q5_K store a minimum; the file format refuses it for more than 5 bits.
        replace(
            _accept_weights((*SIGNED_DTYPES, *UNSIGNED_DTYPES, *FIVE_BIT_DTYPES), "per_block", "per_channel"),
            formulations=(ZP, MINVAL),
        ),
    ),
    # max_abs / 127, the scale of Q8_0: values of a Q8_0 file, which many checkpoints were made from, stay unchanged.
    table=_block_spec("int8", 32, QuantizationScheme.SYMMETRIC_WITH_CLIPPING),
    head=_block_spec("int8", 32, QuantizationScheme.SYMMETRIC_WITH_CLIPPING),
    caches=_cache_specs(BLOCK_PER_TOKEN, "dynamic", QuantizationScheme.SYMMETRIC_WITH_CLIPPING),
    has_signed_scales=True,
    format="gguf",
    runtime="llamacpp",
)
ORT_GENAI = replace(
    COMPRESSED_TENSORS,
    name="ort-genai",
    summary="a folder for ONNX Runtime GenAI: int4 or int8 in blocks, with KV cache",
    weight=_block_spec("int4", 32),
    accepts=(
        ACCEPTED_ACTIVATIONS,
        _accept_weights((*SIGNED_DTYPES, *UNSIGNED_DTYPES), "per_block", sizes=(16, 32, 64, 128, 256)),
    ),
    table=_block_spec("int8", 32),
    head=_block_spec("int8", 32),
    caches=_cache_specs(BLOCK_PER_CHANNEL, "global_minmax", QuantizationScheme.SYMMETRIC),
    format="ort-genai",
    runtime="ort-genai",
)
