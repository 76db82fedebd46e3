"""TensorRT: symmetric int8 with per-channel weights, Q/DQ on the inputs of fused groups, the rest float.

Rules R16 and R17 keep Q/DQ away from shapes for which it has no fast int8 kernel.
"""

import torch

from scalepoint.patterns import BASE_PATTERNS
from scalepoint.spec import PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.target import Accepted, Facts, Target

TENSORRT_PATTERNS = BASE_PATTERNS

_SYMMETRIC = (QuantizationScheme.SYMMETRIC, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
_SMALL = 16


def small_matmul(facts: Facts) -> str | None:
    """R16: no tensor cores for K < 16 or N < 16."""
    if facts.kind not in ("linear", "head") or not facts.weight_shape:
        return None
    n, k = facts.weight_shape[:2]
    if n < _SMALL or k < _SMALL:
        return f"a {k} x {n} matrix product has no int8 kernel: both sides need {_SMALL} (rule R16)"
    return None


def odd_convolution(facts: Facts) -> str | None:
    """R17: which convolutions with few channels have an int8 kernel."""
    if facts.kind != "conv" or min(facts.weight_shape[:2], default=_SMALL) >= _SMALL:
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


TENSORRT = Target(
    name="tensorrt",
    summary="NVIDIA GPUs: symmetric int8, fp8 and block formats; Q/DQ outside the groups that TensorRT fuses",
    patterns=TENSORRT_PATTERNS,
    activation=QuantizationSpec(qscheme="symmetric_with_clipping", qparam_calculator_cls="histogram_mse"),
    weight=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    accepts=(
        Accepted("activation", (torch.int8,), _SYMMETRIC, ("per_tensor",)),
        Accepted("activation", (torch.float8_e4m3fn,), (), ("per_tensor", "per_block"), (32,)),
        Accepted("activation", (torch.float4_e2m1fn_x2,), (), ("per_block",), (16,)),
        Accepted("weight", (torch.int8,), _SYMMETRIC, ("per_tensor", "per_channel")),
        Accepted("weight", (torch.float8_e4m3fn,), (), ("per_tensor", "per_channel", "per_block"), (32,)),
        Accepted("weight", (to_dtype("int4"),), _SYMMETRIC, ("per_block",), (64, 128), ("linear",)),
        Accepted("weight", (torch.float4_e2m1fn_x2,), (), ("per_block",), (16,), ("linear",)),
    ),
    rules=(small_matmul, odd_convolution),
)
