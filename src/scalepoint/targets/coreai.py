"""Core AI on Apple devices (macOS and iOS 27): int8 between Q and DQ, or weight-only with 1 to 8 bits.

Core AI is Core ML's successor, and the same operations are fused, so patterns and defaults are those of the target
coreml. A Core AI program has no integer convolution: it says int8 as quantize and dequantize around a float one, and
the compiler of the device decides. Its quantize operation clips to the whole range of the dtype, so activations never
have the scheme symmetric_with_clipping.
"""

from dataclasses import replace

import torch

from scalepoint.spec import QuantizationScheme
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.coreml import COREML, INTEGER_WEIGHT_DTYPES, PALETTE_INDEX_DTYPES
from scalepoint.targets.target import Accepted

UNCLIPPED_SCHEMES = (QuantizationScheme.SYMMETRIC, QuantizationScheme.ASYMMETRIC)
WEIGHT_DTYPES = (*map(to_dtype, ("int2", "uint2")), *INTEGER_WEIGHT_DTYPES)

COREAI = replace(
    COREML,
    name="coreai",
    summary="Core AI on Apple devices (macOS and iOS 27): int8, weights of 1 to 8 bits, the rest float16",
    accepts=(
        Accepted("activation", (torch.uint8,), (), ("per_tensor", "per_channel"), dynamic=False),
        Accepted("activation", (torch.int8,), UNCLIPPED_SCHEMES, ("per_tensor", "per_channel"), dynamic=False),
        Accepted("weight", WEIGHT_DTYPES, (), ("per_tensor", "per_channel", "per_block")),
        Accepted("weight", PALETTE_INDEX_DTYPES, (), ("per_grouped_channel",)),
    ),
    format="coreai",
    runtime="coreai",
)
