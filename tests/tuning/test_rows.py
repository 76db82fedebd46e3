"""Rows times weight are the output of every kind of layer, and the sample of rows does not depend on the batch size."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import QuantConfig, TensorQuantConfig, disable_fake_quant, quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.tuning.rows import get_geometry, hash_to_uniform, sample_rows

LAYERS = {
    "linear": (nn.Linear(6, 5), (3, 4, 6)),
    "conv": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 8)),
    "strided": (nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2)), (2, 4, 9, 8)),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 6)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 6, 6)),
    "same": (nn.Conv2d(4, 6, 4, padding="same"), (2, 4, 6, 7)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, stride=2), (2, 4, 9)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 5)),
    "transposed groups": (nn.ConvTranspose2d(4, 6, 3, stride=3, dilation=2, groups=2), (2, 4, 4, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_weight_are_the_output(name):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    x = torch.randn(shape)
    config = QuantConfig(activation="float", weight=TensorQuantConfig(per_channel=True))
    model = quantize(nn.Sequential(layer).eval(), x, config)
    disable_fake_quant(model)
    weighted = next(layer for layer in model.modules() if isinstance(layer, QuantizedLayer))
    geometry = get_geometry(weighted)
    rows = geometry.rows(x, torch.arange(geometry.count_rows(x.shape)))
    weight = geometry.to_groups(weighted.to_output_first(weighted.weight))
    result = torch.einsum("rgn,gon->rgo", rows, weight).flatten(1)
    with torch.no_grad():
        expected = layer(x)
    expected = expected.flatten(0, -2) if name == "linear" else expected.movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(result + layer.bias, expected, rtol=1e-4, atol=1e-4)
    stored = weighted.to_output_first(weighted.weight)
    assert torch.equal(geometry.from_groups(weight, stored), stored)


def test_the_sampled_rows_do_not_depend_on_the_batch_size():
    all_at_once = sample_rows(0, 600, 0.2)
    parts = [sample_rows(first, 200, 0.2) + first for first in (0, 200, 400)]
    assert torch.equal(torch.cat(parts), all_at_once)
    assert 60 < len(all_at_once) < 180


def test_hashed_numbers_are_uniform_and_reproducible():
    result = hash_to_uniform(torch.arange(100_000))
    assert float(result.min()) >= 0.0
    assert float(result.max()) < 1.0
    assert abs(float(result.mean()) - 0.5) < 0.005
    assert abs(float((result < 0.1).double().mean()) - 0.1) < 0.005
    assert hash_to_uniform(torch.tensor([0, 1, 2])).tolist() == hash_to_uniform(torch.tensor([0, 1, 2])).tolist()
    assert not torch.equal(hash_to_uniform(torch.arange(10)), hash_to_uniform(torch.arange(10), salt=1))
