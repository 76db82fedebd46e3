"""Attention as XNNPACK takes it: products of three axes, the scale as a constant, a mask that is added.

    softmax(c q k^T + mask) v

torch's own decomposition multiplies by numbers, broadcasts and looks for rows that a mask hides whole, all of which
runs outside of XNNPACK.
"""

import torch
from torch import Tensor, fx

from scalepoint.formats.lowering import attention_from_core, mask_to_bias
from scalepoint.graph import Operation


def decompose_attention(model: fx.GraphModule) -> fx.GraphModule:
    """In place."""
    for module in model.modules():
        if isinstance(module, Operation) and module.kind == "attention":
            module.function = attention
    return model


def attention_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    shape, (rows, width), columns = query.shape, query.shape[-2:], key.shape[-2]
    scaled = query * torch.tensor(factor, dtype=query.dtype)
    scores = torch.bmm(scaled.reshape(-1, rows, width), key.reshape(-1, columns, width).transpose(1, 2))
    if mask is not None:
        scores = (scores.reshape(*shape[:-1], columns) + mask_to_bias(mask, query.dtype)).reshape(-1, rows, columns)
    made = torch.bmm(torch.softmax(scores, -1), value.reshape(-1, columns, value.shape[-1]))
    return made.reshape(*shape[:-1], value.shape[-1])


attention = attention_from_core(attention_core)
