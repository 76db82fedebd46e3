"""Sparsity masks by magnitude. A mask is True for weights that are kept, the others become zero.

    share      remove the smallest |w| of a tensor, or the smallest blocks of neighbouring output channels
    n of m     keep the n largest of every m weights along the input channels

Ties are decided by index, so a mask depends only on the weight.
"""

import torch
from torch import Tensor


def mask_by_share(weight: Tensor, share: float, block: int = 1) -> Tensor:
    """Return a mask that removes `share` of a weight (out, in, ...), in blocks of `block` output channels."""
    size = weight.detach().to(torch.float32).square()
    size = size.reshape(size.shape[0] // block, block, -1).sum(1)
    mask = torch.ones(size.numel(), dtype=torch.bool, device=weight.device)
    order = size.reshape(-1).argsort(stable=True)
    mask[order[: round(share * size.numel())]] = False
    return mask.view(size.shape)[:, None].expand(-1, block, -1).reshape(weight.shape)


def mask_n_of_m(weight: Tensor, keep: int, of: int) -> Tensor:
    """Return a mask that keeps `keep` of every `of` weights along axis 1."""
    size = weight.detach().to(torch.float32).abs().movedim(1, -1)
    groups = size.reshape(-1, of)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[:, :keep], True)
    return mask.view(size.shape).movedim(-1, 1)
