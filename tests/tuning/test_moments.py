"""Sums of moments against the rows themselves, in float64."""

import pytest
import torch

from scalepoint.tuning.moments import ErrorAroundWeight, MomentSums, ResidualSums


def rows(count=400, groups=2, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(count, groups, size, generator=generator) @ torch.randn(size, size, generator=generator) + 3.0
    return exact, exact + 0.1 * torch.randn(count, groups, size, generator=generator) - 0.2


def outputs(x, weight):
    return torch.einsum("rgn,gon->rgo", x, weight.float())


def test_moments_do_not_depend_on_the_batch_size():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    results = []
    for size in (400, 64, 7):
        sums = MomentSums()
        for part, expected in zip(noisy.split(size), outputs(exact, weight).split(size), strict=True):
            sums.add(part, expected)
        results.append(sums.to_moments())
    x, z = exact.double(), noisy.double()
    y = torch.einsum("rgn,gon->rgo", x, weight)
    cy, cz = y - y.mean(0), z - z.mean(0)
    for moments in results:
        torch.testing.assert_close(moments.mean, z.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(moments.mean_target, y.mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(moments.hessian, torch.einsum("rgn,rgm->gnm", cz, cz) / 400, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(moments.cross, torch.einsum("rgo,rgm->gom", cy, cz) / 400, rtol=1e-4, atol=1e-4)


def test_the_error_of_values_is_the_error_of_their_outputs():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    values = weight + 0.05 * torch.randn_like(weight)
    sums = MomentSums()
    sums.add(noisy, outputs(exact, weight))
    moments = sums.to_moments()
    y = torch.einsum("rgn,gon->rgo", exact.double(), weight)
    result = torch.einsum("rgn,gon->rgo", noisy.double(), values)
    mismatch = moments.mean_mismatch(values)
    torch.testing.assert_close(mismatch, (y - result).mean(0), rtol=1e-4, atol=1e-4)
    error = moments.error(values, mismatch)
    torch.testing.assert_close(error, (y - result).square().mean(0), rtol=1e-3, atol=1e-4)
    shifted = (y - result - mismatch).square().mean(0)
    torch.testing.assert_close(moments.error(values), shifted, rtol=1e-3, atol=1e-4)


def test_row_weights_give_weighted_means():
    exact, noisy = rows()
    weight, counts = torch.randn(2, 4, 5, dtype=torch.float64), torch.rand(400) + 0.1
    y, sums = outputs(exact, weight), MomentSums()
    for part in (slice(0, 150), slice(150, 400)):
        sums.add(noisy[part], y[part], counts[part])
    moments, share = sums.to_moments(), (counts.double() / counts.double().sum())[:, None, None]
    z, y = noisy.double(), y.double()
    cz, cy = z - (z * share).sum(0), y - (y * share).sum(0)
    torch.testing.assert_close(moments.mean, (z * share).sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.hessian, torch.einsum("rgn,rgm->gnm", cz * share, cz), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moments.cross, torch.einsum("rgo,rgm->gom", cy * share, cz), rtol=1e-4, atol=1e-4)


def test_without_a_bias_the_means_are_part_of_the_error():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    values, sums = weight + 0.05, MomentSums()
    sums.add(noisy, outputs(exact, weight))
    raw = sums.to_moments().around_zero()
    y, result = (torch.einsum("rgn,gon->rgo", x.double(), w) for x, w in ((exact, weight), (noisy, values)))
    torch.testing.assert_close(raw.error(values), (y - result).square().mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ErrorAroundWeight(raw, weight).error(values), raw.error(values), rtol=1e-3, atol=1e-4)
    assert not raw.mean_mismatch(values).any()


def test_rows_of_zeros_are_not_counted():
    sums = MomentSums()
    sums.add(torch.zeros(5, 1, 3), torch.zeros(5, 1, 2))
    assert sums.to_moments() is None
    sums.add(torch.ones(2, 1, 3), torch.ones(2, 1, 2))
    assert sums.to_moments().count == 2


def test_without_rows_there_are_no_moments():
    sums = MomentSums()
    sums.add(torch.zeros(0, 1, 3), torch.zeros(0, 1, 2))
    assert sums.to_moments() is None


@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_of_inputs_give_the_same_moments_as_sums_of_outputs(is_weighted):
    exact, noisy = rows()
    weight, counts = torch.randn(2, 9, 5), torch.rand(400) + 0.1 if is_weighted else None
    through, plain = MomentSums(weight), MomentSums()
    for part in (slice(0, 150), slice(150, 400)):
        by = None if counts is None else counts[part]
        through.add(noisy[part], exact[part], by)
        plain.add(noisy[part], outputs(exact[part], weight), by)
    result, expected = through.to_moments(), plain.to_moments()
    for name in ("mean", "hessian", "cross", "mean_target", "target_variance"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)


def test_selected_outputs_have_the_moments_of_these_outputs_alone():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    both, alone = MomentSums(), MomentSums()
    both.add(noisy, outputs(exact, weight))
    alone.add(noisy, outputs(exact, weight[:, 1:3]))
    values = weight[:, 1:3] * 0.9
    result, expected = both.to_moments().select_outputs(slice(1, 3)), alone.to_moments()
    torch.testing.assert_close(result.error(values), expected.error(values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.mean_mismatch(values), expected.mean_mismatch(values), rtol=1e-5, atol=1e-5)


def test_residual_sums_give_the_mean_and_error_without_products():
    exact, noisy = rows()
    weight = torch.randn(2, 4, 5, dtype=torch.float64)
    values = weight + 0.05
    expected, result = outputs(exact, weight), outputs(noisy, values)
    means = ResidualSums()
    for part in zip(result.split(64), expected.split(64), strict=True):
        means.add(*part)
    torch.testing.assert_close(means.mean, (expected - result).double().mean(0), rtol=1e-4, atol=1e-4)
    variance = float(expected.double().var(0, unbiased=False).sum())
    after = (expected - result).double().var(0, unbiased=False).sum()
    assert means.error() == pytest.approx(
        float((expected - result).double().square().mean(0).sum()) / variance, rel=1e-3
    )
    assert means.error(means.mean) == pytest.approx(float(after) / variance, rel=1e-3)
