"""fake_quantize_folded gives the values and gradients of folding, fake-quantizing and unfolding step by step."""

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


def make_weight(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, QParams, Steps]:
    """A weight, factors of both signs, and the parameters of their product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).requires_grad_()
    factor = torch.randn(shape[0], generator=generator)
    wide = weight.detach() * per_row(factor, weight)
    low, high = wide.flatten(1).amin(1), wide.flatten(1).amax(1)
    qparams = choose_qparams(per_row(low, weight), per_row(high, weight), GRID)
    return weight, factor, qparams, make_steps(qparams, GRID, fixed_zero=True)


def per_row(values: Tensor, weight: Tensor) -> Tensor:
    return values.view(-1, *(1 for _ in weight.shape[1:]))


def fold_and_unfold(weight: Tensor, factor: Tensor, qparams: QParams) -> Tensor:
    s = per_row(factor, weight)
    return fake_quantize(weight * s, qparams, GRID, fixed_zero=True) / s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_the_same_as_step_by_step(shape):
    weight, factor, qparams, steps = make_weight(shape)
    assert can_fold(weight, steps)
    folded, expected = (
        fake_quantize_folded(weight, factor, steps, GRID.format),
        fold_and_unfold(weight, factor, qparams),
    )
    torch.testing.assert_close(folded, expected, rtol=1e-6, atol=0)
    grad = torch.randn(shape)
    ours, reference = (torch.autograd.grad(output, weight, grad)[0] for output in (folded, expected))
    assert torch.equal(ours == 0, reference == 0)  # the same are clamped
    assert 0 < int((ours == 0).sum()) <= shape[0]
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=0)
    assert torch.equal(round_trip_folded(weight.detach(), factor, steps, GRID.format), folded)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_tensor", [False, True], ids=["per row", "per tensor"])
def test_the_gradient_of_a_learned_scale_is_the_same_as_step_by_step(shape, per_tensor):
    weight, factor, qparams, _ = make_weight(shape)
    first, second = (
        (qparams.scale.amax() if per_tensor else qparams.scale).mul(0.7).clone().requires_grad_() for _ in range(2)
    )
    steps = Steps(first, None, -128.0, 127.0)
    grad = torch.randn(shape)
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    expected = fold_and_unfold(weight, factor, qparams._replace(scale=second))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
    ours, reference = (
        torch.autograd.grad(output, (weight, scale), grad) for output, scale in ((y, first), (expected, second))
    )
    assert torch.equal(ours[0] == 0, reference[0] == 0)
    assert int((ours[0] == 0).sum()) > 0
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-6, atol=0)
    added = grad.abs().flatten(1).sum(1).div(factor.abs())
    bound = 1e-5 * (added.sum() if per_tensor else per_row(added, weight))
    assert bool(((ours[1] - reference[1]).abs() <= bound).all())


def test_the_gradient_of_a_learned_scale_can_be_differentiated_again():
    weight, factor, qparams, _ = make_weight((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3)
    folded = []
    for run in (True, False):
        scale = qparams.scale.mul(0.7).clone().requires_grad_()
        y = (
            fake_quantize_folded(weight, factor, Steps(scale, None, -128.0, 127.0), GRID.format)
            if run
            else fold_and_unfold(weight, factor, qparams._replace(scale=scale))
        )
        (first,) = torch.autograd.grad(y, scale, grad, create_graph=True)
        folded.append((first, *torch.autograd.grad(first.square().sum(), (scale, weight))))
    for ours, reference in zip(*folded, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, (40, 262), (12, 2304), (9, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("per_tensor", [False, True], ids=["per row", "per tensor"])
@pytest.mark.parametrize("share", [1.01, 1.0, 0.999, 0.9])
def test_clamped_values_are_found_from_the_extremes_of_lines(shape, per_tensor, share):
    weight, factor, qparams, _ = make_weight(shape)
    scale = (qparams.scale.amax() if per_tensor else qparams.scale) * share
    steps = Steps(scale, None, -128.0, 127.0)
    folded = LineExtremes.compute(weight.detach(), factor).find_clamped(steps)
    t = (weight.detach() * per_row(factor, weight) / scale).round().flatten()
    expected = ((t < -128) | (t > 127)).nonzero().view(-1)
    assert len(expected) == 0 if share > 1 else len(expected) > 0 or per_tensor
    if folded is None:
        assert len(expected) > weight.numel() / 1000
    else:
        assert torch.equal(folded.unique(), expected)


@pytest.mark.parametrize("owns_grad", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_the_same_with_known_indices_and_when_it_is_overwritten(shape, is_known, owns_grad):
    weight, factor, _, steps = make_weight(shape)
    indices = LineExtremes.compute(weight.detach(), factor).find_clamped(steps)
    indices = (torch.arange(weight.numel())[is_clamped(weight, factor, steps)]) if indices is None else indices
    grad = torch.randn(shape)
    (expected,) = torch.autograd.grad(fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad.clone())
    incoming = grad.clone()
    y = fake_quantize_folded(
        weight, factor, steps, GRID.format, clamped_indices=indices if is_known else None, owns_grad=owns_grad
    )
    (folded,) = torch.autograd.grad(y, weight, incoming)
    assert torch.equal(folded, expected)
    assert (folded.data_ptr() == incoming.data_ptr()) == owns_grad
    assert owns_grad or torch.equal(incoming, grad)


def is_clamped(weight: Tensor, factor: Tensor, steps: Steps) -> Tensor:
    t = (weight.detach() * per_row(factor, weight) / steps.scale).round().flatten()
    return (t < steps.low) | (t > steps.high)


def test_backward_returns_the_incoming_gradient_when_nothing_is_clamped():
    weight, factor, qparams, steps = make_weight((6, 4, 3, 3))
    wide = steps._replace(scale=qparams.scale * 1.01)
    indices = LineExtremes.compute(weight.detach(), factor).find_clamped(wide)
    assert indices is not None
    assert indices.numel() == 0
    grad = torch.randn(6, 4, 3, 3)
    y = fake_quantize_folded(weight, factor, wide, GRID.format, clamped_indices=indices)
    assert torch.autograd.grad(y, weight, grad)[0].data_ptr() == grad.data_ptr()


def test_it_can_be_differentiated_twice():
    weight, factor, _, steps = make_weight((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(
        fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), grad)
    assert torch.equal(second, 2 * first)
    full = torch.autograd.grad(fake_quantize_folded(weight, factor, steps, GRID.format), weight, grad.detach())[0]
    assert torch.equal(first, full)


def test_a_gradient_in_channels_last_layout_gives_the_same_result():
    weight, factor, _, steps = make_weight((6, 4, 3, 3))
    grad = torch.randn(6, 4, 3, 3)
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    ours = torch.autograd.grad(y, weight, grad.to(memory_format=torch.channels_last), retain_graph=True)[0]
    assert torch.equal(ours, torch.autograd.grad(y, weight, grad)[0])


def test_a_weight_that_is_written_to_before_backward_is_an_error():
    weight, factor, _, steps = make_weight((6, 4, 3, 3))
    y = fake_quantize_folded(weight, factor, steps, GRID.format)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extremes_of_rows_equal_the_extremes_of_the_product(shape):
    weight, factor, _, _ = make_weight(shape)
    wide, folded = weight.detach() * per_row(factor, weight), LineExtremes.compute(weight.detach(), factor).extremes()
    block = (1, *shape[1:])
    assert folded.ndim == len(shape)
    for one, other in zip(min_max(folded, (1, *folded.shape[1:])), min_max(wide, block), strict=True):
        assert torch.equal(one, other)
