"""Rotations are orthogonal, have entries of one magnitude for Hadamard sizes, and keep the mean on request."""

import pytest
import torch

from scalepoint.numerics.rotation import make_hadamard, make_rotation

# widths of transformers in use, and small ones
WITH_HADAMARD = [1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 60, 64, 192, 384, 576, 768]
WITHOUT = [3, 6, 10, 25, 33]


@pytest.mark.parametrize("size", WITH_HADAMARD)
def test_a_hadamard_matrix_has_signs_and_orthogonal_rows(size):
    hadamard = make_hadamard(size)
    assert hadamard is not None
    assert torch.equal(hadamard.abs(), torch.ones(size, size, dtype=torch.float64))
    assert torch.equal(hadamard @ hadamard.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", WITHOUT)
def test_sizes_without_a_rotation_are_an_error(size):
    assert make_hadamard(size) is None


@pytest.mark.parametrize("keeps_mean", [False, True], ids=["any", "mean kept"])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 36, 50, 384])
def test_a_rotation_is_orthogonal(size, keeps_mean):
    r = make_rotation(size, keeps_mean=keeps_mean)
    assert r.dtype == torch.float64
    torch.testing.assert_close(r @ r.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 7, 16, 36, 50, 384])
def test_the_mean_is_preserved_on_request(size):
    ones = torch.ones(size, dtype=torch.float64)
    r = make_rotation(size, keeps_mean=True)
    torch.testing.assert_close(r @ ones, ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(ones @ r, ones, rtol=0, atol=1e-12)


def test_an_outlier_is_spread_over_all_channels():
    x = torch.zeros(384, dtype=torch.float64)
    x[17] = 100
    assert float((x @ make_rotation(384)).abs().max()) == pytest.approx(100 / 384**0.5)
    assert float((x @ make_rotation(384, keeps_mean=True)).abs().max()) < 3 * 100 / 384**0.5


def test_the_rotation_depends_on_the_seed_only():
    assert torch.equal(make_rotation(12, 3), make_rotation(12, 3))
    assert not torch.equal(make_rotation(12, 3), make_rotation(12, 4))
    assert not torch.equal(make_rotation(7, 3), make_rotation(7, 4))
