"""Layers whose weight or bias is computed from other parameters: quantizing, smoothing, saving, training."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.quantize import (
    QuantConfig,
    SmoothQuantConfig,
    calibrate,
    disable_fake_quant,
    freeze,
    insert_qdq,
    load,
    prepare_qat,
    save,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.transformation import transform


class Net(nn.Module):
    """A norm, two layers with parts of one packed matrix, biases around zeros, a standardized convolution."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.packed = nn.Parameter(torch.randn(32, 16))
        self.bias = nn.Parameter(torch.randn(8))
        self.kernel = nn.Parameter(torch.randn(4, 16, 3))

    def forward(self, x):
        first, second = self.packed.chunk(2)
        x = self.norm(x)
        x = F.linear(x, first) * F.linear(x, second, torch.cat((self.bias, torch.zeros(8)))).sigmoid()
        kernel = self.kernel / self.kernel.norm(dim=(1, 2), keepdim=True)
        return F.conv1d(x.transpose(1, 2), kernel, padding=1)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 6, 16)


def make_quantized(x, **options):
    torch.manual_seed(1)
    model = Net().eval()
    result = transform(model, x, target="reference")
    return model, insert_qdq(result.model, result.matches, QuantConfig(**options))


def test_each_computed_weight_has_its_own_quantizer(x):
    _, quantized = make_quantized(x)
    layers = [module for module in quantized.modules() if isinstance(module, QuantizedLayer)]
    assert len(layers) == 3
    assert len({id(layer.weight_quant) for layer in layers}) == 3


def test_the_eval_cache_is_updated_after_a_write_to_a_parameter(x):
    model, quantized = make_quantized(x)
    calibrate(quantized, [x])
    with torch.no_grad():
        before = quantized(x)
        for net in (model, quantized):
            net.packed.mul_(0.5)
            net.kernel.add_(1)
        after = quantized(x)
    assert not torch.equal(before, after)
    assert (after - model(x)).norm() < 0.1 * model(x).norm()


def test_smoothing_skips_computed_weights_with_a_reason(x):
    model, quantized = make_quantized(x, smooth_quant=SmoothQuantConfig(enabled=True))
    calibrate(quantized, [x])
    disable_fake_quant(quantized)
    torch.testing.assert_close(quantized(x), model(x))


def test_computed_weights_are_saved_and_loaded(x, tmp_path):
    model, quantized = make_quantized(x)
    calibrate(quantized, [x])
    freeze(quantized)
    save(quantized, tmp_path / "saved")
    loaded = load(tmp_path / "saved", model, x)
    with torch.no_grad():
        assert torch.equal(loaded(x), quantized(x))


def test_training_reaches_the_parameters_of_computed_weights(x):
    _, quantized = make_quantized(x)
    calibrate(quantized, [x])
    prepare_qat(quantized)
    quantized.train()
    optimizer = torch.optim.SGD(quantized.parameters(), 0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = quantized(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(getattr(quantized, name).grad is not None for name in ("packed", "bias", "kernel"))
    assert losses[-1] < losses[0]
