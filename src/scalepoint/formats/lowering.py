"""Decompositions that several formats share.

attention   scaled_dot_product_attention with its options, around a core that the format provides:
            core(query, key, value, mask, c)  ->  softmax(c q k^T + mask) v
distances   |x_i - y_j| for all pairs
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
MASKED_SCORE = -1e30  # added to scores where a boolean mask is False


def attention_from_core(core: AttentionCore) -> Callable[..., Tensor]:
    """Return torch.nn.functional.scaled_dot_product_attention built on a core, without dropout (eval mode)."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        if is_causal:
            attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        return core(query, key, value, attn_mask, 1 / sqrt(query.size(-1)) if scale is None else scale)

    return attention


def pairwise_distances(x: Tensor, y: Tensor, p: float = 2.0, *_: object) -> Any:
    """Compute torch.cdist for p = 1 and p = 2 from differences, which round less than the product form of p = 2."""
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    if p == 1:
        return difference.abs().sum(-1)
    if p == 2:
        return difference.square().sum(-1).sqrt()
    return NotImplemented


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to a bias of scores. A fully masked row gives the mean of all values, where torch gives 0."""
    return mask if mask.dtype != torch.bool else torch.where(mask, 0.0, MASKED_SCORE).to(dtype)
