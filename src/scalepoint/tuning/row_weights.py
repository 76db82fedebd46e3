"""Weights of rows whose size a norm divides out.

    weight of row r = 1 / (mean(x_r^2) + 1e-5)       where a layer norm or an RMS norm reads x

The residual stream of a transformer has rows a hundred times as large as the others. A norm brings all rows to one
size, so an error counts relative to the size of its row.
"""

import torch
from torch import Tensor, fx

from scalepoint.patterns.fused import FusedNorm
from scalepoint.quantize.operations import get_part_kind
from scalepoint.quantize.smooth import NORM_KINDS
from scalepoint.tuning.walk import StreamWalk

EPSILON = 1e-5  # the default of norms


def feeds_norm(walk: StreamWalk, node: fx.Node) -> bool:
    """Whether a norm over the last axis reads a value, directly or behind an activation quantizer."""
    for user in node.users:
        is_stub = walk.get_stub(user) is not None
        if feeds_norm(walk, user) if is_stub else _is_norm(walk, user):
            return True
    return False


def _is_norm(walk: StreamWalk, node: fx.Node) -> bool:
    module = walk.get_module(node)
    if not isinstance(module, FusedNorm):
        return False
    parts = list(module.parts.values())
    return len(parts) > 1 or get_part_kind(parts[0]) in NORM_KINDS  # an RMS norm in single operations has several parts


def row_weights(x: Tensor) -> Tensor:
    """Return the weight of every row of (.., channels); the last axis has size 1."""
    return 1 / (x.to(torch.float32).square().mean(-1, keepdim=True) + EPSILON)
