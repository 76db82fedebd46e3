"""A weight folded with its batch norm, quantized and unfolded in one pass: as the formulas say, step by step."""

import pytest
import torch
from torch import Tensor

from scalepoint.numerics import (
    LineExtremes,
    QParams,
    Steps,
    can_fold,
    choose_qparams,
    fake_quantize,
    fake_quantize_folded,
    make_steps,
    min_max,
    round_trip_folded,
)
from scalepoint.numerics.formats import Grid, QuantizationScheme, get_format

GRID = Grid(get_format(torch.int8), -128, 127, QuantizationScheme.SYMMETRIC)
SHAPES = [(6, 4, 3, 3), (70, 50, 5, 5), (3, 100_000)]


def made(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, QParams, Steps]:
    """A weight, factors of both signs, and the parameters of their product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).requires_grad_()
    factor = torch.randn(shape[0], generator=generator)
    wide = weight.detach() * across(factor, weight)
    low, high = wide.flatten(1).amin(1), wide.flatten(1).amax(1)
    qparams = choose_qparams(across(low, weight), across(high, weight), GRID)
    return weight, factor, qparams, make_steps(qparams, GRID, fixed_zero=True)


def across(values: Tensor, weight: Tensor) -> Tensor:
    return values.view(-1, *(1 for _ in weight.shape[1:]))


def plain(weight: Tensor, factor: Tensor, qparams: QParams) -> Tensor:
    s = across(factor, weight)
    return fake_quantize(weight * s, qparams, GRID, fixed_zero=True) / s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_formulas(shape):
    weight, factor, qparams, steps = made(shape)
    assert can_fold(weight, steps)
    found, wanted = fake_quantize_folded(weight, factor, steps, GRID.format), plain(weight, factor, qparams)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    grad = torch.randn(shape)
    ours, theirs = (torch.autograd.grad(each, weight, grad)[0] for each in (found, wanted))
    assert torch.equal(ours == 0, theirs == 0)  # the same are clamped
    assert 0 < int((ours == 0).sum()) <= shape[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert torch.equal(round_trip_folded(weight.detach(), factor, steps, GRID.format), found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("one", [False, True], ids=["a row", "one"])
def test_a_learned_scale_has_the_gradient_of_the_formulas(shape, one):
    weight, factor, qparams, _ = made(shape)
    first, second = (
        (qparams.scale.amax() if one else qparams.scale).mul(0.7).clone().requires_grad_() for _ in range(2)
    )
    steps = Steps(first, None, -128.0, 127.0)
    grad = torch.randn(shape)
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    wanted = plain(weight, factor, qparams._replace(scale=second))
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(each, (weight, scale), grad) for each, scale in ((y, first), (wanted, second)))
    assert torch.equal(ours[0] == 0, theirs[0] == 0)
    assert int((ours[0] == 0).sum()) > 0
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    added = grad.abs().flatten(1).sum(1).div(factor.abs())
    bound = 1e-5 * (added.sum() if one else across(added, weight))
    assert bool(((ours[1] - theirs[1]).abs() <= bound).all())


def test_the_gradient_of_a_learned_scale_can_be_differentiated_again():
    weight, factor, qparams, _ = made((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3)
    found = []
    for run in (True, False):
        scale = qparams.scale.mul(0.7).clone().requires_grad_()
        y = (
            fake_quantize_folded(weight, factor, Steps(scale, None, -128.0, 127.0), GRID.format)
            if run
            else plain(weight, factor, qparams._replace(scale=scale))
        )
        (once,) = torch.autograd.grad(y, scale, grad, create_graph=True)
        found.append((once, *torch.autograd.grad(once.square().sum(), (scale, weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, (40, 262), (12, 2304), (9, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("one", [False, True], ids=["a row", "one"])
@pytest.mark.parametrize("share", [1.01, 1.0, 0.999, 0.9])
def test_what_is_clamped_is_found_from_the_extremes_of_lines(shape, one, share):
    weight, factor, qparams, _ = made(shape)
    scale = (qparams.scale.amax() if one else qparams.scale) * share
    steps = Steps(scale, None, -128.0, 127.0)
    found = LineExtremes.compute(weight.detach(), factor).find_clamped(steps)
    t = (weight.detach() * across(factor, weight) / scale).round().flatten()
    wanted = ((t < -128) | (t > 127)).nonzero().view(-1)
    assert len(wanted) == 0 if share > 1 else len(wanted) > 0 or one
    if found is None:
        assert len(wanted) > weight.numel() / 1000
    else:
        assert torch.equal(found.unique(), wanted)


@pytest.mark.parametrize("owns_grad", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_the_same_where_the_clamped_places_are_known_and_where_it_is_written_to(
    shape, is_known, owns_grad
):
    weight, factor, _, steps = made(shape)
    places = LineExtremes.compute(weight.detach(), factor).find_clamped(steps)
    places = (torch.arange(weight.numel())[wanted_mask(weight, factor, steps)]) if places is None else places
    grad = torch.randn(shape)
    (wanted,) = torch.autograd.grad(fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad.clone())
    given = grad.clone()
    y = fake_quantize_folded(
        weight, factor, steps, GRID.format, places=places if is_known else None, owns_grad=owns_grad
    )
    (found,) = torch.autograd.grad(y, weight, given)
    assert torch.equal(found, wanted)
    assert (found.data_ptr() == given.data_ptr()) == owns_grad
    assert owns_grad or torch.equal(given, grad)


def wanted_mask(weight: Tensor, factor: Tensor, steps: Steps) -> Tensor:
    t = (weight.detach() * across(factor, weight) / steps.scale).round().flatten()
    return (t < steps.low) | (t > steps.high)


def test_what_is_known_to_be_inside_costs_no_pass():
    weight, factor, qparams, steps = made((6, 4, 3, 3))
    wide = steps._replace(scale=qparams.scale * 1.01)
    places = LineExtremes.compute(weight.detach(), factor).find_clamped(wide)
    assert places is not None
    assert places.numel() == 0
    grad = torch.randn(6, 4, 3, 3)
    y = fake_quantize_folded(weight, factor, wide, GRID.format, places=places)
    assert torch.autograd.grad(y, weight, grad)[0].data_ptr() == grad.data_ptr()


def test_it_can_be_differentiated_twice():
    weight, factor, _, steps = made((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3, requires_grad=True)
    (once,) = torch.autograd.grad(
        fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad, create_graph=True
    )
    (twice,) = torch.autograd.grad(once.square().sum(), grad)
    assert torch.equal(twice, 2 * once)
    whole = torch.autograd.grad(fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad.detach())[0]
    assert torch.equal(once, whole)


def test_a_gradient_in_another_layout_counts_as_well():
    weight, factor, _, steps = made((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3)
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    ours = torch.autograd.grad(y, weight, grad.to(memory_format=torch.channels_last), retain_graph=True)[0]
    assert torch.equal(ours, torch.autograd.grad(y, weight, grad)[0])


def test_a_weight_that_was_written_to_before_backward_is_noticed():
    weight, factor, _, steps = made((6, 4, 3, 3))
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extremes_of_rows_are_exactly_those_of_the_product(shape):
    weight, factor, _, _ = made(shape)
    wide, found = weight.detach() * across(factor, weight), LineExtremes.compute(weight.detach(), factor).extremes()
    block = (1, *shape[1:])
    assert found.ndim == len(shape)
    for one, other in zip(min_max(found, (1, *found.shape[1:])), min_max(wide, block), strict=True):
        assert torch.equal(one, other)
