"""OpenVINO on a CPU: it makes every convolution and linear layer int8 that has Q/DQ on its input and an s8 weight.

The same placement as for ONNX Runtime serves it, and its kernels add u8 x s8 products in pairs too. Biases stay float.
"""

from dataclasses import replace

import torch

from scalepoint.spec.spec import to_dtype
from scalepoint.targets.onnxruntime import onnxruntime_target
from scalepoint.targets.target import Accepted, Target

NARROW = tuple(map(to_dtype, ("int8", "int4", "uint4")))


def openvino_target(cpu: str = "auto") -> Target:
    """For a CPU: "vnni" uses all 8 bits of the weights, "avx2" the pair-safe scale, "auto" looks at this machine."""
    return replace(
        onnxruntime_target(cpu),
        name="openvino",
        summary="OpenVINO on CPUs: u8 activations, s8 weights; weight-only int8 and int4",
        accepts=(
            Accepted("activation", (torch.uint8, torch.int8), (), ("per_tensor",)),
            Accepted("weight", (torch.int8,), (), ("per_tensor", "per_channel")),
            Accepted("weight", NARROW, (), ("per_block", "per_channel"), (), ("linear",)),
        ),
        bias="float",
        runtime="openvino",
    )
