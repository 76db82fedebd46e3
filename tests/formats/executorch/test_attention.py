"""Attention as it is written for XNNPACK is that of torch."""

import pytest
import torch
from torch.nn import functional as F

from scalepoint.formats.executorch.attention import attention

SHAPES = {"four axes": (2, 4, 5, 8), "three axes": (2, 5, 8)}


def some(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu().T},
        {"attn_mask": torch.linspace(-2, 1, 25).reshape(5, 5)},
    ],
    ids=["plain", "own scale", "causal", "bool mask", "float mask"],
)
def test_it_is_that_of_torch(shape, given):
    query, key, value = some(shape), some(shape) + 1, some(shape) * 2
    wanted = F.scaled_dot_product_attention(query, key, value, **given)
    torch.testing.assert_close(attention(query, key, value, **given), wanted, rtol=1e-5, atol=1e-5)


def test_keys_that_queries_share_are_repeated():
    query, key = some((2, 4, 5, 8)), some((2, 2, 7, 8))
    wanted = F.scaled_dot_product_attention(query, key, key + 1, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, key + 1, enable_gqa=True), wanted, rtol=1e-5, atol=1e-5)
