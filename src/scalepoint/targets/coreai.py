"""Core AI on Apple devices (macOS and iOS 27): int8 between Q and DQ, or weight-only with 1 to 8 bits.

Core AI is Core ML's successor, and the same operations are fused, so patterns and defaults are those of the target
coreml. A Core AI program has no integer convolution: it says int8 as quantize and dequantize around a float one, and
the compiler of the device decides. Its quantize operation clips to the whole range of the dtype, so activations never
have the scheme symmetric_with_clipping. Dynamic activations have one scale per token, which the program computes.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from scalepoint.numerics import E4M3, E5M2, E8M0, FP4, CodeType
from scalepoint.spec import QuantizationFormulation, QuantizationScheme
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.coreml import COREML, INTEGER_WEIGHT_DTYPES, PALETTE_INDEX_DTYPES
from scalepoint.targets.target import Accepted

UNCLIPPED_SCHEMES = (QuantizationScheme.SYMMETRIC, QuantizationScheme.ASYMMETRIC)
FLOAT8_DTYPES = (E4M3, E5M2)
WEIGHT_DTYPES = (*map(to_dtype, ("int2", "uint2")), *INTEGER_WEIGHT_DTYPES)
WEIGHT_GRANULARITIES = ("per_tensor", "per_channel", "per_block")
FORMULATIONS = (QuantizationFormulation.ZP, QuantizationFormulation.MINVAL)
# Scales are of the dtype of the float tensors or e8m0. Core AI's runtime ends its process for the e4m3 scales of NVFP4.
SCALE_DTYPES = (None, E8M0)


def _constant_activation(
    dtypes: Iterable[CodeType],
    schemes: tuple[QuantizationScheme, ...],
    formulations: tuple[QuantizationFormulation, ...] = (QuantizationFormulation.ZP,),
) -> Accepted:
    """Activations whose scales are constants of the file."""
    return Accepted(
        "activation",
        tuple(dtypes),
        schemes=schemes,
        granularities=("per_tensor", "per_channel"),
        formulations=formulations,
        scale_dtypes=SCALE_DTYPES,
        dynamic=False,
    )


COREAI = replace(
    COREML,
    name="coreai",
    summary="Core AI on Apple devices (macOS and iOS 27): int8, fp8, weights of 1 to 8 bits, the rest float16",
    accepts=(
        _constant_activation(map(to_dtype, ("uint8", "uint4")), (), FORMULATIONS),
        _constant_activation(map(to_dtype, ("int8", "int4")), UNCLIPPED_SCHEMES, FORMULATIONS),
        _constant_activation((*FLOAT8_DTYPES, FP4), ()),
        Accepted(
            "activation",
            (torch.int8,),
            schemes=(QuantizationScheme.SYMMETRIC,),
            granularities=("per_token",),
            kinds=("linear",),
        ),
        Accepted(
            "weight",
            WEIGHT_DTYPES,
            granularities=WEIGHT_GRANULARITIES,
            formulations=FORMULATIONS,
            scale_dtypes=SCALE_DTYPES,
        ),
        Accepted("weight", FLOAT8_DTYPES, granularities=WEIGHT_GRANULARITIES, scale_dtypes=SCALE_DTYPES),
        # The compiler refuses float32 scales of fp4 weights.
        Accepted("weight", (FP4,), granularities=WEIGHT_GRANULARITIES, scale_dtypes=(E8M0,)),
        Accepted("weight", PALETTE_INDEX_DTYPES, granularities=("per_grouped_channel",), pruned_palettes=True),
    ),
    sparse_code_bits=(8,),
    fixed_shapes_reason="",
    format="coreai",
    runtime="coreai",
)
