"""The reference target: it accepts every format at every point of the base patterns. For experiments and tests."""

import torch

from scalepoint.patterns import BASE_PATTERNS
from scalepoint.targets.shared import INT8_PER_CHANNEL, UINT8_ASYMMETRIC
from scalepoint.targets.target import Target

REFERENCE = Target(
    name="reference",
    summary="accepts everything; runs only as a simulation",
    patterns=BASE_PATTERNS,
    activation=UINT8_ASYMMETRIC,
    weight=INT8_PER_CHANNEL,
    float_dtypes=(torch.float32, torch.float16, torch.bfloat16),
)
