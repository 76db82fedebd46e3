"""The attention that is written for XNNPACK equals torch's."""

import pytest
import torch
from torch.nn import functional as F

from scalepoint.formats.executorch.attention import attention

SHAPES = {"four axes": (2, 4, 5, 8), "three axes": (2, 5, 8)}


def random_tensor(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu().T},
        {"attn_mask": torch.linspace(-2, 1, 25).reshape(5, 5)},
    ],
    ids=["plain", "custom scale", "causal", "bool mask", "float mask"],
)
def test_attention_equals_scaled_dot_product_attention(shape, options):
    query, key, value = random_tensor(shape), random_tensor(shape) + 1, random_tensor(shape) * 2
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attention(query, key, value, **options), expected, rtol=1e-5, atol=1e-5)


def test_grouped_query_attention_repeats_keys_and_values():
    query, key = random_tensor((2, 4, 5, 8)), random_tensor((2, 2, 7, 8))
    expected = F.scaled_dot_product_attention(query, key, key + 1, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, key + 1, enable_gqa=True), expected, rtol=1e-5, atol=1e-5)
