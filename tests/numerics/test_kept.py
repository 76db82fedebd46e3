"""Backward reads codes: gradients are the same bit for bit, and what is kept is a byte an element."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scalepoint.numerics import Grid, QParams, fake_quantize, format_of, keeping, kept
from scalepoint.quantize import QuantConfig, TensorQuantConfig, prepare_qat, quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def grid_of(name):
    fmt = format_of(getattr(torch, name))
    return Grid(fmt, fmt.low, fmt.high, "asymmetric", "zp")


def quantized(x, name="uint8", scale=0.037, zero=100, learns=False):
    qparams = QParams(torch.tensor(scale, requires_grad=learns), torch.tensor(zero, dtype=torch.int32), None)
    return fake_quantize(x, qparams, grid_of(name)), qparams.scale


def run(dtype, keeps, name="uint8", zero=100, learns=False):
    torch.manual_seed(0)
    x = torch.randn(64, 32).mul(2).to(dtype).requires_grad_()
    weight = torch.randn(16, 32).to(dtype).requires_grad_()
    y, scale = quantized(x, name, zero=zero, learns=learns)
    if keeps:
        with keeping(y):
            z = F.linear(y, weight)
    else:
        z = F.linear(y, weight)
    z.float().square().mean().backward()
    return x.grad, weight.grad, scale.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero"), [("uint8", 100), ("int8", 0), ("int4", -3)])
@pytest.mark.parametrize("learns", [False, True])
def test_the_gradients_are_the_same(dtype, name, zero, learns):
    kept, plain = run(dtype, True, name, zero, learns), run(dtype, False, name, zero, learns)
    assert all(a is None or torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_a_byte_an_element_is_kept_in_a_training_net(monkeypatch):
    packed = []
    original = kept._packed
    monkeypatch.setattr(kept, "_packed", lambda *given: packed.append(original(*given)) or packed[-1])
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 12, 12)
    config = QuantConfig(activation=TensorQuantConfig(symmetric=False))
    model = prepare_qat(quantize(net, x, config, forward_loop=[x], freeze_weights=False, progress=False))
    model.train()
    model(x).sum().backward()
    assert [tuple(each.codes.shape) for each in packed] == [(2, 4, 10, 10)]
    assert all(each.codes.dtype == torch.uint8 for each in packed)


def test_a_scale_that_changes_before_backward_does_no_harm():
    x = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(16, 32, requires_grad=True)
    scale = torch.tensor(0.05)
    y = fake_quantize(x, QParams(scale, torch.tensor(128, dtype=torch.int32), None), grid_of("uint8"))
    with keeping(y):
        z = F.linear(y, weight)
    scale.mul_(3)
    z.sum().backward()
    torch.testing.assert_close(weight.grad, y.detach().sum(0).expand(16, -1), rtol=1e-5, atol=1e-4)


def test_other_tensors_are_kept_as_they_are():
    x = torch.randn(8, 8, requires_grad=True)
    with keeping(x):
        z = (x * x).sum()
    z.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_with_activation_checkpointing_the_gradients_are_the_same():
    def block(x, weight):
        y, _ = quantized(x)
        with keeping(y):
            return F.linear(y, weight).relu()

    found = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        z = checkpoint(block, x, weight, use_reentrant=False) if is_checkpointed else block(x, weight)
        z.square().mean().backward()
        found.append((x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
