"""OpenVINO on a CPU: it makes every convolution and linear layer int8 that has Q/DQ on its input and an s8 weight.

Its kernels add u8 x s8 products in pairs too, so weights are pair-safe where there is no VNNI. Biases stay float.
"""

import torch

from scalepoint.patterns.conversions import CONVERSIONS, head_to_convolution
from scalepoint.spec import PerChannelGranularity, QuantizationSpec
from scalepoint.spec.spec import to_dtype
from scalepoint.targets.cpu import instruction_set
from scalepoint.targets.onnxruntime import COPIES, PATTERNS, pair_safe
from scalepoint.targets.target import Accepted, Target

NARROW = tuple(map(to_dtype, ("int8", "int4", "uint4")))


def openvino_target(cpu: str = "auto") -> Target:
    """For a CPU: "vnni" uses all 8 bits of the weights, "avx2" the pair-safe scale, "auto" looks at this machine."""
    chosen = instruction_set(cpu)
    return Target(
        name="openvino",
        summary="OpenVINO on CPUs: u8 activations, s8 weights; weight-only int8 and int4",
        patterns=PATTERNS,
        conversions=tuple(conversion for conversion in CONVERSIONS if conversion is not head_to_convolution),
        activation=QuantizationSpec(dtype="uint8", qscheme="asymmetric", qparam_calculator_cls="histogram_mse"),
        weight=QuantizationSpec(
            qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
        ),
        accepts=(
            Accepted("activation", (torch.uint8, torch.int8), (), ("per_tensor",)),
            Accepted("weight", (torch.int8,), (), ("per_tensor", "per_channel")),
            Accepted("weight", NARROW, (), ("per_block", "per_channel"), (), ("linear",)),
        ),
        adapt_weight=None if chosen == "vnni" else pair_safe,
        shares=COPIES,
        options={"cpu": chosen},
    )
