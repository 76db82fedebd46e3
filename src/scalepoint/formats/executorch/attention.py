"""Decompose attention into operations that XNNPACK runs: batched products, a constant scale, an added mask.

    softmax(c q k^T + mask) v

torch's own decomposition multiplies by Python numbers, broadcasts, and handles rows that the mask hides completely.
XNNPACK delegates none of these.
"""

import torch
from torch import Tensor, fx

from scalepoint.formats.lowering import attention_from_core, mask_to_bias
from scalepoint.graph import Operation


def decompose_attention(model: fx.GraphModule) -> fx.GraphModule:
    """Replace every attention of the model in place, and return the model."""
    for module in model.modules():
        if isinstance(module, Operation) and module.kind == "attention":
            module.function = attention
    return model


def attention_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """Compute softmax(factor q k^T + mask) v with three-dimensional products, the only ones that XNNPACK has."""
    shape, (rows, width), columns = query.shape, query.shape[-2:], key.shape[-2]
    scaled = query * torch.tensor(factor, dtype=query.dtype)
    scores = torch.bmm(scaled.reshape(-1, rows, width), key.reshape(-1, columns, width).transpose(1, 2))
    if mask is not None:
        scores = (scores.reshape(*shape[:-1], columns) + mask_to_bias(mask, query.dtype)).reshape(-1, rows, columns)
    attended = torch.bmm(torch.softmax(scores, -1), value.reshape(-1, columns, value.shape[-1]))
    return attended.reshape(*shape[:-1], value.shape[-1])


attention = attention_from_core(attention_core)
