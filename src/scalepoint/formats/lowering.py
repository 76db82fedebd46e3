"""Operations in words that formats take.

attention   what torch says of heads, scales and causal masks, around a core:
            core(query, key, value, mask, c)  ->  softmax(c q k^T + mask) v
distances   |x_i - y_j| of all pairs
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
MASKED_SCORE = -1e30  # what is added for False


def attention_from_core(core: AttentionCore) -> Callable[..., Tensor]:
    """torch.nn.functional.scaled_dot_product_attention by a core, without dropout: what is exported is in eval mode."""

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
            key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        return core(query, key, value, attn_mask, 1 / sqrt(query.size(-1)) if scale is None else scale)

    return attention


def pairwise_distances(x: Tensor, y: Tensor, p: float = 2.0, *_: object) -> Tensor:
    """torch.cdist by sums of squares or of differences, of which it takes those that round least."""
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    if p == 1:
        return difference.abs().sum(-1)
    return NotImplemented if p != 2 else difference.square().sum(-1).sqrt()


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores. A row that it hides whole gives the mean of all values, and zeros in torch."""
    return mask if mask.dtype != torch.bool else torch.where(mask, 0.0, MASKED_SCORE).to(dtype)
