"""Sums of moments against the rows themselves, in float64."""

import torch

from scalepoint.tuning.moments import Sums


def rows(count=400, groups=2, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(count, groups, size, generator=generator) @ torch.randn(size, size, generator=generator) + 3.0
    return exact, exact + 0.1 * torch.randn(count, groups, size, generator=generator) - 0.2


def test_they_are_those_of_all_rows_in_any_batches():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    found = []
    for size in (400, 64, 7):
        sums = Sums(weight)
        for part in zip(exact.split(size), noisy.split(size), strict=True):
            sums.add(*part)
        found.append(sums.moments())
    x, z = exact.double(), noisy.double()
    cx, cz = x - x.mean(0), z - z.mean(0)
    for moments in found:
        torch.testing.assert_close(moments.mean, x.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(moments.noisy, torch.einsum("rgn,rgm->gnm", cz, cz) / 400, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(moments.cross, torch.einsum("rgn,rgm->gnm", cx, cz) / 400, rtol=1e-5, atol=1e-5)


def test_the_error_is_that_of_the_outputs():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    values = weight + 0.05 * torch.randn_like(weight)
    sums = Sums(weight)
    sums.add(exact, noisy)
    moments = sums.moments()
    y = torch.einsum("rgn,gon->rgo", exact.double(), weight)
    found = torch.einsum("rgn,gon->rgo", noisy.double(), values)
    mismatch = moments.mismatch(weight, values)
    torch.testing.assert_close(mismatch, (y - found).mean(0), rtol=1e-4, atol=1e-4)
    error = moments.error(weight, values, mismatch)
    torch.testing.assert_close(error, (y - found).square().mean(0), rtol=1e-3, atol=1e-4)
    shifted = (y - found - mismatch).square().mean(0)
    torch.testing.assert_close(moments.error(weight, values), shifted, rtol=1e-3, atol=1e-4)


def test_nothing_seen_is_no_moments():
    sums = Sums(torch.zeros(1, 1, 3))
    sums.add(torch.zeros(0, 1, 3), torch.zeros(0, 1, 3))
    assert sums.moments() is None
