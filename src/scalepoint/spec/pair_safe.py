"""The pair-safe range: u8 x s8 products stay exact on CPUs that add pairs of them in 16 bits (AVX2 without VNNI).

    scale = max( max|w| / 127,  max over same-sign neighbours of (|w1| + |w2|) / 127.5 )

so that no pair of codes exceeds 128, and 255 * 128 < 2^15. Neighbours are those along the inner dimension of the
kernel: (kh, kw, c) flattened. For an odd number of channels runtimes differ, so pairs within each kernel position count
too.
"""

import torch
from torch import Tensor

from scalepoint.numerics.qparams import min_max
from scalepoint.spec.range_calculator import RangeCalculatorBase

MAX_CODE = 127.0
MAX_UNROUNDED_PAIR_SUM = 127.5
MAX_PAIR_SUM = 128  # of two codes of one sign


@RangeCalculatorBase.register("pair_safe")
class PairSafeRangeCalculator(RangeCalculatorBase):
    """For a weight (out, in, ...) with a scale per output channel or per tensor, and codes from -127 to 127."""

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        block = self.get_block_size(tensor.shape)
        low, high = min_max(tensor, block)
        largest = torch.maximum(-low, high)
        channel_shape = (-1, *[1] * (tensor.ndim - 1))
        is_per_channel = largest.numel() > 1
        largest_pair = pair_sums(tensor).view(channel_shape) if is_per_channel else pair_sums(tensor).amax()
        largest = torch.maximum(largest, largest_pair * (MAX_CODE / MAX_UNROUNDED_PAIR_SUM))
        return -largest, largest


def pair_sums(weight: Tensor) -> Tensor:
    """Return for each output channel the largest |w1 + w2| of two neighbours with the same sign."""
    weight = weight.to(torch.float32)
    # Channels last: neighbours in memory are pairs of one position.
    inner = weight.flatten(2).transpose(1, 2) if weight.ndim > 2 else weight.unsqueeze(1)
    result = _largest_sum(inner.flatten(1))
    if inner.shape[2] % 2 and inner.shape[1] > 1:
        result = torch.maximum(result, _largest_sum(inner))
    return result


def _largest_sum(rows: Tensor) -> Tensor:
    """Return the largest same-sign sum over pairs (0, 1), (2, 3), ... of the last axis."""
    count = rows.shape[-1] // 2
    if not count:
        return rows.new_zeros(rows.shape[0])
    pairs = rows[..., : 2 * count].reshape(*rows.shape[:-1], count, 2)
    positive, negative = pairs.clamp(min=0).sum(-1), pairs.clamp(max=0).sum(-1)
    sums = torch.maximum(positive, -negative)
    return sums.flatten(1).amax(1)
