"""Masks by magnitude."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalepoint.numerics.sparsity import mask_by_share, mask_n_of_m


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    st.sampled_from([1, 2]),
    st.integers(0, 9),
)
def test_a_share_takes_the_smallest_and_exactly_so_many(out, inner, share, block, seed) -> None:
    weight = torch.randn(out * block, inner, 3, generator=torch.Generator().manual_seed(seed))
    mask = mask_by_share(weight, share, block)
    assert mask.shape == weight.shape
    blocks, kept_weights = weight.square().view(out, block, -1).sum(1), mask.view(out, block, -1)
    assert bool((kept_weights == kept_weights[:, :1]).all())  # channels of a block go together
    assert int((~kept_weights[:, 0]).sum()) == round(share * out * inner * 3)
    if 0 < int(kept_weights[:, 0].sum()) < out * inner * 3:
        assert blocks[kept_weights[:, 0]].min() >= blocks[~kept_weights[:, 0]].max()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([(2, 4), (1, 4), (1, 2), (4, 8)]), st.integers(0, 9))
def test_of_every_m_along_the_inputs_the_n_largest_stay(out, groups, ratio, seed) -> None:
    keep, of = ratio
    weight = torch.randn(out, groups * of, 3, 3, generator=torch.Generator().manual_seed(seed))
    mask = mask_n_of_m(weight, keep, of)
    kept_weights = mask.view(out, groups, of, 9)
    assert bool((kept_weights.sum(2) == keep).all())
    size = weight.abs().view(out, groups, of, 9)
    least = torch.where(kept_weights, size, torch.inf).amin(2)
    assert bool((least >= torch.where(kept_weights, 0.0, size).amax(2)).all())


def test_equal_weights_go_by_place() -> None:
    assert mask_n_of_m(torch.ones(1, 4), 2, 4).tolist() == [[True, True, False, False]]
    assert mask_by_share(torch.ones(1, 4), 0.5).tolist() == [[False, False, True, True]]
