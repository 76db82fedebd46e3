"""OpenVINO on CPUs: a convolution or linear layer runs in int8 if its input has Q/DQ and its weight is int8.

The placement is that of ONNX Runtime without output points: a kernel fuses the Q/DQ of the layer that reads it. Without
such a reader, as before a concat with float tensors (the class token of a vision transformer), OpenVINO would round the
float tensors too. A concat of quantized tensors keeps its output point, and its inputs have the same scale; otherwise
the kernels before it round twice, which is slower. A factor per channel before a quantizer is fused into it, so outlier
channels are scaled there; not without VNNI, where linear layers run as convolutions and the factor prevents a fast
layout. Kernels add uint8 x int8 products in pairs, as in ONNX Runtime. Biases stay float.
"""

from dataclasses import replace

import torch

from scalepoint.errors import TargetError
from scalepoint.patterns import Pattern, Point
from scalepoint.patterns.fused import FusedConcat
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import NARROW_WEIGHTS_AS_INT8, PATTERNS, onnxruntime_target
from scalepoint.targets.shared import SYMMETRIC
from scalepoint.targets.target import Accepted, RewriteRule, Target

WEIGHT_ONLY_DTYPES = tuple(map(to_dtype, ("int8", "int4", "uint4")))
QUANTIZERS_BEFORE_POOLS = RewriteRule(
    "quantizers_before_pools",
    "a quantizer after a pool leaves the pool and the layer before it in float; before the pool, both run in int8",
)
KEEP_CONCATS_APART = RewriteRule(
    "keep_concats_apart",
    "OpenVINO moves a quantizer after a concat of tokens to its inputs, and then fails to compile the product",
)
EXPLICIT_ZERO_STATES = RewriteRule(
    "explicit_zero_states",
    "without initial states OpenVINO computes them from the layer's input, which changes its layout: GRUs get slower",
)
LINEARS_AS_CONVOLUTIONS = RewriteRule(
    "linears_as_convolutions",
    "without VNNI the int8 kernel for linear layers is slower than the float one; the int8 kernel for 1x1 convolutions "
    "is faster than both",
)
BIAS_FOR_SEVERAL_READERS = RewriteRule(
    "bias_for_several_readers",
    "with free axes OpenVINO 2026.4 multiplies with the scales of a convolution twice, in it and in a quantizer after "
    "it, if a float operator also reads the result and there is no bias: the quantizer then gives zeros",
)


def without_output_points(pattern: Pattern) -> Pattern:
    """Return the pattern without its OUTPUT point, except for concats."""
    if pattern.make is FusedConcat:
        return pattern
    return replace(pattern, qdq_points=tuple(point for point in pattern.qdq_points if point != Point.OUTPUT))


def openvino_target(cpu: str = "auto") -> Target:
    """Build the OpenVINO target for a CPU.

    Args:
        cpu: "vnni" uses all 8 bits of the weights; "avx2" keeps sums of two products within 16 bits; "auto" chooses
            for this machine.
    """
    if cpu == "arm":
        raise TargetError("cpu='arm' is for target onnxruntime: files of OpenVINO were never run on an ARM CPU")
    base = onnxruntime_target(cpu)
    has_vnni = base.options["cpu"] != "avx2"
    return replace(
        base,
        name="openvino",
        summary="OpenVINO on CPUs: u8 activations, s8 weights; weight-only int8 and int4",
        patterns=tuple(map(without_output_points, PATTERNS)),
        accepts=(
            Accepted("activation", (torch.uint8, torch.int8), granularities=("per_tensor",), dynamic=False),
            Accepted("weight", (torch.int8,), granularities=("per_tensor", "per_channel")),
            Accepted(
                "weight",
                (to_dtype("int4"),),
                schemes=SYMMETRIC,
                granularities=("per_channel",),
                kinds=("conv", "linear"),
            ),
            Accepted("weight", WEIGHT_ONLY_DTYPES, granularities=("per_block", "per_channel"), kinds=("linear",)),
        ),
        folds_input_scaling=has_vnni,
        bias="float",
        rewrites=(
            NARROW_WEIGHTS_AS_INT8,
            QUANTIZERS_BEFORE_POOLS,
            KEEP_CONCATS_APART if has_vnni else LINEARS_AS_CONVOLUTIONS,
            BIAS_FOR_SEVERAL_READERS,
            EXPLICIT_ZERO_STATES,
        ),
        dequantizes_weights_on_load=False,
        runtime="openvino",
        kernel_tables=(),
        is_placed_by_speed=True,
    )
