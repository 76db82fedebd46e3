"""Masks by magnitude: which weights stay, the others are zero.

    share           the smallest |w| of the whole tensor go, or the smallest blocks of neighbouring output channels
    n of m          of every m weights along the input channels the n largest stay

Ties go by place, so a mask depends on the weight alone.
"""

import torch
from torch import Tensor


def mask_by_share(weight: Tensor, share: float, block: int = 1) -> Tensor:
    """A mask without `share` of a weight (out, in, ..); `block` output channels stay or go together."""
    size = weight.detach().to(torch.float32).square()
    size = size.reshape(size.shape[0] // block, block, -1).sum(1)
    mask = torch.ones(size.numel(), dtype=torch.bool, device=weight.device)
    order = size.reshape(-1).argsort(stable=True)
    mask[order[: round(share * size.numel())]] = False
    return mask.view(size.shape)[:, None].expand(-1, block, -1).reshape(weight.shape)


def mask_n_of_m(weight: Tensor, keep: int, of: int) -> Tensor:
    """A mask with `keep` of every `of` weights along axis 1."""
    size = weight.detach().to(torch.float32).abs().movedim(1, -1)
    groups = size.reshape(-1, of)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[:, :keep], True)
    return mask.view(size.shape).movedim(-1, 1)
