"""What a norm divides out. The stream of a transformer holds rows of a hundred times the others' size, and what reads
it sees every row at one size: errors count relative to their row.

    weight of row r = 1 / (mean(x_r^2) + 1e-5)       where a layer norm or an RMS norm reads x
"""

import torch
from torch import Tensor, fx

from scalepoint.patterns.fused import FusedNorm
from scalepoint.quantize.operations import get_part_kind
from scalepoint.tuning.walk import StreamWalk

NORM_KINDS = ("layer_norm", "rms_norm")
EPSILON = 1e-5  # as norms have it


def feeds_norm(walk: StreamWalk, node: fx.Node) -> bool:
    """Whether a norm over the last axis reads a value, at once or behind its quantizer."""
    return any(
        feeds_norm(walk, user) if walk.get_stub(user) is not None else _is_norm(walk, user) for user in node.users
    )


def _is_norm(walk: StreamWalk, node: fx.Node) -> bool:
    module = walk.get_module(node)
    if not isinstance(module, FusedNorm):
        return False
    parts = list(module.parts.values())
    return len(parts) > 1 or get_part_kind(parts[0]) in NORM_KINDS  # an RMS norm that is written out has several


def row_weights(x: Tensor) -> Tensor:
    """Of every row of (.., channels), with the last axis kept."""
    return 1 / (x.to(torch.float32).square().mean(-1, keepdim=True) + EPSILON)
