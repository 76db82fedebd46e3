"""Attention as XNNPACK takes it: products of three axes, the scale as a constant, a mask that is added.

    softmax(c q k^T + mask) v

torch's own decomposition multiplies by numbers, broadcasts and looks for rows that a mask hides whole, all of which
runs outside of XNNPACK. Such a row gives the mean of all values here, and zeros there.
"""

from math import sqrt

import torch
from torch import Tensor, fx

from scalepoint.graph import Operation

HIDDEN = -1e30  # what is added for False


def spell_out(model: fx.GraphModule) -> fx.GraphModule:
    """In place."""
    for module in model.modules():
        if isinstance(module, Operation) and module.kind == "attention":
            module.function = attention
    return model


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
    """As torch.nn.functional.scaled_dot_product_attention, in eval mode."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    shape, (rows, width), columns = query.shape, query.shape[-2:], key.shape[-2]
    factor = torch.tensor(1 / sqrt(width) if scale is None else scale, dtype=query.dtype)
    scores = torch.bmm((query * factor).reshape(-1, rows, width), key.reshape(-1, columns, width).transpose(1, 2))
    if is_causal:
        attn_mask = torch.ones(rows, columns, dtype=torch.bool).tril()
    if attn_mask is not None:
        added = attn_mask if attn_mask.dtype != torch.bool else torch.where(attn_mask, 0.0, HIDDEN).to(query.dtype)
        scores = (scores.reshape(*shape[:-1], columns) + added).reshape(-1, rows, columns)
    made = torch.bmm(torch.softmax(scores, -1), value.reshape(-1, columns, value.shape[-1]))
    return made.reshape(*shape[:-1], value.shape[-1])
