"""The reference target: it accepts every format at every point of the base patterns. For experiments and tests."""

import torch

from scalepoint.patterns import BASE_PATTERNS
from scalepoint.spec import PerChannelGranularity, QuantizationSpec
from scalepoint.targets.target import Target

REFERENCE = Target(
    name="reference",
    summary="accepts everything; runs only as a simulation",
    patterns=BASE_PATTERNS,
    activation=QuantizationSpec(dtype="uint8", qscheme="asymmetric", qparam_calculator_cls="global_minmax"),
    weight=QuantizationSpec(
        qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    ),
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
)
