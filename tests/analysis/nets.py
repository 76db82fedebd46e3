"""Small nets for the analysis, one with a layer that is quantized badly on purpose."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from scalepoint.quantize import (
    Override,
    QuantConfig,
    QuantStub,
    TensorQuantConfig,
    WeightFakeQuantize,
    calibrate,
    insert_qdq,
)
from scalepoint.transformation import transform
from tests.models import Decoder, ResNet, SilentSkip, UNet, with_norm_statistics

FINE = TensorQuantConfig(per_channel=True)
COARSE = Override(name="third", weight=TensorQuantConfig(n_bits=2, per_channel=True))


class Net(nn.Module):
    """Five layers; dropout and batch norm tell when a mode is wrong."""

    def __init__(self):
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.fourth = nn.Linear(16, 16)
        self.fifth = nn.Linear(16, 5)

    def forward(self, x):
        x = self.second(self.bn(self.first(x)).relu()).relu().mean((2, 3))
        return self.fifth(self.fourth(self.drop(self.third(x))))


def float_net():
    torch.manual_seed(0)
    return with_norm_statistics(Net())


def batches(count=3, seed=1, size=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 6, 6, generator=generator) for _ in range(count)]


def config(*overrides, **fields):
    return QuantConfig(**{"activation": TensorQuantConfig(), "weight": FINE, **fields}, overrides=overrides)


@cache
def transformed():
    return transform(float_net(), batches(1)[0])


def quantized_net(*overrides, **fields):
    result = transformed()
    model = insert_qdq(result.model, result.matches, config(*overrides, **fields))
    calibrate(model, batches(), freeze_weights=True, correct_bias=False)
    return model.eval()


def quantizers(model):
    return [quantizer for quantizer in model.modules() if isinstance(quantizer, QuantStub | WeightFakeQuantize)]


def snapshot(model):
    """All that an analysis could leave changed."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [
            (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ],
        [quantizer.enabled for quantizer in quantizers(model)],
        [parameter.grad for parameter in model.parameters()],
        copy.copy(getattr(model, "meta", {})),
    )


def same(before, after):
    assert before[0].keys() == after[0].keys()
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name
    assert before[1:4] == after[1:4]
    assert before[4].keys() == after[4].keys()


def decibels(reference, value):
    reference, value = reference.double(), value.double()
    return float(10 * torch.log10(reference.square().sum() / (reference - value).square().sum()))


def some_models():
    """Real layouts, narrow: (make, inputs, target)."""
    image, small = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 16, 16)
    return [
        pytest.param(lambda: ResNet((1, 1, 1, 1), 8, 5), image, "onnxruntime", id="resnet"),
        pytest.param(UNet, small, "tensorrt", id="unet", marks=pytest.mark.slow),
        pytest.param(lambda: Decoder(layers=1), torch.randint(0, 50, (2, 6)), "tensorrt", id="decoder"),
        pytest.param(SilentSkip, torch.randn(2, 4, 8), "onnxruntime", id="recurrent"),
    ]
