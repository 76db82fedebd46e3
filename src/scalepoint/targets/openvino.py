"""OpenVINO on a CPU: it makes every convolution and linear layer int8 that has Q/DQ on its input and an s8 weight.

The placement is that of ONNX Runtime without the outputs: a kernel takes an output's Q/DQ when the next one asks for
it, and where nothing does, as before a join with float tensors (the class token of a vision transformer), OpenVINO
would round the others to the same integers. A concat of quantized tensors keeps its output's, and its inputs have the
same: with scales of their own the kernels before it round twice, which takes longer. A factor a channel before a
quantizer becomes part of it, so that channels that stand out are scaled there; not without VNNI, where linear layers
are convolutions and it would stand in the way of their layout. Its kernels add u8 x s8 products in pairs too. Biases
stay float.
"""

from dataclasses import replace

import torch

from scalepoint.patterns import Pattern, Point
from scalepoint.patterns.fused import FusedConcat
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import PATTERNS, SYMMETRIC, WIDENED, onnxruntime_target
from scalepoint.targets.target import Accepted, RewriteRule, Target

NARROW = tuple(map(to_dtype, ("int8", "int4", "uint4")))
POOLED = RewriteRule(
    "quantizers_before_pools",
    "a quantizer behind a pool leaves the layer before it and the pool in float; before the pool, both give integers",
)
JOINED = RewriteRule(
    "joins_before_products",
    "it takes a quantizer behind a join of tokens into the joined, and then fails to compile the product",
)
CONVOLVED = RewriteRule(
    "linears_as_convolutions",
    "without VNNI its integer kernel for linear layers is slower than the float one; that for convolutions of one tap "
    "is faster than both",
)


def inputs_only(pattern: Pattern) -> Pattern:
    if pattern.make is FusedConcat:
        return pattern
    return replace(pattern, qdq_points=tuple(point for point in pattern.qdq_points if point != Point.OUTPUT))


def openvino_target(cpu: str = "auto") -> Target:
    """Build the OpenVINO target for a CPU.

    Args:
        cpu: "vnni" uses all 8 bits of the weights; "avx2" keeps sums of two products within 16 bits; "auto" looks at
            this machine.
    """
    base = onnxruntime_target(cpu)
    return replace(
        base,
        name="openvino",
        summary="OpenVINO on CPUs: u8 activations, s8 weights; weight-only int8 and int4",
        patterns=tuple(map(inputs_only, PATTERNS)),
        accepts=(
            Accepted("activation", (torch.uint8, torch.int8), (), ("per_tensor",), dynamic=False),
            Accepted("weight", (torch.int8,), (), ("per_tensor", "per_channel")),
            Accepted("weight", (to_dtype("int4"),), SYMMETRIC, ("per_channel",), (), ("conv", "linear")),
            Accepted("weight", NARROW, (), ("per_block", "per_channel"), (), ("linear",)),
        ),
        concat_kinds=frozenset(("cat",)),
        folds_input_scaling=base.options["cpu"] == "vnni",
        bias="float",
        rewrites=(WIDENED, POOLED, JOINED) if base.options["cpu"] == "vnni" else (WIDENED, POOLED, CONVOLVED),
        dequantizes_weights_on_load=False,
        runtime="openvino",
        kernel_tables=(),
    )
